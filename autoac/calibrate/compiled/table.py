"""The table of a model's compiled regions; alike regions are compiled and measured once per point."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.calibrate.compiled.capture import (
    Call,
    Captured,
    Caught,
    Tail,
    captured,
    written_parameters,
)
from autoac.calibrate.compiled.measured import measured_points
from autoac.calibrate.compiled.on_disk import PointsOnDisk
from autoac.execute.compiled.code import graphs_of, surveying
from autoac.measure import ONE_AT_A_TIME
from autoac.progress import Tell
from autoac.step.autocast import forward_autocast
from autoac.step.model import device_of
from autoac.step.step import TrainingStep
from autoac.step.trial import trial
from autoac.step.uncompiled import uncompiled
from autoac.step.units import gathered, has_units, is_split, units_inside
from autoac.torch_private import compiled_code_forgotten, first_line, raised_in_compiler
from autoac_solver.plan.partitions import blocks, named_calls, tails_after, whole
from autoac_solver.plan.parts import tail_of
from autoac_solver.records.compiled import EAGER, CompiledPoint, CompiledRegion, CompiledTable
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.names import module_in_words
from autoac_solver.records.profile import NEVER, VARYING, Profile

BLOCKS, WHOLE = "blocks", "whole"
GRANULARITIES = (BLOCKS, WHOLE)
"""The extent of a compiled region if none are named: one block of the model, or the whole model."""

MOST_COMPILED = 9
"""Points compiled per region. Each takes the compiler some seconds, once for all alike regions."""
_MOST_IN_ALL, _LEAST_COMPILED = 45, 4
"""With many kinds of regions fewer points are compiled of each: so many in all, but at least so many per region."""

_UNCAUGHT = "no step that was recorded before had called it"

_SLOWER, _LEAST_S = 1.1, 5e-3
"""A region that draws random numbers is not compiled if its compiled code takes more than `_SLOWER` x the uncompiled
time, where that is more than `_LEAST_S`. Compiled for CPUs, dropout takes longer than torch's own."""


