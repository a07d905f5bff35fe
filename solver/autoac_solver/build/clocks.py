"""The planned step as pieces of host and device work, and their prices.

NOTE [ Two clocks ]
  1. Each op is a piece: the host launches it, the device computes it. Its replay is another piece, with the engine's
     bookkeeping for a recorded op added to the host. (This includes the part of the bookkeeping done in forward.) A
     replay reads no value on the host again; code that runs a second time does.
  2. The cost of wrapping a region is host time at the region's first op.
  3. Views launch no kernels: their time is host time, an equal part before each op. Time that belongs to no op is
     device time at the end of the step.
  4. The integer program adds up prices, see NOTE [ Prices of one path ].
  5. CUDA runs a stream's kernels in the order of their launches, and the host goes on after a launch (CUDA C++
     Programming Guide, "Asynchronous Concurrent Execution").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autoac_solver.build.draft import Draft
from autoac_solver.build.engine_model import EngineModel
from autoac_solver.problem.prices import priced
from autoac_solver.problem.problem import RECOMPUTE, Literal, Problem, Work


def with_two_clocks(draft: Draft, model: EngineModel, problem: Problem, loss: int) -> Problem:
    """Add `work` to the problem and replace its seconds by prices.

    Args:
        problem: its options and regions carry their seconds, of host or device.
        loss: the group of the losses, -1 for none.
    """
    return priced(replace(problem, work=tuple(_pieces(draft, model, problem, loss))))[0]


def _pieces(draft: Draft, model: EngineModel, problem: Problem, loss: int) -> Iterator[Work]:
    """All pieces in order."""
    profile, axis = draft.step.profile, draft.axis
    first: dict[int, list[int]] = {}
    for region in draft.regions:
        first.setdefault(region.ops[0], []).append(region.index)
    for index, whole in enumerate(draft.cut_calls, len(draft.regions) + (loss >= 0)):
        first.setdefault(whole.ops[0], []).append(index)
    chunked = {found.backward: found for found in draft.losses}
    record_s = {index: _record_s(draft, problem, index) for index in range(len(draft.groups.all))}
    for op, again in zip(axis.op, axis.replayed, strict=True):
        record = profile.tape[op]
        if again:
            group = draft.groups.of_op[op]
            host_s = record.host_s + record_s[group]
            waits = record.waits or (record.read_on_host and model.runs_code_twice)
            yield Work(host_s, record.again_s, waits, (Literal(group, RECOMPUTE),))
            continue
        for region in first.get(op, ()):
            yield Work(problem.regions[region].wrap_s, 0.0, wrapped=region)
        if op in chunked:
            for made in (profile.tape[index] for index in chunked[op].forward):
                yield Work(made.host_s, made.again_s, literals=(Literal(loss, RECOMPUTE),))
        yield Work(record.host_s + profile.views_of_op_s, record.time_s, record.host_waits)
    yield Work(0.0, profile.outside_s)


def _record_s(draft: Draft, problem: Problem, index: int) -> float:
    """Seconds of the engine's bookkeeping per rerun op of a group, without the op's own time."""
    group = problem.groups[index]
    windows = draft.regions[group.region].windows
    ops = _rerunning(group.ops, windows[0].rerun)
    time_s = max((option.time_s for option in group.options), default=0.0) / len(windows)
    again_s = sum(draft.step.profile.tape[op].again_s for op in ops)
    return max(0.0, time_s - again_s) / len(ops) if ops else 0.0


def _rerunning(ops: Iterable[int], rerun: dict[int, int]) -> list[int]:
    return [op for op in ops if op in rerun]
