"""Real processes (gloo) that plan for steps which wait for each other, in ways that only the step itself shows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.ranks import run_ranks

FAILED = "ParallelError: rank {} failed while the ranks plan: "
BROKEN = FAILED.format(1) + "ValueError: it is broken here"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks("meeting_worker.py", tmp_path_factory.mktemp("meeting"), timeout_s=200)


def of(told: list[dict[str, Any]], case: str) -> list[list[dict[str, Any]]]:
    """What each rank tells, in the order of ranks."""
    even, odd = (process[case] for process in told)
    found = [rank for pair in zip(even, odd, strict=True) for rank in pair]
    assert None not in found, f"of {case}, a rank has told nothing"
    return found


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("in_the_ring", "plan"),
        ("before_it_reduces", "plan"),
        ("before_it_receives", "plan"),
        ("sharded_by_fsdp", "plan"),
        ("sharded_and_profiled", "record a step"),
        ("sharded_and_verified", "verify a plan"),
    ],
)
def test_a_rank_that_fails_in_its_step_is_an_error_for_all(told: Any, case: str, what: str):
    [first], [second] = of(told, case)
    assert first["error"] == second["error"] == BROKEN.replace("plan", what)
    assert second["over"] < first["over"] < second["over"] + 20


def test_ranks_that_call_different_things_are_an_error_for_all(told: Any):
    words = "rank 0 is to verify a plan, and rank 1 to verify a plan in 2 steps."
    [first], [second] = of(told, "sharded_and_at_odds")
    assert (
        first["error"] == second["error"] == f"ParallelError: the ranks have called different things: {words}"
    )


def test_a_rank_that_dies_is_an_error_for_the_others(told: Any):
    [first], _ = of(told, "with_one_that_dies")
    assert first["error"].startswith("ParallelError: rank 1 has died while the ranks plan: ")


def test_a_rank_for_which_no_plan_fits_is_an_error_for_all_and_they_can_plan_again(told: Any):
    """Also for a rank that has met none of the collectives of the one that fails, but others who have."""
    ranks = of(told, "in_two_groups_of_two")
    assert len(ranks) == 4
    [error] = {failed["error"] for failed, _ in ranks}
    assert error.startswith(FAILED.format(3) + "InfeasibleBudgetError: No plan fits")
    assert {again["error"] for _, again in ranks} == {"no error"}


def test_what_a_rank_plans_alone_is_its_own(told: Any):
    first, second = ([one.get("error", "") for one in rank] for rank in of(told, "one_after_another"))
    alone = r"InfeasibleBudgetError: No plan fits"
    jointly = re.escape(FAILED.format(1)) + alone
    expected = (
        [alone, "no error", jointly, "no error", "no error"],
        ["", "", jointly, alone, "no error", re.escape(BROKEN), "no error"],
    )
    for found, words in zip((first, second), expected, strict=True):
        assert len(found) == len(words)
        for one, pattern in zip(found, words, strict=True):
            assert re.match(pattern, one), (one, pattern)
    assert first[2] == second[2]


@pytest.mark.parametrize("case", ["slow", "sharded_and_slow"])
def test_a_slow_rank_is_waited_for(told: Any, case: str):
    for [rank] in of(told, case):
        assert rank["error"] == "no error"


def test_a_late_rank_is_named_and_is_an_error_after_the_timeout_of_the_process_group(told: Any):
    [first], [second] = of(told, "sharded_and_slow")
    words = "rank 1 has not come for 3 s, while the ranks plan. Every rank has to: the same calls of autoac, in the"
    assert any(said.startswith(words) for said in first["warned"])
    assert not any("has not come" in said for said in second["warned"])
    [first], [second] = of(told, "sharded_and_not_there")
    assert first["error"] == second["error"]
    assert first["error"].startswith(
        "ParallelError: rank 1 has not come within the process group's timeout of 6 s, while the ranks plan."
    )
