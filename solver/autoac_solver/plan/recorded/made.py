"""Makes a plan's record from a solution."""

from __future__ import annotations

from dataclasses import replace

from autoac_solver.build.stacking import Stacked, stacked
from autoac_solver.plan.parts import with_parts_of
from autoac_solver.plan.recorded.programs import decisions_in, programs, region_calls, settled, with_profile
from autoac_solver.plan.reserved import allocator_of, reserved_bytes
from autoac_solver.problem.problem import SAVE
from autoac_solver.problem.simulator import Simulator
from autoac_solver.problem.solution import Solution
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile


def make_record(
    profile: Profile,
    stack: Stacked,
    solution: Solution,
    budget_bytes: int,
    headroom_bytes: int,
    reason: str,
    budget_of: str = "allocated",
) -> PlanRecord:
    """The plan's record: its programs, predictions and bounds."""
    allocator = allocator_of(profile)
    built, decisions = stack.built, settled(stack.built, solution.decisions)
    simulator = Simulator(built.problem)
    timeline = simulator.simulate(decisions)
    nothing = simulator.simulate([SAVE] * len(decisions))
    return PlanRecord(
        model=profile.model,
        model_fingerprint=profile.model_fingerprint,
        op_fingerprint=profile.op_fingerprint,
        device=profile.device,
        torch_version=profile.torch_version,
        root_calls=profile.n_root_calls,
        engine=built.engine,
        engine_reason=reason,
        budget_bytes=budget_bytes,
        headroom_bytes=headroom_bytes,
        resident_bytes=profile.resident_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        unplanned_peak_bytes=nothing.peak_bytes,
        predicted_extra_s=timeline.extra_s,
        predicted_step_s=built.problem.step_s,
        bound_s=solution.bound_s,
        gap=solution.gap,
        status=solution.status,
        solver=solution.solver,
        solve_s=solution.solve_s,
        **programs(profile, built, decisions),
        profile=profile,
        policies=stack.applied(solution.decisions),
        hint_s=solution.hint_s,
        budget_of=budget_of,
        allocator=allocator,
        predicted_reserved_bytes=reserved_bytes(profile, built, decisions, allocator),
    )


def predicted_anew(record: PlanRecord, profile: Profile) -> PlanRecord:
    """The same programs with the predictions of another profile of the same step.

    Budget and bounds stay, so the predicted peak can be above the budget.
    """
    profile = with_parts_of(profile, record.profile)
    moved = with_profile(record, profile)
    policies = [applied.policy for applied in record.policies]
    built = stacked(profile, region_calls(moved), record.engine, policies, must_match=False).built
    decisions = decisions_in(moved, built)
    simulator = Simulator(built.problem)
    found = simulator.simulate(decisions)
    return replace(
        moved,
        resident_bytes=profile.resident_bytes,
        predicted_peak_bytes=found.peak_bytes,
        unplanned_peak_bytes=simulator.simulate([SAVE] * len(decisions)).peak_bytes,
        predicted_extra_s=found.extra_s,
        predicted_step_s=built.problem.step_s,
        predicted_reserved_bytes=reserved_bytes(profile, built, decisions, record.allocator),
    )
