"""Conversion between the decisions on a problem and the programs that `apply` runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autoac_solver.build.built import Built
from autoac_solver.build.engines import engine_model
from autoac_solver.build.losses.cross_entropy import LOG_SOFTMAX, chunkable_losses, lean_losses
from autoac_solver.build.regions import Region, cut_calls
from autoac_solver.build.step import Step
from autoac_solver.plan.partitions import before_tail
from autoac_solver.plan.recorded.repeats import most_calls
from autoac_solver.problem.problem import RECOMPUTE, SAVE
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import CallProgram, PlanRecord, RegionPlan, RootCalls, StepFacts
from autoac_solver.records.profile import NEVER, Profile, has_unequal_calls_at_once


def programs(profile: Profile, built: Built, decisions: Sequence[int]) -> dict[str, Any]:
    """The fields of a `PlanRecord` that `apply` reads, and `regions`."""
    wrapped = {g.region for g, option in zip(built.problem.groups, decisions, strict=True) if option != SAVE}
    calls_of = Counter(call.fqn for call in profile.spans if call.grad)
    regions = []
    for index, tape in enumerate(built.regions):
        call, steps = profile.spans[tape.call], built.steps(profile, index, decisions)
        point, is_wrapped = built.point(index, decisions), index in wrapped
        if built.is_compiled(index):
            is_wrapped = point != EAGER
        if index not in wrapped:  # Ops that early stop would spare do not count as recomputed here.
            steps = tuple((name, False) for name, _ in steps)
        calls = calls_of[call.fqn]
        regions.append(RegionPlan(call.fqn, call.call, calls, is_wrapped, steps, point=point))
    chunked = built.loss >= 0 and built.is_recomputed(decisions, built.loss)
    return {
        "regions": tuple(regions),
        "calls": call_programs(profile, regions),
        "step": step_facts(profile, built.engine),
        "several": _several(profile, regions),
        "losses": _losses(profile, regions, [built.is_compiled(index) for index in range(len(regions))]),
        "chunked_losses": chunked,
        "chunk_dtypes": tuple(sorted({loss.dtype for loss in chunkable_losses(profile)})) if chunked else (),
    }


def _losses(
    profile: Profile, regions: Sequence[RegionPlan], measured: Sequence[bool]
) -> dict[str, tuple[str | None, ...]]:
    """The modules with lean losses, but for those whose loss may be compiled: code of ours is no part of that.

    Args:
        measured: for each region, whether it has points, one of which may be to run uncompiled: with torch's own loss.
    """
    tails = tails_compiled(profile, regions)
    whole = tuple(
        f"{r.fqn}." if r.fqn else "" for r, has_points in zip(regions, measured, strict=True) if has_points
    )
    found = lean_losses(profile).items()
    return {fqn: last for fqn, last in found if fqn not in tails and not f"{fqn}.".startswith(whole)}


def tails_compiled(profile: Profile, regions: Sequence[RegionPlan]) -> tuple[str, ...]:
    """Names of the modules of which what they compute after their blocks is compiled."""
    parents = {span.fqn: profile.calls[span.parent].fqn for span in profile.spans_of_parts}
    found = (parents[r.fqn] for r in regions if r.fqn in parents and r.point != EAGER)
    return tuple(dict.fromkeys(found))


def step_facts(profile: Profile, engine: str) -> StepFacts:
    """The facts of the profiled step that `apply` needs under an engine."""
    return StepFacts(
        sample=profile.sample,
        facts=profile.facts,
        one_call=profile.is_one_call,
        called=tuple(dict.fromkeys(call.fqn for call in profile.calls)),
        most_calls=most_calls(profile),
        compared=profile.mode != "fake" and not engine_model(engine).runs_code_twice,
        log_softmax_dtypes=tuple(sorted({op.dtype for op in profile.tape if op.name == LOG_SOFTMAX})),
    )


def call_programs(profile: Profile, regions: Sequence[RegionPlan]) -> tuple[CallProgram, ...]:
    """The programs of the calls that a plan wraps or leaves untouched.

    A call with parts among the regions is recorded as a whole, with all its parts.
    """
    step, indices = Step(profile), _spans(profile, regions)
    compiled = () if profile.compiled is None else profile.compiled.regions
    inputs = {call: region.inputs for region in compiled for call in region.calls}
    outer = cut_calls(step, [Region(step, index) for index in indices])
    calls_of = Counter(call.fqn for call in profile.calls if call.grad)
    inside: dict[int, list[tuple[Region, RegionPlan]]] = {whole.call: [] for whole in outer}
    found = []
    for index, plan in zip(indices, regions, strict=True):
        region = Region(step, index)
        cut_call = next((whole.call for whole in outer if whole.owns(region.start)), NEVER)
        if cut_call != NEVER:
            inside[cut_call].append((region, plan))
            continue
        call, children = profile.spans[index], tuple[str, ...]()
        if index in profile.tail_spans:
            before = before_tail(profile, call.parent, (o for o in indices if o < len(profile.calls)))
            children = tuple(dict.fromkeys(profile.calls[child].fqn for child in before))
            call = profile.calls[call.parent]
        found.append(
            CallProgram(
                *(call.fqn, call.call, calls_of[call.fqn], plan.name, (plan.name,)),
                *(plan.wrapped, plan.steps, plan.point),
                inputs=inputs.get(index, ""),
                children=children,
            )
        )
    for whole in outer:
        call, first = profile.calls[whole.call], whole.ops[0]
        steps = [(profile.tape[op].name, False) for op in whole.ops]
        wrapped = [False] * (len(steps) + 1)
        parts = [-1] * (len(steps) + 1)
        for number, (region, plan) in enumerate(inside[whole.call]):
            ops = slice(region.ops[0] - first, region.ops[-1] + 1 - first)
            steps[ops] = plan.steps
            parts[ops] = [number if plan.wrapped else -1] * len(plan.steps)
            wrapped[ops] = [plan.wrapped] * len(plan.steps)
        # What autograd saves before the first op belongs to no part, so a part at the start begins with a cut, too.
        cuts = tuple(i for i, (before, part) in enumerate(pairwise((-1, *parts[:-1]))) if part != before)
        found.append(
            CallProgram(
                *(call.fqn, call.call, calls_of[call.fqn], profile.module_name(whole.call)),
                *(tuple(plan.name for _, plan in inside[whole.call]), any(wrapped), tuple(steps)),
                cuts=cuts,
            )
        )
    return tuple(found)


def with_regions(record: PlanRecord, regions: Sequence[RegionPlan]) -> PlanRecord:
    """A copy of a plan with other wrapped regions or other steps. Its predictions are not updated."""
    profile = record.profile
    calls, several = call_programs(profile, regions), _several(profile, regions)
    return replace(record, regions=tuple(regions), calls=calls, several=several)


def with_profile(record: PlanRecord, profile: Profile) -> PlanRecord:
    """A copy of a plan with another profile of the same step. Its predictions are not updated."""
    calls, step = call_programs(profile, record.regions), step_facts(profile, record.engine)
    return replace(record, profile=profile, calls=calls, step=step)


def _several(profile: Profile, regions: Sequence[RegionPlan]) -> RootCalls | None:
    """Positions of the calls of wrapped modules that are called several times per step."""
    parts = {span.fqn: profile.calls[span.parent].fqn for span in profile.spans_of_parts}
    calls = Counter(call.fqn for call in profile.calls if call.grad)
    wrapped = dict.fromkeys(parts.get(region.fqn, region.fqn) for region in regions if region.wrapped)
    names = [fqn for fqn in wrapped if calls[fqn] > 1]
    found = profile.calls_below_root(names) if names else None
    if found is None:
        return None
    sizes = profile.call_elements if len(set(profile.call_elements)) > 1 else ()
    return RootCalls(*found, elements=sizes, at_once=has_unequal_calls_at_once(profile))


def settled(built: Built, decisions: Sequence[int]) -> tuple[int, ...]:
    """The decisions; a group whose ops all lie behind sac's early stop counts as saved: programs do not record it."""
    told = {built.loss}
    for tape in built.regions:
        told.update(g for g, spared in zip(tape.group_of, tape.free_of_choice, strict=True) if not spared)
    return tuple(option if group in told else SAVE for group, option in enumerate(decisions))


