"""The pieces of the planned step for two clocks, and prices from them.

NOTE [ Two clocks ]
  1. An op is a piece: the host launches it, the device computes it. A replay is the same once more, with the engine's
     bookkeeping for a recorded op on the host. (The part of the bookkeeping that is done in forward is put there, too.)
  2. What wrapping a region costs is the host's, at the region's first op.
  3. Views launch nothing: their time is the host's, at the beginning of the step. What belongs to no op is the
     device's, at its end.
  4. Prices are what the integer program adds up, see NOTE [ Prices of one path ].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoac_solver.build.draft import Draft
from autoac_solver.problem.prices import priced
from autoac_solver.problem.problem import RECOMPUTE, Literal, Problem, Work


def with_two_clocks(draft: Draft, problem: Problem, loss: int) -> Problem:
    """The problem with its work, and with prices in place of the seconds that were given.

    Args:
        problem: whose options and regions have the seconds that they take, on whichever lane.
        loss: the group of the losses, -1 for none.
    """
    return priced(replace(problem, work=tuple(_pieces(draft, problem, loss))))[0]


def _pieces(draft: Draft, problem: Problem, loss: int) -> Iterator[Work]:
    """All pieces in order."""
    profile, axis = draft.step.profile, draft.axis
    first = {region.ops[0]: region.index for region in draft.regions if len(region.ops)}
    chunked = {found.backward: found for found in draft.losses}
    record_s = {index: _record_s(draft, problem, index) for index in range(len(draft.groups.all))}
    yield Work(profile.views_s, 0.0)
    for op, again in zip(axis.op, axis.replayed, strict=True):
        record = profile.tape[op]
        if again:
            group = draft.groups.of_op[op]
            host_s = record.host_s + record_s[group]
            yield Work(host_s, record.again_s, record.waits, (Literal(group, RECOMPUTE),))
            continue
        if op in first:
            yield Work(problem.regions[first[op]].wrap_s, 0.0, wrapped=first[op])
        if op in chunked:
            made = profile.tape[chunked[op].log_softmax]
            yield Work(made.host_s, made.again_s, literals=(Literal(loss, RECOMPUTE),))
        yield Work(record.host_s, record.time_s, record.waits)
    yield Work(0.0, profile.outside_s)


def _record_s(draft: Draft, problem: Problem, index: int) -> float:
    """What the engine takes for each of a group's ops that run again, on top of these."""
    group = problem.groups[index]
    rerun = draft.regions[group.region].window.rerun
    ops = _rerunning(group.ops, rerun)
    time_s = max((option.time_s for option in group.options), default=0.0)
    again_s = sum(draft.step.profile.tape[op].again_s for op in ops)
    return max(0.0, time_s - again_s) / len(ops) if ops else 0.0


def _rerunning(ops: Iterable[int], rerun: dict[int, int]) -> list[int]:
    return [op for op in ops if op in rerun]
