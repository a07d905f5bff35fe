"""Reasons against recomputation: modules that cannot be regions, and values that must be saved."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import pandas as pd

from autoac_solver.build.built import Built
from autoac_solver.build.engines import EngineModel, engine_model
from autoac_solver.build.regions import Region, choose_regions, nothing_to_recompute, refused_by_all
from autoac_solver.build.step import Step
from autoac_solver.plan.recorded.step import PlannedStep, step_of
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.names import module_in_words, region_in_words
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER, Profile

_SHOWN = 4
"""Most names or reasons in a list; the rest is counted."""


def why(record: PlanRecord, module: str) -> str:
    """A plan's treatment of a module and the reasons for it; calls that are treated alike share a line.

    Args:
        module: its name in the model, "" for the root module; or the name of a region that is a part of a call.

    Raises:
        ProfilingError: the profiled step calls no module of this name.
    """
    profile, step = record.profile, step_of(record)
    if (part := _part(profile, step, module)) is not None:
        return part
    calls = [index for index, call in enumerate(profile.calls) if call.fqn == module]
    inside = [call.fqn for call in profile.calls if module and call.fqn.startswith(f"{module}.")]
    if not calls and inside:
        outer = dict.fromkeys(".".join(name.split(".")[: module.count(".") + 2]) for name in inside)
        shown = ", ".join(map(repr, list(outer)[:_SHOWN]))
        more = f" and {len(outer) - _SHOWN} more" if len(outer) > _SHOWN else ""
        return f"{module!r} is a container, which is not called itself; decisions are on {shown}{more}"
    if not calls:
        near = difflib.get_close_matches(
            module, sorted({call.fqn for call in profile.calls}), n=3, cutoff=0.3
        )
        known = f" Names that are near: {', '.join(map(repr, near))}." if near else ""
        raise ProfilingError(f"the profiled step calls no module {module!r}.{known}")
    alike: dict[str, list[str]] = {}
    for call in calls:
        name = profile.module_name(call) or "the model itself"
        alike.setdefault(_call(record, step, call), []).append(name)
    return "\n".join(f"{_listed(names)}: {text}" for text, names in alike.items())


def why_no_region(record: PlanRecord) -> dict[str, str]:
    """Why modules are no regions, by name: all that the profiled step calls, but for those with a call that is one."""
    profile, step = record.profile, step_of(record)
    regions = {profile.calls[call].fqn for call in _calls_of_regions(record)}
    found: dict[str, dict[str, None]] = {}
    for index, call in enumerate(profile.calls):
        if call.fqn not in regions:
            found.setdefault(call.fqn, {})[_call(record, step, index)] = None
    return {name: "; ".join(texts) for name, texts in found.items()}


def values_that_must_be_saved(step: PlannedStep, profile: Profile) -> pd.DataFrame:
    """One row per reason: reason, values, bytes; the largest first."""
    rows = []
    for group, storages in zip(step.built.problem.groups, step.built.group_storages, strict=True):
        if group.must_save:
            size = sum(profile.storage_table[storage].bytes for storage in storages)
            rows.append((group.reason, len(storages), size))
    frame = pd.DataFrame(rows, columns=["reason", "values", "bytes"])
    found = frame.groupby("reason", as_index=False)[["values", "bytes"]].sum()
    return found.sort_values(["bytes", "reason"], ascending=[False, True], ignore_index=True)


def modules_that_are_refused(record: PlanRecord) -> tuple[tuple[str, str], ...]:
    """Name and reason of the outermost modules that cannot be regions at any budget.

    A module is listed if one of its calls is refused under the engine, or if there is nothing to recompute in any of
    them: gradients are off, as around a frozen encoder, or backward needs nothing that is saved there. Not listed, but
    answered by `why`, are

    - modules without a compiled point (engine compile): most are so by choice;
    - with nothing to recompute, modules inside of a region or around one;
    - with gradients on and nothing to recompute, modules that call no other module, such as `Identity`, `Flatten`, or
      `Dropout` in eval mode: nobody expects these to be regions.
    """
    profile, model, step = record.profile, engine_model(record.engine), Step(record.profile)
    regions = _calls_of_regions(record)
    around = {call for region in regions for call in _ancestors(profile, region)}
    outer = {call.parent for call in profile.calls}

    def idle(index: int) -> bool:
        """Whether there is nothing to recompute in a call, and that is worth telling."""
        plain = profile.calls[index].grad and index not in outer
        inside = any(call in regions for call in _ancestors(profile, index))
        return not (plain or inside or index in regions | around) and any(
            nothing_to_recompute(profile, Region(step, index))
        )

    calls: dict[str, list[int]] = {}
    for index, call in enumerate(profile.calls):
        calls.setdefault(call.fqn, []).append(index)
    found: dict[str, str] = {}
    for index, call in enumerate(profile.calls):
        if index in regions or any(_is_inside(call.fqn, name) for name in found):
            continue
        reason = next(_refused(step, index, model), "") if call.grad else ""
        if not reason and all(map(idle, calls[call.fqn])):
            reason = next(nothing_to_recompute(profile, Region(step, index)))
        if reason:
            found[call.fqn] = reason
    return tuple(found.items())


def _calls_of_regions(record: PlanRecord) -> set[int]:
    """Indices of the module calls that are regions of the plan."""
    regions = {(region.fqn, region.call) for region in record.regions}
    calls = enumerate(record.profile.calls)
    return {index for index, call in calls if call.grad and (call.fqn, call.call) in regions}


def _refused(step: Step, index: int, model: EngineModel) -> Iterator[str]:
    """Reasons against a call with gradients on, other than that there is nothing to recompute."""
    yield from refused_by_all(step.profile, index)
    if not model.compiles:
        yield from model.refuses(step, Region(step, index))


def lines(record: PlanRecord, step: PlannedStep) -> Iterator[str]:
    """Lines for the explanation: modules and values that the plan could not decide on, with reasons."""
    table = values_that_must_be_saved(step, record.profile)
    for reason, values, size in table.head(_SHOWN).itertuples(index=False, name=None):
        yield f"  must be saved   {values} values, {format_bytes(size)}: {reason}"
    if len(table) > _SHOWN:
        yield f"  must be saved   and for {len(table) - _SHOWN} more reasons"
    refused = modules_that_are_refused(record)
    for name, reason in refused[:_SHOWN]:
        yield f"  no region       {module_in_words(name)}: {reason}"
    if len(refused) > _SHOWN:
        yield f"  no region       and {len(refused) - _SHOWN} more modules (plan.refused)"


def _call(record: PlanRecord, step: PlannedStep, index: int) -> str:
    """The plan's treatment of a call, as text."""
    profile = record.profile
    regions = [tape.call for tape in step.built.regions]
    if index in regions:
        return _region(profile, step, regions.index(index))
    outer = [
        *_ancestors(profile, index),
        *(region for region in regions if _is_part_around(profile, region, index)),
    ]
    around = next((region for region in outer if region in regions), None)
    if around is not None:
        region = region_in_words(profile.spans[around].fqn)
        return f"lies in {region}, whose values are decided on one by one"
    within = [region for region in regions if index in _ancestors(profile, region)]
    if within:
        return f"lies around the regions {_some(profile, within)}, and is none itself"
    reason = next(_refusals(Step(profile), index, engine_model(record.engine)), "")
    inside = {saved.module for saved in profile.saved if saved.module != NEVER}
    if not reason and any(index in (call, *_ancestors(profile, call)) for call in inside):
        # A record does not tell whether its regions were named or chosen.
        others = (
            f"this plan's regions, named by regions= or chosen by the planner, are {_some(profile, regions)}"
        )
        reason = f"{others}; name it in regions= to make it one" if regions else "this plan has no regions"
    return f"is no region: {reason or 'autograd saves nothing in it that a plan could recompute'}"


