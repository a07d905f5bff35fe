"""Two real processes on CPU (gloo): one job for all cases, for starting takes longest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autoac
from tests.parallel.models import batch, make
from tests.parallel.ranks import run_ranks

UNITS = ["layers.*", "pair.*"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_ranks("worker.py", tmp_path_factory.mktemp("ranks"))
    assert all(rank is not None for rank in found)
    return [rank for rank in found if rank is not None]


def of(told: list[dict[str, Any]], case: str) -> list[Any]:
    found = [rank[case] for rank in told]
    for rank in found:
        assert not (isinstance(rank, dict) and "raised" in rank), rank
    return found


@pytest.mark.parametrize(
    ("case", "engines"),
    [
        ("fsdp_by_block", ["replay", "sac"]),
        ("fsdp_not_resharded", ["replay"]),
        ("fsdp_in_bfloat16", ["sac"]),
    ],
)
def test_fsdp_trains_the_same_and_takes_what_was_predicted(told: Any, case: str, engines: list[str]):
    for rank in of(told, case):
        for engine in engines:
            predicted, measured, budget = rank[engine]["peaks"]
            assert rank[engine]["equal"]
            assert rank[engine]["wrapped"]
            assert predicted <= budget < rank["unplanned"]
            assert abs(measured / predicted - 1) < 0.01


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("fsdp_by_block", {}),
        ("fsdp_not_resharded", {"reshard_after_forward": False}),
        ("fsdp_gathers_two_ahead", {"prefetch": 2}),
    ],
)
def test_one_process_predicts_what_the_ranks_record(told: Any, case: str, options: dict[str, Any]):
    spec = autoac.parallel.FSDP2(world_size=2, units=UNITS, **options)
    profile = autoac.profile(make(), batch(), mode="fake", parallel=spec)
    loose = autoac.solve(profile, "1GB")
    for rank in of(told, case):
        assert rank["resident"] == profile.resident_bytes
        assert abs(rank["unplanned"] / loose.predicted_peak_bytes - 1) < 0.01
    if "prefetch" in options:
        assert loose.predicted_peak_bytes > of(told, "fsdp_by_block")[0]["unplanned"]


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_module_with_several_units_is_no_region(told: Any, engine: str):
    for rank in of(told, "region_over_units"):
        why, explained, wrapped = rank[engine]
        assert why.startswith("pair: is no region: it contains units of FSDP2")
        assert "regions can be 'pair.0', 'pair.1'" in why
        assert "it contains units of FSDP2" in explained
        assert wrapped == 0


def test_a_plan_for_the_whole_model_is_refused_when_it_is_sharded(told: Any):
    for rank in of(told, "sharded_after_the_plan"):
        for words in (rank["applied"], rank["called"]):
            assert words.startswith(
                "PlanMismatchError: region 'pair' contains units of FSDP2 ('pair.0', 'pair.1')"
            )


def test_plan_then_shard_in_either_order(told: Any):
    for rank in of(told, "plan_shard_apply"):
        regions = ["layers.0", "layers.1", "layers.2"]
        assert rank == {"equal": True, "regions": regions, "model": "Net", "names": True}


def test_distributed_checkpoints_have_the_names_they_had(told: Any):
    for rank in of(told, "checkpoints"):
        assert rank == {"names": True, "equal": True}


def test_fsdp1_is_refused(told: Any):
    for rank in of(told, "fsdp1_is_refused"):
        for words in rank:
            assert words.startswith(
                "ProfilingError: this model is sharded by FullyShardedDataParallel (FSDP1)"
            )


def test_profiling_leaves_a_sharded_model_as_it_was(told: Any):
    for rank in of(told, "leaves_no_trace"):
        assert rank == {"same": True, "grads": False, "kinds": ["DTensor"]}


def test_buckets_of_ddp_are_counted(told: Any):
    for rank in of(told, "ddp"):
        assert set(rank) == {"wrapped", "inside", "before"}
        for predicted, measured, equal in rank.values():
            assert equal
            assert abs(measured / predicted - 1) < 0.01


def test_compiled_inside_and_around_the_wrapper_before_and_after_the_plan(told: Any):
    for rank in of(told, "compiled"):
        found, engine, regions = rank
        assert len(found) == 4
        assert [name for name, one in found.items() if not one["equal"] or not one["names"]] == []
        assert min(one["saved"] for one in found.values()) >= 128 * 128 * 4  # one gelu's result at least
        assert (engine, regions) == ("sac", ["layers.0"])


def test_static_graph(told: Any):
    for rank in of(told, "ddp_with_a_static_graph"):
        assert rank["late"]
        assert rank["first"]
        for words in rank["early"]:
            assert words.startswith(
                "ProfilingError: this model is in a DistributedDataParallel with static_graph=True"
            )
            assert "Plan before wrapping" in words


def test_all_ranks_have_one_plan_for_the_largest_batch(told: Any):
    first, second = of(told, "one_plan")
    assert first == second
    assert first["sample"] == first["largest"] == "float32[128,32]"
    assert first["shared"]


def test_errors_are_the_same_on_all_ranks_and_soon(told: Any):
    expected = {
        "a_batch_refused": "rank 1 failed while the ranks plan: ProfilingError: sample is a list",
        "a_batch_too_large_on_one": "rank 1 failed while the ranks plan: InfeasibleBudgetError: No plan fits",
        "no_plan_fits": "rank [01] failed while the ranks plan: InfeasibleBudgetError: No plan fits",
        "one_that_fails_in_its_step": "rank 1 failed while the ranks plan: ArithmeticError: the loss of rank 1 is odd",
    }
    for case, words in expected.items():
        first, second = of(told, case)
        assert first["error"] == second["error"], case
        assert re.match(f"ParallelError: {words}", first["error"]), first
        assert max(first["seconds"], second["seconds"]) < 30
    # The plan does not fit the model of either rank; the first to find that is named.
    refusals = [
        "the ranks do not have the same model",
        "rank [01] failed",
        "the ranks do not have the same optimizer: rank 0 has SGD, rank 1 has AdamW",
        "the ranks have called different things: rank 0 is to plan, and rank 1 to record a step",
    ]
    for index, words in enumerate(refusals):
        first, second = (rank[index]["error"] for rank in of(told, "another_model"))
        assert first == second
        assert re.match(f"ParallelError: {words}", first), first


def test_the_example_runs_as_printed():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "solver")])}
    done = subprocess.run(
        [*command, "examples/fsdp2.py"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Plan(GPT, engine='replay', budget=7 MB" in done.stdout
    assert "at the peak: {'parameters'" in done.stdout
