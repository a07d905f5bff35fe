"""Where engine replay need not look: torch's own layers, inside a region, of which nothing is recorded.

Seeing an op costs the engine several times as much as keeping its values, which costs it nothing. So while a layer runs
in which nothing is recomputed, the recording is paused, if that is worth the pause. Only a layer of `torch.nn` that
calls no other module: what it runs does not depend on data, so it writes nothing that the profiled step did not. And
not where that step did: what is written in place may be recorded elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence

from autoac_solver.records.plan import Pause
from autoac_solver.records.profile import ModuleCall, Op, Profile

_WORTH = 2.0
"""A pause has to spare this many times its cost: modules that could pause and do not cost a little too."""


def possible_pauses(
    profile: Profile, region: int, op_s: float, pause_s: float, never: Container[str] = ()
) -> list[Pause]:
    """The pauses that are possible in a region and worth it, in order; none inside another.

    Args:
        region: its module call.
        op_s, pause_s: what an op and a pause cost the recording, seconds.
        never: modules that cannot be paused, by name.
    """
    calls = profile.calls
    ops = profile.tape[_first(profile.tape, calls[region].start) : _first(profile.tape, calls[region].end)]
    within = _calls_within(profile, region)
    barred = _barred(calls, ops, within)
    found: list[Pause] = []
    for index in within:
        call = calls[index]
        start, end = _first(ops, call.start), _first(ops, call.end)
        pause = Pause(call.fqn, start, end, end - start + call.views)
        spares = pause.seen * op_s > _WORTH * pause_s
        if index not in barred and call.fqn not in never and start < end and spares:
            found.append(pause)
    return found


def _first(ops: Sequence[Op], tick: int) -> int:
    """Position of the first op at or after a tick."""
    return bisect_left(ops, tick, key=lambda op: op.tick)


def _calls_within(profile: Profile, region: int) -> range:
    """The module calls inside of a region's, its own left out."""
    end = region + 1
    while end < len(profile.calls) and profile.calls[end].start < profile.calls[region].end:
        end += 1
    return range(region + 1, end)


def _barred(calls: Sequence[ModuleCall], ops: Sequence[Op], within: range) -> set[int]:
    """The calls inside of a region that the recording has to see."""
    # What a record may hold or make again: a batch norm's counter, say, is neither.
    made = {storage for op in ops for storage in op.creates}
    concerned = made.union(*(op.reads for op in ops if op.creates or not made.isdisjoint(op.writes)))
    barred = {op.module for op in ops if not concerned.isdisjoint(op.writes)}
    barred |= {calls[index].parent for index in within}
    barred |= {index for index in within if not calls[index].plain}
    # A pause is known by its module and where it begins: a call that runs no op is not told from the next one.
    runs_ops = {index: _first(ops, calls[index].start) < _first(ops, calls[index].end) for index in within}
    empty = {calls[index].fqn for index in within if not runs_ops[index]}
    return barred | {index for index in within if calls[index].fqn in empty}
