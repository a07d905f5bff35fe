"""The pieces of the planned step for two clocks, and prices from them.

NOTE [ Two clocks ]
  1. An op is a piece: the host launches it, the device computes it. A replay is the same once more, with the engine's
     bookkeeping for a recorded op on the host. (The part of the bookkeeping that is done in forward is put there, too.)
  2. What wrapping a region costs is the host's, at the region's first op; a pause that is lost as well.
  3. Views launch nothing: their time is the host's, at the beginning of the step. What belongs to no op is the
     device's, at its end.
  4. Prices are what the integer program adds up: the seconds of a piece that lie on the longest path through the step
     with nothing recomputed. That path is one of those whose longest is the end of the planned step, so the sum
     never promises more than the plan takes, and a bound on the sum is a bound on the time. It may promise less where a
     plan recomputes so much in one lane that the longest path becomes another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from autoac_solver.build.draft import Draft
from autoac_solver.problem.problem import RECOMPUTE, Literal, Option, Problem, Work
from autoac_solver.records.clocks import longest_path


def with_two_clocks(draft: Draft, problem: Problem, loss: int) -> Problem:
    """The problem with its work, and with prices in place of the seconds that were given.

    Args:
        problem: whose options, regions and shared costs have the seconds that they take, on whichever lane.
        loss: the group of the losses, -1 for none.
    """
    work = tuple(_pieces(draft, problem, loss))
    always = [not piece.literals and piece.wrapped < 0 for piece in work]
    host_s = np.array([piece.host_s for piece in work])
    device_s = np.array([piece.device_s for piece in work])
    waits = np.array([piece.waits for piece in work], dtype=bool)
    on_host, on_device = longest_path(host_s * always, device_s * always, waits & always)
    price_s = host_s * on_host + device_s * on_device
    of_literals: dict[tuple[Literal, ...], float] = {}
    of_region = [0.0] * len(problem.regions)
    for piece, price in zip(work, price_s.tolist(), strict=True):
        if piece.wrapped >= 0:
            of_region[piece.wrapped] += price
        elif piece.literals:
            of_literals[piece.literals] = of_literals.get(piece.literals, 0.0) + price
    groups = []
    for index, group in enumerate(problem.groups):
        price = of_literals.pop((Literal(index, RECOMPUTE),), 0.0)
        groups.append(replace(group, options=tuple(_priced(option, price) for option in group.options)))
    return replace(
        problem,
        groups=tuple(groups),
        regions=tuple(replace(r, wrap_s=price) for r, price in zip(problem.regions, of_region, strict=True)),
        shared=tuple(replace(s, time_s=of_literals.pop(s.literals, 0.0)) for s in problem.shared),
        work=work,
    )


def _priced(option: Option, price_s: float) -> Option:
    return replace(option, time_s=price_s) if option.time_s or option.action == "recompute" else option


def _pieces(draft: Draft, problem: Problem, loss: int) -> Iterator[Work]:
    """All pieces in order."""
    profile, axis = draft.step.profile, draft.axis
    first = {region.ops[0]: region.index for region in draft.regions if len(region.ops)}
    shared: dict[int, list[Work]] = {}
    for cost in problem.shared:
        region = problem.groups[cost.literals[0].group].region if cost.literals else -1
        if region >= 0:
            shared.setdefault(region, []).append(Work(cost.time_s, 0.0, literals=cost.literals))
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
            yield from shared.get(first[op], ())
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
