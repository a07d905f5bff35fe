"""The least memory for a slowdown, against plans by hand and against the plans of smaller budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.records.errors import PolicyError
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile
from tests.solver.profiles import two_blocks

PROFILES = Path(__file__).resolve().parents[3] / "profiles"


@pytest.mark.parametrize(
    ("max_overhead", "peak_bytes"),
    # 0 s, 2 s and 4 s of 15 s take 1288, 1188 and 1180 bytes, as in `test_curve`.
    [(0, 1288), ("13.3%", 1288), ("13.4%", 1188), (0.26, 1188), ("26.7%", 1180), (1, 1180)],
)
def test_two_blocks_by_hand(max_overhead: float | str, peak_bytes: int) -> None:
    plan = plan_profile(
        two_blocks(), None, max_overhead=max_overhead, regions=["blocks.0", "blocks.1"], gap=0, headroom=7
    )
    assert (plan.predicted_peak_bytes, plan.budget_bytes) == (peak_bytes, peak_bytes + 7)


def test_with_compiled_regions_it_is_over_their_fastest_step() -> None:
    profile = Profile.load(PROFILES / "gpt2-medium-compiled-h200.json")
    record = plan_profile(profile, None, max_overhead="5%", engine="compile", gap=0.002)
    assert 0.04 < record.predicted_extra_s / record.predicted_step_s <= 0.05


def test_less_memory_takes_longer_than_that() -> None:
    """On a recorded step: the plan keeps to the slowdown, and a budget that is smaller by the precision has none."""
    profile = Profile.load(PROFILES / "gpt-8-blocks-cpu.json")
    told: list[float] = []
    plan = plan_profile(profile, None, max_overhead="5%", progress=lambda what, share: told.append(share))
    assert plan.predicted_extra_s <= 0.05 * profile.step_s
    less = plan.predicted_peak_bytes - plan.unplanned_peak_bytes // 1000 - 1
    assert plan_profile(profile, less, gap=1e-5).bound_s > 0.05 * profile.step_s
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] <= 1


@pytest.mark.parametrize(
    ("budget", "max_overhead", "text"),
    [
        (None, None, "neither of budget and max_overhead is given"),
        ("1GB", "5%", "both of budget and max_overhead are given"),
        (None, 5, "max_overhead is 5; write"),
        (None, "5", "max_overhead is '5'; write"),
        (None, "120%", "at most 1"),
        (None, -0.1, "max_overhead is -0.1"),
        (None, True, "max_overhead is True"),
        (None, float("nan"), "max_overhead is nan"),
    ],
)
def test_what_makes_no_sense(budget: str | None, max_overhead: float | str | None, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_profile(two_blocks(), budget, max_overhead=max_overhead)


def test_policies_that_demand_more_time_are_named() -> None:
    always = [Policy("MUST_RECOMPUTE", op="test.wide")]
    regions = ["blocks.0", "blocks.1"]
    plan = plan_profile(two_blocks(), None, max_overhead=1, policies=always, regions=regions)
    assert plan.predicted_extra_s == 4
    with pytest.raises(
        PolicyError, match=r"a plan adds 26.7% to the step's time at any budget, and max_overhead is 1.0%"
    ):
        plan_profile(two_blocks(), None, max_overhead="1%", policies=always, regions=regions)


def test_the_curve_has_a_plan_for_a_budget_or_a_slowdown() -> None:
    curve = plan_budgets(two_blocks(), [1185, 1190, 2000], regions=["blocks.0", "blocks.1"], gap=0)
    assert len(curve) == 3
    assert [plan.budget_bytes for plan in curve] == [1185, 1190, 2000]
    assert curve[0] is curve.plans[0]
    assert curve[-1] is curve.plans[2]
    assert curve.plan(1180) is curve[0]  # its peak, though it was planned for 1185
    assert curve.plan(1200) is curve.plan("1.2KB") is curve[1]
    assert curve.plan("1GB") is curve[2]
    assert curve.plan(max_overhead="20%") is curve[1]
    assert curve.plan(max_overhead=0) is curve[2]
    with pytest.raises(
        ValueError, match=r"no plan of this curve fits 1\.179 KB .*: its least peak is 1\.18 KB"
    ):
        curve.plan(1179)
    with pytest.raises(ValueError, match=r"overhead of 1\.0% or less; the least is 26\.7%"):
        plan_budgets(two_blocks(), [1185], regions=["blocks.0", "blocks.1"], gap=0).plan(max_overhead="1%")
    with pytest.raises(ValueError, match="give one of"):
        curve.plan()


def test_a_profile_knows_its_peaks() -> None:
    profile = two_blocks()
    curve = plan_budgets(profile, points=2)
    assert profile.least_peak_bytes == curve[0].predicted_peak_bytes
    assert profile.peak_bytes == curve.baselines["peak_bytes"][0] == 1288