def region_calls(record: PlanRecord) -> tuple[int, ...]:
    """The module calls that are a plan's regions.

    Raises:
        ProfileError: its profile has no such call.
    """
    return _spans(record.profile, record.regions)


def _spans(profile: Profile, regions: Sequence[RegionPlan]) -> tuple[int, ...]:
    calls = {(call.fqn, call.call): index for index, call in enumerate(profile.spans) if call.grad}
    try:
        return tuple(calls[region.fqn, region.call] for region in regions)
    except KeyError as error:
        raise ProfileError(
            f"the plan has a region {error} that its profile does not know. Make it again."
        ) from None


def decisions_in(record: PlanRecord, built: Built) -> tuple[int, ...]:
    """The decisions that a plan's programs carry out: the option of each group of its problem.

    They are `settled`.

    Raises:
        ProfileError: the programs do not fit this problem: they have other calls or ops, or recompute only a part of a
            group, or a group that cannot be recomputed.
    """
    if [tape.call for tape in built.regions] != list(region_calls(record)):
        raise ProfileError("the plan has other regions than its profile gives rise to. Make it again.")
    again = {built.loss: record.chunked_losses} if built.loss >= 0 else {}
    points: dict[int, int] = {}
    for index, (region, tape) in enumerate(zip(record.regions, built.regions, strict=True)):
        if built.is_compiled(index):
            points[tape.group_of[0]] = _point_of(region, built.points[index])
            continue
        ops = zip(region.steps, tape.group_of, tape.free_of_choice, strict=False)
        for (_, recomputed), group, spared in ops:
            if not spared and group >= 0 and again.setdefault(group, recomputed) != recomputed:
                raise ProfileError(
                    f"the plan recomputes in region {region.name!r} a part of what is one value. Make it again."
                )
    groups = built.problem.groups
    decisions = tuple(
        points.get(group, RECOMPUTE if again.get(group) else SAVE) for group in range(len(groups))
    )
    for name, value in programs(record.profile, built, decisions).items():
        if getattr(record, name) != value:
            raise ProfileError(f"the plan's {name!r} does not belong to its profile. Make it again.")
    if not all(group.permits(option) for group, option in zip(groups, decisions, strict=True)):
        raise ProfileError(
            "the plan recomputes what cannot be recomputed, or saves what must not be. Make it again."
        )
    return decisions


def _point_of(region: RegionPlan, points: Sequence[str]) -> int:
    """The option of a compiled region's point."""
    if region.point not in points:
        raise ProfileError(
            f"the plan compiles region {region.name!r} at a point ({region.point}) that its profile did not "
            "measure, or that a better point replaces. Make it again."
        )
    return points.index(region.point)
