"""Plans and what CUDA's caching allocator reserves for them."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

import autoac
from autoac_solver.allocator.options import MIB
from autoac_solver.build.build import build
from autoac_solver.plan.partitions import named_calls
from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.plan.reserved import like_parameters, reserved_bytes
from autoac_solver.problem.simulator import simulate
from autoac_solver.records.errors import AllocatorOptionsError, InfeasibleBudgetError, ProfileError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from autoac_solver.show.explanation import explain
from autoac_solver.show.page.render import render_report
from tests.solver.profiles import two_blocks
from tests.solver.show.page.synthetic import decoder_profile

ROOT = Path(__file__).resolve().parents[3]
CONF = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONF, raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@pytest.fixture(scope="module")
def decoder() -> Profile:
    """Three layers on a GPU."""
    return dataclasses.replace(decoder_profile(3), device="cuda", device_bytes=80 * 10**9)


H200 = json.loads((ROOT / "benchmarks" / "results" / "h200" / "results.json").read_text())["results"]


@pytest.mark.parametrize("number", [0, 3, 7])
@pytest.mark.parametrize(("name", "file"), [("gpt", "gpt2-medium-h200"), ("llama", "llama-1b-h200")])
def test_what_was_measured_on_a_gpu(name: str, file: str, number: int):
    """Recorded profiles of the models; the peak is that of `max_memory_allocated`, and what was reserved at that."""
    measured = H200[f"{name}/ours {number}"]
    # The profiles do not count the rests that stay with large blocks.
    plan = plan_profile(
        Profile.load(ROOT / "profiles" / f"{file}.json"), measured["budget_bytes"] + 2 * MIB, gap=0.02
    )
    assert plan.predicted_peak_bytes == pytest.approx(measured["allocated_bytes"], rel=0.02)
    assert plan.predicted_reserved_bytes is not None
    # Another plan for the same budget reserves other segments.
    over = plan.predicted_reserved_bytes - plan.predicted_peak_bytes
    assert over == pytest.approx(
        measured["reserved_bytes"] - measured["allocated_bytes"], abs=0.04 * plan.budget_bytes
    )


def test_the_optimizers_blocks_are_like_the_parameters():
    assert like_parameters(100, [30, 0, 20]) == [30, 20, 30, 20]
    assert like_parameters(45, [30, 20]) == [30, 15]
    assert like_parameters(45, []) == [45]
    assert like_parameters(0, [30]) == []


def in_mib(profile: Profile) -> Profile:
    """The profile with MiB for bytes."""
    table = tuple(dataclasses.replace(s, bytes=s.bytes * MIB) for s in profile.storage_table)
    return dataclasses.replace(profile, storage_table=table)


def test_by_hand():
    """1000 MiB resident. Nothing recomputed, alive are 100 (new), 40 (new), 100 (new), 40 (new), 8 (from a segment of
    20), and gradients of 20 in what is free: the 40 of the second block dies at the loss, and two gradients overlap.
    """
    profile = in_mib(two_blocks())
    record = plan_profile(profile, "10GB")
    assert record.predicted_extra_s == 0
    assert record.predicted_reserved_bytes == (1000 + 100 + 40 + 100 + 40 + 20) * MIB
    assert record.allocator == ""


def test_cpu_plans_have_none():
    record = plan_profile(two_blocks(device="cpu"), 10_000)
    assert (record.predicted_reserved_bytes, record.allocator) == (None, "")
    assert "reserved" not in explain(record)
    with pytest.raises(ValueError, match="is for CUDA, whose allocator reserves more than it hands out"):
        plan_profile(two_blocks(device="cpu"), 10_000, budget_of="reserved")


def test_a_budget_of_something_else():
    with pytest.raises(ValueError, match="budget_of is 'free'; possible are 'allocated', 'reserved'"):
        plan_profile(two_blocks(), 10_000, budget_of="free")


def test_options_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, decoder: Profile):
    plain = plan_profile(decoder, "9GB")
    monkeypatch.setenv(CONF, "expandable_segments:True, large_segment_size_mb:20")
    growing = plan_profile(decoder, "9GB")
    assert growing.allocator == "expandable_segments:True,large_segment_size_mb:20"
    assert plain.predicted_reserved_bytes is not None
    assert growing.predicted_reserved_bytes is not None
    assert growing.predicted_peak_bytes <= growing.predicted_reserved_bytes < plain.predicted_reserved_bytes
    assert "allocator with expandable_segments:True,large_segment_size_mb:20, simulated" in explain(growing)


def test_options_that_are_not_understood(monkeypatch: pytest.MonkeyPatch, decoder: Profile):
    monkeypatch.setenv(CONF, "magic:True")
    record = plan_profile(decoder, "9GB")
    assert record.predicted_reserved_bytes is None
    assert "reserved        not predicted: the allocator's options have 'magic'" in explain(record)
    with pytest.raises(AllocatorOptionsError, match="'magic'"):
        plan_profile(decoder, "9GB", budget_of="reserved")


def test_a_share_of_the_device_that_is_too_small(monkeypatch: pytest.MonkeyPatch, decoder: Profile):
    monkeypatch.setenv(CONF, "per_process_memory_fraction:0.02")
    record = plan_profile(decoder, "9GB")
    assert record.predicted_reserved_bytes is None
    assert "not fit the share of the device" in explain(record)


def test_no_plan_is_refused_for_more_than_another_reserves(decoder: Profile):
    """The plan of least peak need not be the one that reserves least among those of its peak."""
    refused, reserved = [], []
    for budget in range(2_400_000_000, 3_300_000_001, 100_000_000):
        try:
            record = plan_profile(decoder, budget, budget_of="reserved")
        except InfeasibleBudgetError:
            refused.append(budget)
        else:
            assert record.predicted_reserved_bytes is not None
            assert record.predicted_reserved_bytes <= budget
            reserved.append((record.predicted_reserved_bytes, record.predicted_extra_s))
    assert max(refused) < min(size for size, _ in reserved)
    gap_s = 2e-3 * decoder.step_s
    assert all(later[1] <= former[1] + gap_s for former, later in itertools.pairwise(reserved))


def test_no_plan_within_the_share_of_the_device_is_no_number(
    monkeypatch: pytest.MonkeyPatch, decoder: Profile
):
    monkeypatch.setenv(CONF, "per_process_memory_fraction:0.02")
    with pytest.raises(AllocatorOptionsError, match="per_process_memory_fraction"):
        plan_profile(decoder, "9GB", budget_of="reserved")


@pytest.mark.parametrize("share", [0.5, 0.65, 0.8])
def test_reserved_memory_fits_the_budget(decoder: Profile, share: float):
    nothing = plan_profile(decoder, "200GB")
    assert nothing.predicted_reserved_bytes is not None
    budget = int(share * nothing.predicted_reserved_bytes)
    record = plan_profile(decoder, budget, budget_of="reserved")
    assert record.predicted_reserved_bytes is not None
    assert record.predicted_peak_bytes <= record.predicted_reserved_bytes <= budget
    assert record.budget_of == "reserved"
    assert "of reserved memory" in explain(record)
    assert "more of allocated memory would buy" in explain(record)
    page = render_report(record, points=0)
    assert "bytes of reserved memory" in page
    assert '"budget_of":"reserved"' in page
    allocated = plan_profile(decoder, budget)
    # What reserves no more than the budget allocates no more: it cannot be faster than the plan for allocated memory.
    assert record.predicted_extra_s >= allocated.bound_s - 1e-9
    assert record.bound_s == pytest.approx(allocated.bound_s, abs=1e-3 * decoder.step_s)
    assert record.gap == pytest.approx((record.predicted_extra_s - record.bound_s) / decoder.step_s, abs=1e-9)


def test_where_the_first_plan_fits_it_is_the_plan(decoder: Profile):
    record = plan_profile(decoder, "200GB", budget_of="reserved")
    assert record.predicted_extra_s == 0
    assert "no checkpointing is needed: with nothing recomputed the step reserves" in explain(record)


def test_the_least_that_was_found_works(decoder: Profile):
    with pytest.raises(
        InfeasibleBudgetError, match="No plan was found that reserves no more than a budget"
    ) as caught:
        plan_profile(decoder, decoder.resident_bytes, budget_of="reserved")
    error = caught.value
    assert not error.proven
    assert 0 < error.reserved_for_bytes <= error.minimum_bytes
    assert any("expandable_segments:True: the same plan" in line for line in error.suggestions)
    record = plan_profile(decoder, error.minimum_bytes, budget_of="reserved")
    assert record.predicted_reserved_bytes is not None
    assert record.predicted_reserved_bytes <= error.minimum_bytes


def test_headroom_is_left_of_reserved_memory(decoder: Profile):
    record = plan_profile(decoder, "9GB", headroom="1GB", budget_of="reserved")
    assert record.predicted_reserved_bytes is not None
    assert record.predicted_reserved_bytes <= 8 * 10**9


def test_a_file_keeps_it_and_contradictions_are_found(decoder: Profile, tmp_path: Path):
    path = tmp_path / "plan.json"
    record = plan_profile(decoder, "9GB", budget_of="reserved")
    record.save(path)
    loaded = PlanRecord.load(path)
    assert loaded == record
    assert step_of(loaded)
    wrong = dataclasses.replace(record, predicted_reserved_bytes=1)
    with pytest.raises(ProfileError, match="do not give its predicted reserved memory"):
        step_of(wrong)


def test_the_plan_of_the_public_names(decoder: Profile):
    plan = autoac.solve(decoder, "9GB", budget_of="reserved")
    assert plan.predicted_reserved_bytes == plan.record.predicted_reserved_bytes is not None


def test_every_recorded_gpu_profile_reserves_at_least_what_is_allocated():
    profile = Profile.load(Path(__file__).resolve().parents[3] / "profiles" / "llama-8b-h200-estimated.json")
    layers = [f"model.layers.{index}" for index in range(32)]
    built = build(profile, named_calls(profile, layers), "replay")
    for decisions in (
        [0] * len(built.problem.groups),
        [0 if g.must_save else 1 for g in built.problem.groups],
    ):
        peak = simulate(built.problem, decisions).peak_bytes
        found = [reserved_bytes(profile, built, decisions, text) for text in ("", "expandable_segments:True")]
        assert found[0] is not None
        assert found[1] is not None
        assert peak <= found[1] <= found[0] + 22 * MIB
