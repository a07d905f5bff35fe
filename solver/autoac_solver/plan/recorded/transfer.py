"""The effect of a plan on a step other than its own, such as one with a smaller batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoac_solver.build.built import Built
from autoac_solver.build.stacking import stacked
from autoac_solver.plan.parts import with_parts_of
from autoac_solver.problem.problem import RECOMPUTE, SAVE
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.plan import PlanRecord, RegionPlan
from autoac_solver.records.profile import Profile


def outcome_of(record: PlanRecord, profile: Profile) -> Outcome:
    """The step of a profile under a plan made from another profile of the same model.

    Decisions are transferred as the engines do it: by position while the ops equal the planned ones, after that by
    overload and its n-th call. Values unknown to the plan are saved.
    """
    profile = with_parts_of(profile, record.profile)
    index = {(span.fqn, span.call): i for i, span in enumerate(profile.spans) if span.grad}
    regions = [region for region in record.regions if (region.fqn, region.call) in index]
    calls = tuple(index[region.fqn, region.call] for region in regions)
    policies = [applied.policy for applied in record.policies]
    built = stacked(profile, calls, record.engine, policies, must_match=False).built
    simulator = Simulator(built.problem)
    planned = simulator.simulate(_decisions(record, profile, built, regions))
    nothing = simulator.simulate([SAVE] * len(built.problem.groups))
    return Outcome(
        profile.sample,
        planned.peak_bytes,
        nothing.peak_bytes,
        planned.extra_s / profile.step_s if profile.step_s else 0.0,
        planned.peak_bytes <= record.budget_bytes - record.headroom_bytes,
    )


def _decisions(
    record: PlanRecord, profile: Profile, built: Built, regions: Sequence[RegionPlan]
) -> list[int]:
    again: dict[int, bool] = {built.loss: record.chunked_losses} if built.loss >= 0 else {}
    for region, tape in zip(regions, built.regions, strict=True):
        names = [profile.tape[op].name for op in tape.ops]
        for group, recomputed in zip(tape.group_of, _recomputed(region, names), strict=True):
            if group >= 0:
                again[group] = again.get(group, True) and recomputed
    return [
        RECOMPUTE if again.get(number) and group.permits(RECOMPUTE) else SAVE
        for number, group in enumerate(built.problem.groups)
    ]


def _recomputed(region: RegionPlan, names: Sequence[str]) -> list[bool]:
    """Per op that runs: whether it is recomputed."""
    if not region.wrapped:
        return [False] * len(names)
    by_call, counts = {}, Counter[str]()
    for name, again in region.steps:
        by_call[name, counts[name]] = again
        counts[name] += 1
    found, seen, in_step = [], Counter[str](), True
    for position, name in enumerate(names):
        in_step = in_step and position < len(region.steps) and region.steps[position][0] == name
        found.append(region.steps[position][1] if in_step else by_call.get((name, seen[name]), False))
        seen[name] += 1
    return found
