"""Where engine replay need not look: calls of modules, inside a region, of which nothing is recorded.

Seeing an op costs the engine several times as much as keeping its values, which costs it nothing. So while a module
runs in which nothing is recomputed, the recording is paused, if that is worth the pause. Not where an op writes in
place: what it writes may be recorded elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from autoac_solver.profile import NEVER, ModuleCall, Op, Profile

_COMPILED = "OptimizedModule"
"""What `torch.compile(module)` is called: what it compiles is left as it is, or it would be compiled again."""
_WORTH = 2.0
"""A pause has to spare this many times its cost: modules that could pause and do not cost a little too."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A call of a module inside of a region, while which the recording is paused.

    Args:
        fqn: the module's name.
        start, end: its ops are [start, end) of the region's; there is at least one.
    """

    fqn: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A pause that is possible.

    Args:
        pause: the pause.
        parent: index of the stretch that it is inside of, -1 for none.
        seen: how many ops, those that only make views among them, it has of its own.
    """

    pause: Pause
    parent: int
    seen: int


def stretches(profile: Profile, region: int, never: Container[str] = ()) -> list[Stretch]:
    """The pauses that are possible in a region and worth it, outer ones before those inside of them.

    Args:
        region: its module call.
        never: modules that cannot be paused, by name.
    """
    calls, costs = profile.calls, profile.costs
    first_op, end_op = (
        bisect_left(profile.tape, tick, key=_tick) for tick in (calls[region].start, calls[region].end)
    )
    ops = profile.tape[first_op:end_op]
    within = _calls_within(profile, region)
    barred = _barred(calls, ops, within)
    found: list[Stretch] = []
    place = {region: NEVER}  # call -> the innermost stretch that it is in
    for index in within:
        call = calls[index]
        place[index] = place[call.parent]
        start, end = (bisect_left(ops, tick, key=_tick) for tick in (call.start, call.end))
        seen = end - start + call.views
        spares = seen * costs.replay_op > _WORTH * costs.replay_pause
        if index in barred or call.fqn in never or start == end or not spares:
            continue
        found.append(Stretch(Pause(call.fqn, start, end), place[index], seen))
        place[index] = len(found) - 1
    return _own(found)


def pauses(
    profile: Profile, region: int, recorded: AbstractSet[int], never: Container[str] = ()
) -> tuple[Pause, ...]:
    """Where the recording is paused: wherever it can be and nothing is recorded, as far out as possible.

    Args:
        region, never: as for `stretches`.
        recorded: which of the region's ops, counted from its first, are recorded.
    """
    chosen: list[Pause] = []
    paused: set[int] = set()
    for index, stretch in enumerate(stretches(profile, region, never)):
        pause = stretch.pause
        if stretch.parent in paused:
            paused.add(index)
        elif recorded.isdisjoint(range(pause.start, pause.end)):
            paused.add(index)
            chosen.append(pause)
    return tuple(chosen)


def _tick(op: Op) -> int:
    return op.tick


def _calls_within(profile: Profile, region: int) -> range:
    """The module calls inside of a region's, its own left out."""
    end = region + 1
    while end < len(profile.calls) and profile.calls[end].start < profile.calls[region].end:
        end += 1
    return range(region + 1, end)


def _barred(calls: Sequence[ModuleCall], ops: Sequence[Op], within: range) -> set[int]:
    """The calls inside of a region that the recording has to see."""
    # What a record may hold or make again: a batch norm's counter, say, is neither.
    concerned = {storage for op in ops for storage in op.creates}
    concerned |= {storage for op in ops if op.creates for storage in op.reads}
    barred: set[int] = set()

    def bar(index: int) -> None:
        """And all that it is inside of."""
        while index in within and index not in barred:
            barred.add(index)
            index = calls[index].parent

    for op in ops:
        if not concerned.isdisjoint(op.writes):
            bar(op.module)
    compiled: set[int] = set()
    for index in within:
        if calls[index].class_name == _COMPILED or calls[index].parent in compiled:
            compiled.add(index)
        if calls[index].reshapes or index in compiled:
            bar(index)
    return barred


def _own(found: list[Stretch]) -> list[Stretch]:
    """The stretches, each without what is seen in those inside of it."""
    own = [stretch.seen for stretch in found]
    for stretch in found:
        if stretch.parent != NEVER:
            own[stretch.parent] -= stretch.seen
    return [Stretch(s.pause, s.parent, seen) for s, seen in zip(found, own, strict=True)]