def _part(profile: Profile, step: PlannedStep, name: str) -> str | None:
    """Text on a region that is a part of a call; None if there is no such region."""
    for region, tape in enumerate(step.built.regions):
        if tape.call >= len(profile.calls) and profile.module_name(tape.call) == name:
            ends = [profile.tape[op] for op in (tape.ops[0], tape.ops[-1])]
            first, last = (f"{op.name} of {module_in_words(profile.module_name(op.module))}" for op in ends)
            return f"{module_in_words(name)}, from {first} to {last}: {_region(profile, step, region)}"
    return None


def _region(profile: Profile, step: PlannedStep, region: int) -> str:
    """Text on a region: its recomputed values, and those that must be saved."""
    if step.built.is_compiled(region):
        row = step.decisions[step.decisions["group"] == step.built.regions[region].group_of[0]].iloc[0]
        return f"is a region, {row['op']}: it keeps {format_bytes(int(row['bytes']))} for backward"
    if step.built.points:
        return f"is not compiled, so engine replay runs it: it {_replayed(profile, step, region)}"
    return _replayed(profile, step, region)


def _replayed(profile: Profile, step: PlannedStep, region: int) -> str:
    groups = [i for i, group in enumerate(step.built.problem.groups) if group.region == region]
    again = [i for i in groups if step.built.is_recomputed(step.options, i)]
    kept = [i for i in groups if step.built.problem.groups[i].must_save]
    must = f"; {len(kept)} must be saved, {_reasons(step.built, kept)}" if kept else ""
    if not again:
        return f"is a region in which nothing is recomputed: the budget does not ask for it{must}"
    size = sum(profile.storage_table[s].bytes for i in again for s in step.built.group_storages[i])
    return f"is a region; {len(again)} of {len(groups)} values are recomputed, {format_bytes(size)}{must}"


def _reasons(built: Built, groups: Sequence[int]) -> str:
    reasons = list(dict.fromkeys(built.problem.groups[group].reason for group in groups))
    more = f", and {len(reasons) - 2} more reasons" if len(reasons) > 2 else ""
    return "; ".join(reasons[:2]) + more


def _refusals(step: Step, call: int, model: EngineModel) -> Iterator[str]:
    """Reasons why a module call cannot be a region under an engine."""
    _, refused = choose_regions(step, [call], model)
    yield from (refusal.reason for refusal in refused)


def _ancestors(profile: Profile, index: int) -> list[int]:
    found, parent = [], profile.spans[index].parent
    while parent >= 0:
        found.append(parent)
        parent = profile.calls[parent].parent
    return found


def _is_part_around(profile: Profile, part: int, call: int) -> bool:
    """Whether a span is a part of a call that has all ops of another call."""
    if part < len(profile.calls):
        return False
    step, outer, inner = Step(profile), profile.spans[part], profile.spans[call]
    ops, own = step.ops(outer.start, outer.end), step.ops(inner.start, inner.end)
    return bool(own) and ops.start <= own.start and own.stop <= ops.stop


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def _some(profile: Profile, calls: Sequence[int]) -> str:
    return _listed([repr(profile.module_name(call)) for call in calls])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
