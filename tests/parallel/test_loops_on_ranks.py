"""`autoac.auto` on two real processes (gloo): one plan, or one error; and processes that die."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.ranks import run_ranks


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("auto_worker.py", tmp_path_factory.mktemp("loops"))


def of(told: list[dict[str, Any]], case: str) -> list[Any]:
    found = [rank[case] for rank in told]
    for rank in found:
        assert "raised" not in rank, rank
    return found


@pytest.mark.parametrize("case", ["ddp", "fsdp", "sizes_differ"])
def test_all_ranks_run_under_one_plan(told: Any, case: str):
    first, second = of(told, case)
    assert first["id"] == second["id"]
    for rank in (first, second):
        assert rank["equal"]
        assert rank["recomputing"]
        assert rank["sample"] == "float32[128,32]"  # where sizes differ, the larger one
        assert rank["clean"]
        assert rank["measured"] <= rank["budget"]
    assert abs(second["measured"] / second["predicted"] - 1) < 0.01


def test_the_others_join_a_rank_that_meets_a_larger_batch(told: Any):
    first, second = of(told, "one_rank_meets_a_larger_batch")
    assert first["recomputing"]
    assert first["equal"]
    assert second["equal"]
    assert first["id"] == second["id"]
    small, large = "float32[128,32]", "float32[256,32]"
    # Rank 1 records its fourth step, and in the fifth both have a plan for that.
    assert first["samples"] == [None, small, small, small, large, large]
    assert second["samples"] == [None, small, small, None, large, large]


def test_a_late_rank_is_waited_for(told: Any):
    first, second = of(told, "one_rank_is_late")
    assert first["equal"]
    assert second["equal"]
    assert first["id"] == second["id"]
    words = "rank 1 has not come for 1.5 s, while the ranks settle on a plan for their loop."
    assert any(said.startswith(words) for said in first["warned"])
    assert not any("has not come" in said for said in second["warned"])


def test_no_rank_begins_a_step_that_one_refuses(told: Any):
    words = "ParallelError: rank 1 does not begin the step: the model is called with float32[256,32]"
    ranks = of(told, "one_rank_refuses_a_larger_batch")
    for steps, first, second in zip((4, 1), *ranks, strict=True):
        assert first["error"] == second["error"]
        assert first["error"].startswith(words)
        assert first["steps"] == second["steps"] == steps
        assert max(first["seconds"], second["seconds"]) < 30


def test_no_rank_refuses_what_one_alone_would_not(told: Any):
    for rank in of(told, "other_parameters_are_trained"):
        assert rank["sample"] == "float32[128,32]"


def test_where_no_plan_fits_a_later_step_all_go_on_under_the_one_of_the_least_peak(told: Any):
    first, second = of(told, "no_plan_fits_what_is_trained_later")
    assert first["ids"] == second["ids"]
    assert first["ids"][-1] not in (None, first["ids"][2])
    for rank in (first, second):
        assert rank["equal"]
        assert rank["predicted"] > rank["budget"]
    assert second["predicted"] == second["least"]
    assert first["warned"] == []
    [words] = second["warned"]  # the rank whose step takes more
    assert f"No plan fits a budget of {second['budget']} bytes" in words


def test_parameters_that_are_trained_by_turns_end_no_loop(told: Any):
    for rank in of(told, "trained_by_turns"):
        assert rank["equal"]
        assert rank["has_plan"]
        assert len(rank["warned"]) == 1


def test_buckets_that_are_made_anew_in_the_recorded_step_count_once(told: Any):
    for rank in of(told, "gradients_in_buckets_are_cleared_after_the_forward"):
        assert rank["measured"] == rank["predicted"]


def test_a_phase_that_comes_back_begins_with_its_plan_on_all_ranks(told: Any):
    first, second = of(told, "phases")
    assert first["ids"] == second["ids"]
    none, one, _, none_again, other, *_ = first["ids"]
    assert (none, none_again) == (None, None)
    assert one != other
    assert first["ids"] == [None, one, one, None, other, other, one, one, one, other, other, other]
    assert first["equal"]
    assert second["equal"]


def test_a_step_that_took_more_by_values_in_it_is_planned_for_on_all_ranks(told: Any):
    first, second = of(told, "values_decide_on_sizes")
    assert first["id"] == second["id"]
    for rank in (first, second):
        assert rank["equal"]
        assert rank["warned"] == []
        assert rank["peak"] <= rank["budget"]
    assert second["loose"] > second["budget"]


def test_a_model_that_is_sharded_after_auto(told: Any):
    for rank in of(told, "sharded_later"):
        assert rank["equal"]
        assert rank["before"]["id"] == rank["after"]["id"]
        assert rank["before"]["plans"] == [False, True, True, True]
        unplanned = rank["after"]["peaks"][-1]  # the budget is large enough for everything
        assert rank["before"]["peaks"][0] < 0.8 * unplanned


def test_the_file_of_rank_0_is_taken_up_by_all(told: Any):
    first, second = of(told, "restarted")
    assert (first["files"], second["files"]) == (True, False)
    assert first["id"] == second["id"]
    for rank in (first, second):
        assert rank["same"]
        assert rank["at_once"] == [True]


def test_where_one_fails_all_raise_and_nothing_is_left(told: Any):
    settling = "failed while the ranks settle on a plan for their loop:"
    expected = {
        "no_plan_fits": f"rank 0 {settling} InfeasibleBudgetError: No plan fits",
        "budgets_differ": "the ranks do not have the same budget: rank 0 has 1000000000, rank 1 has 1000000001",
        "cannot_be_put_on_one": f"rank 1 {settling} MemoryError: rank 1 has none left",
    }
    for case, words in expected.items():
        first, second = of(told, case)
        assert first["error"] == second["error"]
        assert first["error"].startswith(f"ParallelError: {words}"), first
        assert max(first["seconds"], second["seconds"]) < 30
        assert first["clean"]
        assert second["clean"]


def test_a_rank_that_dies_or_raises_is_an_error_for_the_others(tmp_path: Any):
    first, second = run_ranks("killed.py", tmp_path, timeout_s=300)
    died_in = {
        "in_planning": (second, first, "ParallelError: rank 1 has died while the ranks plan: "),
        "in_forward": (second, first, "RuntimeError"),  # gloo's own
        "in_backward": (second, first, "RuntimeError"),
        "before_settling": (second, first, "ParallelError: rank 1 has given no sign of life for 3 s"),
        "before_settling_rank_0": (first, second, "ParallelError: rank 0 has given no sign of life for 3 s"),
    }
    for case, (dead, survivor, words) in died_in.items():
        assert dead[case] is None
        assert survivor[case]["error"].startswith(words), survivor
        assert survivor[case]["clean"]
        assert 0 <= survivor[case]["seconds"] < 30  # after the death
    # It waits in gloo's receive, which has no time limit of its own.
    for rank in (first, second):
        words = "ParallelError: rank 1 failed while the ranks plan for the stages of their pipeline: "
        assert rank["in_a_stage"]["error"].startswith(words), rank
    assert first["in_a_stage"]["seconds"] < 30
