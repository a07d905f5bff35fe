"""What is told of a plan comes from what it runs: programs that do not belong to their profile are refused."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.programs import programs, with_regions
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import PlanRecord, RegionPlan
from autoac_solver.records.profile import Profile
from autoac_solver.show.explanation import explain

PROFILES = Path(__file__).resolve().parents[3] / "profiles"


@pytest.fixture(scope="module", params=["replay", "sac"])
def plan(request: pytest.FixtureRequest) -> PlanRecord:
    return plan_profile(Profile.load(PROFILES / "gpt-8-blocks-cpu.json"), "170MB", engine=request.param)


def changed(region: RegionPlan, position: int) -> RegionPlan:
    """The region with one op decided the other way."""
    name, again = region.steps[position]
    steps = (*region.steps[:position], (name, not again), *region.steps[position + 1 :])
    return dataclasses.replace(region, steps=steps, wrapped=True)


def test_decisions_are_read_off_the_programs(plan: PlanRecord, tmp_path: Path):
    step = step_of(plan)
    assert step_of(plan) is step
    for name, value in programs(plan.profile, step.built, step.options).items():
        assert getattr(plan, name) == value
    plan.save(tmp_path / "plan.json")
    loaded = PlanRecord.load(tmp_path / "plan.json")
    assert loaded == plan
    assert step_of(loaded).options == step.options
    assert step_of(loaded).decisions.equals(step.decisions)
    assert step_of(loaded).timeline.equals(step.timeline)


def test_one_op_decided_otherwise_is_seen(plan: PlanRecord):
    """Whichever it is: another peak, a part of a value or ops that cannot run again."""
    region = next(region for region in plan.regions if region.wrapped)
    index = plan.regions.index(region)
    refused = 0
    for position in range(len(region.steps)):
        regions = (*plan.regions[:index], changed(region, position), *plan.regions[index + 1 :])
        edited = with_regions(plan, regions)
        try:
            step = step_of(edited)
        except ProfileError:
            refused += 1
        else:  # another plan of the same peak: told as what it is
            assert step.options != step_of(plan).options
    assert refused > len(region.steps) // 2


def flip_all(plan: PlanRecord) -> PlanRecord:
    regions = [
        dataclasses.replace(r, wrapped=False, steps=tuple((op, False) for op, _ in r.steps))
        for r in plan.regions
    ]
    return with_regions(plan, regions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plan: dataclasses.replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes - 1),
            "predicted peak",
        ),
        (lambda plan: dataclasses.replace(plan, losses={"": (None,)}), "the plan's 'losses' does not belong"),
        (
            lambda plan: dataclasses.replace(plan, chunked_losses=not plan.chunked_losses),
            "do(es)? not (belong|give)",
        ),
        (lambda plan: dataclasses.replace(plan, regions=plan.regions[1:]), "Make it again"),
        (lambda plan: dataclasses.replace(plan, calls=plan.calls[1:]), "the plan's 'calls' does not belong"),
        (
            lambda plan: dataclasses.replace(
                plan, calls=(*plan.calls[:-1], dataclasses.replace(plan.calls[-1], cuts=(1,)))
            ),
            "the plan's 'calls' does not belong",
        ),
        (
            lambda plan: dataclasses.replace(
                plan, step=dataclasses.replace(plan.step, compared=not plan.step.compared)
            ),
            "the plan's 'step' does not belong",
        ),
        (
            lambda plan: dataclasses.replace(plan, regions=(dataclasses.replace(plan.regions[0], fqn="x"),)),
            "its profile does not know",
        ),
    ],
)
def test_a_plan_that_contradicts_its_profile_is_refused(
    plan: PlanRecord, change: Callable[[PlanRecord], Any], message: str
):
    with pytest.raises(ProfileError, match=message):
        explain(change(plan))


def test_a_plan_of_which_nothing_is_left_is_refused(plan: PlanRecord):
    with pytest.raises(ProfileError):
        explain(flip_all(plan))
