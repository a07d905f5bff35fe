"""The effect of a plan on a step other than its own, such as one with a smaller batch."""

from __future__ import annotations

from autoac_solver.build.built import Built
from autoac_solver.build.stacking import stacked
from autoac_solver.build.step import Step
from autoac_solver.plan.following import planned_places
from autoac_solver.plan.parts import with_parts_of
from autoac_solver.problem.problem import RECOMPUTE, SAVE
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER, Profile


def outcome_of(record: PlanRecord, profile: Profile) -> Outcome:
    """The step of a profile under a plan made from another profile of the same model.

    Decisions are transferred as the engines do it: by position while the ops equal the planned ones, after that by
    overload and its n-th call. Values unknown to the plan are saved.
    """
    profile = with_parts_of(profile, record.profile)
    index = {(span.fqn, span.call): i for i, span in enumerate(profile.spans) if span.grad}
    calls = tuple(
        index[region.fqn, region.call] for region in record.regions if (region.fqn, region.call) in index
    )
    policies = [applied.policy for applied in record.policies]
    built = stacked(profile, calls, record.engine, policies, must_match=False).built
    simulator = Simulator(built.problem)
    planned = simulator.simulate(_decisions(record, profile, built))
    nothing = simulator.simulate([SAVE] * len(built.problem.groups))
    return Outcome(
        profile.sample,
        planned.peak_bytes,
        nothing.peak_bytes,
        planned.extra_s / profile.step_s if profile.step_s else 0.0,
        planned.peak_bytes <= record.budget_bytes - record.headroom_bytes,
    )


def _decisions(record: PlanRecord, profile: Profile, built: Built) -> list[int]:
    again: dict[int, bool] = {built.loss: record.chunked_losses} if built.loss >= 0 else {}
    rerun = _rerun(record, profile)
    for tape in built.regions:
        for op, group in zip(tape.ops, tape.group_of, strict=True):
            if group >= 0:
                again[group] = again.get(group, True) and op in rerun
    return [
        RECOMPUTE if again.get(number) and group.permits(RECOMPUTE) else SAVE
        for number, group in enumerate(built.problem.groups)
    ]


def _rerun(record: PlanRecord, profile: Profile) -> set[int]:
    """The ops that the plan's programs run again."""
    step = Step(profile)
    calls = {(call.fqn, call.call): call for call in profile.calls if call.grad}
    found = set[int]()
    for program in record.calls:
        if call := calls.get((program.fqn, program.call)):
            ops = step.ops(call.start, call.end)
            planned, names = [name for name, _ in program.steps], [profile.tape[op].name for op in ops]
            places = zip(ops, planned_places(planned, names), strict=True)
            found.update(op for op, place in places if place != NEVER and program.steps[place][1])
    return found