class NothingCompiled(ProfilingError):
    """No region of a model can be compiled.

    Args:
        why: the reason for the first region.
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why

    def __str__(self) -> str:
        return (
            f"no region of the model can be compiled: {self.why}. Choose other regions (regions=), or take "
            "engine='replay'."
        )


def with_compiled_regions(
    profile: Profile,
    step: TrainingStep,
    names: Sequence[str] | None = None,
    granularity: str = BLOCKS,
    progress: Tell | None = None,
) -> Profile:
    """The profile with the points of its regions, each compiled and measured on the model.

    The model and the sample are restored. Regions that are not compiled are in the table with the reason.

    Args:
        profile: of this step.
        names: modules to compile; None to choose by `granularity`.

    Raises:
        NothingCompiled: no region can be compiled.
    """
    tell = progress or (lambda *_: None)
    kinds = kinds_of(profile, step.model, names, granularity)
    with ONE_AT_A_TIME:
        tell("what the regions are called with", 0.0)
        found = captured(step, kinds, written_parameters(profile, step.model, forward_only=True))
    with forward_autocast() as without, without:  # regions enter the autocast of their own calls
        return with_caught_regions(profile, step.model, step.inputs, found, tell)


def kinds_of(
    profile: Profile, model: torch.nn.Module, names: Sequence[str] | None = None, granularity: str = BLOCKS
) -> dict[Call, Hashable]:
    """The calls to compile, each with a key that those share which may be compiled once for all.

    Args: as for `with_compiled_regions`.
    """
    if names is not None:
        calls: Sequence[int] = named_calls(profile, names)
    else:
        calls = whole(profile) if granularity == WHOLE else blocks(profile)

    def key(call: int) -> Call:
        return profile.calls[call].fqn, profile.calls[call].call

    kinds: dict[Call, Hashable] = {key(call): _kind(profile, model, call) for call in calls}
    for call, children in tails_after(profile, calls if names is None else ()).items():
        prefix = f"{profile.calls[call].fqn}." if profile.calls[call].fqn else ""
        inside = (profile.calls[child].fqn.removeprefix(prefix) for child in children)
        kinds[key(call)] = Tail(tuple(inside), profile.sample)
    return kinds


def with_caught_regions(
    profile: Profile,
    model: torch.nn.Module,
    inputs: Any,
    found: Caught,
    progress: Tell,
    uncaught: Mapping[Call, Hashable] | None = None,
) -> Profile:
    """The profile with the points of regions whose arguments were caught, each compiled and measured on the model.

    Args:
        profile: of this step.
        inputs: tensors in it are restored.
        uncaught: calls of this step that would be compiled if their arguments were known, as `kinds_of` has them.

    Raises:
        NothingCompiled: no region can be compiled.
    """
    start = time.perf_counter()
    profile = _with_tails(profile, found)
    with ONE_AT_A_TIME:
        regions = _regions(profile, model, inputs, found, progress)
    call_of, uncaught = _call_of(profile), uncaught or {}
    tails = [call for call, kind in uncaught.items() if isinstance(kind, Tail)]
    regions += [
        CompiledRegion((call_of[call],), (), (), _UNCAUGHT) for call in sorted(uncaught.keys() - set(tails))
    ]
    regions, profile = _without_failed_tails(regions, profile)
    profile = replace(
        profile, notes=(*profile.notes, *(_tail_failed(module, _UNCAUGHT) for module, _ in tails))
    )
    if not any(region.points for region in regions):
        raise NothingCompiled(
            regions[0].failure if regions else "the model has no block that holds a twentieth of it"
        )
    table = CompiledTable(tuple(regions), seconds=time.perf_counter() - start)
    return _with(profile, table, [region for region in regions if region.failure])


def _with_tails(profile: Profile, found: Caught) -> Profile:
    call_of = _call_of(profile)
    tails = []
    for region, calls in found:
        for call in calls if region.children else ():
            names = {f"{call[0]}.{child}" if call[0] else child for child in region.children}
            index = call_of[call]
            inside = (other for other in profile.calls if other.parent == index and other.fqn in names)
            tails.append(tail_of(profile, index, max(other.end for other in inside)))
    return replace(profile, tails=tuple(sorted(tails, key=lambda tail: tail.call)))


def _call_of(profile: Profile) -> dict[Call, int]:
    return {(call.fqn, call.call): index for index, call in enumerate(profile.calls) if call.grad}


def _without_failed_tails(
    regions: list[CompiledRegion], profile: Profile
) -> tuple[list[CompiledRegion], Profile]:
    """The regions without tails that are not compiled, and the profile with notes on why."""
    failed = [region for region in regions if region.failure and region.calls[0] in profile.tail_spans]
    modules = [profile.calls[profile.spans[region.calls[0]].parent].fqn for region in failed]
    notes = (_tail_failed(module, region.failure) for module, region in zip(modules, failed, strict=True))
    left = [region for region in regions if region not in failed]
    return left, replace(profile, notes=(*profile.notes, *notes))


def _tail_failed(module: str, why: str) -> str:
    return f"what {module_in_words(module)} computes after its blocks, with the loss, is not compiled: {why}"


def without_regions(profile: Profile, failed: Mapping[str, str]) -> Profile:
    """The profile without compiled regions that the compiler has failed on in a step, though it compiles what is alike.

    Blocks may differ in something that no op shows until they are traced, such as a graph break.

    Args:
        failed: the compiler's error by display name of the call.

    Raises:
        NothingCompiled: no region is left.
    """
    table = profile.compiled
    assert table is not None
    regions, apart = [], []
    for region in table.regions:
        fails = [call for call in region.calls if profile.module_name(call) in failed and region.points]
        if kept := tuple(call for call in region.calls if call not in fails):
            regions.append(replace(region, calls=kept))
        apart += [CompiledRegion((call,), (), (), failed[profile.module_name(call)]) for call in fails]
    apart, profile = _without_failed_tails(apart, profile)
    if not any(region.points for region in regions):
        raise NothingCompiled(next(iter(failed.values())))
    return _with(profile, replace(table, regions=(*regions, *apart)), apart)


def _with(profile: Profile, table: CompiledTable, failed: Sequence[CompiledRegion]) -> Profile:
    """The profile with this table, and notes on regions that are not compiled."""
    notes = [
        f"{profile.module_name(region.calls[0])!r}{' and what is like it' if len(region.calls) > 1 else ''} is not "
        f"compiled, so engine replay runs it: {region.failure}"
        for region in failed
    ]
    return replace(profile, compiled=table, notes=(*profile.notes, *notes))


def _regions(
    profile: Profile, model: torch.nn.Module, inputs: Any, found: Caught, progress: Tell
) -> list[CompiledRegion]:
    call_of, tail_of_call = _call_of(profile), {}
    written = written_parameters(profile, model, forward_only=True)
    for tail, index in zip(profile.tails, profile.tail_spans, strict=True):
        tail_of_call[tail.call] = index

    def compiled(index: int) -> CompiledRegion:
        region, keys = found[index]
        group = sorted(call_of[key] for key in keys)
        name = profile.module_name(group[0]) or "the model"
        words = f"compiling {name}" + (f" and {len(group) - 1} like it" if len(group) > 1 else "")
        if region.children:
            words = f"compiling what {name} computes after its blocks"
            group = [tail_of_call[call] for call in group]
        with (
            trial(model, inputs, [*written, *region.module.buffers()]),
            uncompiled(model),
            # A tail is compiled as functions of the model's own, which its user may compile, too.
            compiled_code_forgotten() if region.children else contextlib.nullcontext(),
        ):
            if region.children and VARYING in profile.facts and len(region.children) > 1:  # layer drop
                why = "the step does not run the same modules each time"
                return CompiledRegion(tuple(group), (), (), why)
            return _region(
                region,
                tuple(group),
                _never(profile, group),
                min(MOST_COMPILED, max(_MOST_IN_ALL // len(found), _LEAST_COMPILED)),
                device_of(model),
                lambda what: progress(f"{words}: {what}", index / len(found)),
            )

    if not has_units(model):
        return [compiled(index) for index in range(len(found))]
    regions: dict[int, CompiledRegion] = {}
    # Other ranks may have other groups of alike calls, but gather the parameters of all these modules in step. Restored
    # is the model as it was before.
    with trial(model, inputs, ()):
        for name in sorted({name for _, keys in found for name, _ in keys}):
            with gathered(model, name):
                regions |= {i: compiled(i) for i, (_, keys) in enumerate(found) if keys[0][0] == name}
    return [regions[index] for index in range(len(found))]


def _kind(profile: Profile, model: torch.nn.Module, call: int) -> Hashable:
    """Key of regions that are compiled once for all: class, mode, ops, shapes, parameters, buffers."""
    record = profile.calls[call]
    module = model.get_submodule(record.fqn)
    ops = tuple(
        (op.name, "" if op.signature == NEVER else profile.signatures[op.signature])
        for op in profile.tape
        if record.start <= op.tick < record.end and not op.backward
    )
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for named in (module.named_parameters(), module.named_buffers())
        for name, t in named
    )
    modes = tuple(inside.training for inside in module.modules())
    return type(module), ops, tensors, modes


def _never(profile: Profile, calls: Sequence[int]) -> frozenset[str]:
    """Names of ops in these calls that draw, or that profiling found to give other values when they run again."""
    windows = [(profile.spans[call].start, profile.spans[call].end) for call in calls]
    return frozenset(
        op.name
        for op in profile.tape
        if (op.random_bytes or not op.replayable)
        and not op.backward
        and any(start <= op.tick < end for start, end in windows)
    )


def _why_not_given(forward: Any) -> str:
    """Why a module whose instance was given a forward is no region to compile."""
    if hasattr(forward, "get_compiler_config"):
        return "its forward was replaced by a compiled one: compile the module with module.compile() or not at all"
    return "some library has given the module a forward of its own"


def _region(
    region: Captured,
    calls: tuple[int, ...],
    never: frozenset[str],
    most: int,
    device: torch.device,
    tell: Any,
) -> CompiledRegion:
    """Compile and measure one region; the reason if that fails.

    Args:
        never: names of ops that must not run again.
        most: points to compile.
    """
    if "forward" in region.module.__dict__:
        return CompiledRegion(calls, (), (), _why_not_given(region.module.__dict__["forward"]))
    # Their hooks would gather parameters in every run, on each rank in as many as it measures.
    if units_inside(region.module, region.children):
        return CompiledRegion(calls, (), (), "it calls units of FSDP2")
    if is_split(region.module):
        return CompiledRegion(calls, (), (), "its parameters are split over ranks during its call")
    if region.hooked:
        return CompiledRegion(
            calls, (), (), f"module {region.hooked!r} in it has hooks, which compiled code may not run"
        )
    try:
        tell("what it could keep")
        if region.children and (why := _why_no_graph(region)):
            return CompiledRegion(calls, (), (), why)
        survey = _survey(region, never, most)
        if region.children and survey.draws:
            return CompiledRegion(calls, (), (), "it draws random numbers")
        on_disk = PointsOnDisk(survey, region.described, device)
        points = on_disk.read()
        if points is None:
            points = measured_points(region, survey.points, device, tell)
            if len(points) == len(survey.points) + 1:  # where more is free, more may fit
                on_disk.write(points)
    except Exception as error:
        return CompiledRegion(calls, (), (), first_line(error))
    if (
        region.children
    ):  # uncompiled, a plan has the loss in place or over chunks, which `partitions` proposes
        points = tuple(point for point in points if point.name != EAGER)
    failure = ""
    if survey.draws:
        points, failure = _for_all_budgets(points)
    return CompiledRegion(calls, survey.heavy, points, failure, region.described)


def _for_all_budgets(points: tuple[CompiledPoint, ...]) -> tuple[tuple[CompiledPoint, ...], str]:
    """The points of a region that draws random numbers, and why it is not compiled, "" if it is.

    Uncompiled, it draws other numbers, and results must not depend on the budget. So it is compiled at all budgets, or
    at none.
    """
    eager = tuple(point for point in points if point.name == EAGER)
    others = tuple(point for point in points if point.name != EAGER)
    if eager and eager[0].time_s > _LEAST_S:
        slower = min(point.time_s for point in others) / eager[0].time_s
        if slower > _SLOWER:
            return eager, f"its compiled code takes {slower:.2f} x the time, at any budget"
    return others, ""


def _why_no_graph(region: Captured) -> str:
    """Why the compiler does not make one graph of a tail, "" if it does."""
    args, kwargs, results = region.arguments()
    with region.around(results):
        graphs = graphs_of(region.module, args, kwargs, region.is_in_tail)
    if len(graphs) == 1:
        return "" if graphs[0] else "its graph has no function of torch's that computes a cross entropy"
    return f"torch.compile makes {len(graphs)} graphs of it"


def _survey(region: Captured, never: frozenset[str], most: int) -> Any:
    from autoac.execute.compiled.partitioner import Surveyed

    args, kwargs, results = region.arguments()
    try:
        with region.around(results):
            surveying(most, never, bool(region.children))(region.module, args, kwargs)
    except Exception as error:
        surveyed = raised_in_compiler(error, Surveyed)
        if surveyed is None:
            raise
        return surveyed.found
    raise ProfilingError("torch.compile has made no graph of it with a backward")
