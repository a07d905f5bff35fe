"""The problem of regions that are compiled: one group a region, its options the region's measured points.

NOTE [ Memory of a compiled region ]
  The tape shows a region's ops one by one; compiled, it is two pieces of code. Its own storages are not looked at.
  1. While its forward runs, `forward_bytes` are alive on top of what was alive at its start; what dies in it according
     to the tape lives to its end.
  2. From there to the end of its backward `kept_bytes` are alive, and its inputs.
  3. While its backward runs, from the first unpack to the last release of its saved tensors on the tape,
     `backward_bytes` are alive on top. What the tape allocates there and outlives it (gradients) lives from its end on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.regions import Region, choose_regions
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import (
    Action,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    Literal,
    Option,
    Problem,
    RegionCost,
)
from autoac_solver.records.compiled import EAGER, CompiledPoint, undominated
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import NEVER, Profile


@dataclass(frozen=True)
class _Compiled:
    """A region with its points, the fastest first, and its two windows of positions, [start, end) each."""

    region: Region
    points: tuple[CompiledPoint, ...]
    forward: tuple[int, int]
    backward: tuple[int, int]


def build_compiled(profile: Profile, calls: Sequence[int], model: EngineModel) -> Built:
    """The problem for these regions where they are compiled.

    Args:
        calls: module calls, none inside another; those that were not measured are left as they are.

    Raises:
        ProfileError: nothing was measured.
    """
    if profile.compiled is None:
        raise ProfileError(
            "this profile has no measured points of compiled regions, which engine 'compile' chooses from: record it "
            "with autoac.profile(model, sample, engine='compile'), or plan with autoac.plan(..., engine='compile')."
        )
    step = Step(profile)
    found, refused = choose_regions(step, calls, model)
    compiled = [_of(step, region) for region in found]
    return Built(
        model,
        tuple(
            RegionTape(
                c.region.call, tuple(c.region.ops), (i,) * len(c.region.ops), (False,) * len(c.region.ops)
            )
            for i, c in enumerate(compiled)
        ),
        _problem(step, compiled),
        tuple(() for _ in compiled),
        refused=refused,
        points=tuple(tuple(point.name for point in c.points) for c in compiled),
    )


def _of(step: Step, region: Region) -> _Compiled:
    table = step.profile.compiled
    measured = None if table is None else table.of_call(region.call)
    assert measured is not None  # others were refused
    first = bisect_left(step.ticks, region.begin_backward)
    last = bisect_left(step.ticks, region.last_release)
    return _Compiled(
        region,
        undominated(measured.points),
        (region.ops.start, region.ops.stop),
        (min(first, len(step.ticks) - 1), min(max(last, first + 1), len(step.ticks))),
    )


def _problem(step: Step, compiled: Sequence[_Compiled]) -> Problem:
    profile = step.profile
    assert profile.compiled is not None
    inside = _inside(compiled)
    fastest_s = sum(c.points[0].time_s for c in compiled)
    outside_s = sum(op.time_s for index, op in enumerate(profile.tape) if index not in inside)
    resident = sum(s.bytes for s in profile.storage_table if s.alloc == NEVER)
    # What was measured of a whole step says nothing of the optimizer, which runs after the last op of backward.
    unseen, optimizer = (
        profile.compiled.unseen_bytes,
        1 + max(i for i, op in enumerate(profile.tape) if op.backward),
    )
    less = max(0, min(-unseen, resident))
    return Problem(
        n_positions=len(step.ticks),
        resident_bytes=resident - less,
        step_s=outside_s + fastest_s + profile.views_s + profile.outside_s,
        groups=tuple(_group(index, c) for index, c in enumerate(compiled)),
        regions=tuple(RegionCost(0.0, profile.module_name(c.region.call)) for c in compiled),
        lifetimes=(
            *_storages(step, compiled),
            *_workspaces(step, inside),
            Lifetime(less, optimizer, len(step.ticks)),
            Lifetime(max(0, unseen), 0, optimizer),
            *(lifetime for index, c in enumerate(compiled) for lifetime in _code(index, c)),
        ),
        position_op=tuple(range(len(step.ticks))),
        position_replayed=(False,) * len(step.ticks),
    )


def _group(index: int, compiled: _Compiled) -> DecisionGroup:
    fastest_s = compiled.points[0].time_s
    return DecisionGroup(
        index,
        tuple(
            Option(Action.SAVE if point.name == EAGER else Action.COMPILED, point.time_s - fastest_s)
            for point in compiled.points
        ),
    )


def _inside(compiled: Sequence[_Compiled]) -> set[int]:
    """The positions at which compiled regions run."""
    return {p for c in compiled for window in (c.forward, c.backward) for p in range(*window)}


def _when(group: int, option: int) -> Condition:
    return Condition((Literal(group, option),))


def _code(index: int, compiled: _Compiled) -> Iterator[Lifetime]:
    """What the compiled code of a region takes, by point; see NOTE [ Memory of a compiled region ]."""
    (first, end), (begin, last) = compiled.forward, compiled.backward
    for option, point in enumerate(compiled.points):
        when = _when(index, option)
        yield Lifetime(point.forward_bytes, first, end, when)
        yield Lifetime(point.kept_bytes, end, last, when)
        yield Lifetime(point.backward_bytes, begin, last, when)


def _workspaces(step: Step, inside: set[int]) -> Iterator[Lifetime]:
    """What is alive only while an op runs that is in no compiled region."""
    for position, op in enumerate(step.profile.tape):
        if op.workspace_bytes and position not in inside:
            yield Lifetime(op.workspace_bytes, position, position + 1)


def _storages(step: Step, compiled: Sequence[_Compiled]) -> Iterator[Lifetime]:
    """The storages of the tape that live outside of compiled code."""
    profile = step.profile

    def position(tick: int) -> int:
        return bisect_left(step.ticks, tick)

    region_at = {op: index for index, c in enumerate(compiled) for op in c.region.ops}
    ends = [profile.storage_table[i].free for i in range(len(profile.storage_table))]
    for saved in profile.saved:
        index = _region_of(compiled, saved.tick)
        if index is None:
            ends[saved.storage] = max(ends[saved.storage], saved.released)
        elif _region_of(compiled, profile.storage_table[saved.storage].alloc) != index:
            ends[saved.storage] = max(ends[saved.storage], compiled[index].region.last_release)
    for c in compiled:
        for storage in profile.calls[c.region.call].inputs:
            ends[storage] = max(ends[storage], c.region.last_release)
    made_in = {s: region_at[op] for op in region_at for s in profile.tape[op].creates}
    windows = sorted(window for c in compiled for window in (c.forward, c.backward))
    for storage, record in enumerate(profile.storage_table):
        if record.alloc == NEVER or not record.bytes:
            continue
        start, end = _clipped(windows, position(record.alloc), position(ends[storage]))
        maker = made_in.get(storage)
        if start >= end:
            continue
        extensions: tuple[Extension, ...] = ()
        if maker is not None:
            until = compiled[maker].backward[1]
            extensions = tuple(
                Extension(until, _when(maker, option))
                for option, point in enumerate(compiled[maker].points)
                if point.holds_output and until > end
            )
        yield Lifetime(record.bytes, start, end, extensions=extensions, storage=storage)


def _region_of(compiled: Sequence[_Compiled], tick: int) -> int | None:
    return next((i for i, c in enumerate(compiled) if c.region.owns(tick)), None)


def _clipped(windows: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int]:
    """A life without what compiled code does in it: see NOTE [ Memory of a compiled region ].

    What begins in a window begins at its end, before the next window if that is there at once, and what ends in one
    ends at its end.
    """
    born = float(start)
    for first, last in windows:
        if first <= born < last:
            if end <= last:
                return start, start
            born = last - 0.5
        elif born < first < end < last:
            end = last
    return math.ceil(born), end
