"""The axis of positions: the tape's ops in order, with each region's ops repeated before its first unpack.

They are repeated in each backward that finds the graph kept by an earlier one, see `Region.windows`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.groups import Groups
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step


class Axis:
    """Positions of the planned step. The constructor also fills in each region's `windows`.

    Args:
        step, regions, groups, engine: parts of the problem.

    Attributes:
        op, replayed: per position the op that runs there, and whether it is a replay.
        forward: op -> position of its first run.
    """

    def __init__(self, step: Step, regions: Sequence[Region], groups: Groups, engine: EngineModel) -> None:
        self._step = step
        self.op: list[int] = []
        self.replayed: list[bool] = []
        self._ticks: list[int] = []  # Ops of a window have the tick of its first unpack.
        next_op = 0
        windows = [(region, window) for region in regions for window in region.windows]
        for region, window in sorted(windows, key=lambda found: found[1].begin):
            stop = bisect_left(step.ticks, window.begin)
            self._append(range(next_op, stop), False, None)
            next_op = stop
            window.first = len(self.op)
            ops = [op for op in region.ops if op in groups.of_op and engine.reruns(step, region, op)]
            window.rerun = {op: window.first + i for i, op in enumerate(ops)}
            window.rerun_ticks = [step.ticks[op] for op in ops]
            self._append(ops, True, window.begin)
            window.end = len(self.op)
        self._append(range(next_op, len(step.ticks)), False, None)
        positions = enumerate(zip(self.op, self.replayed, strict=True))
        self.forward = {op: p for p, (op, again) in positions if not again}

    def __len__(self) -> int:
        return len(self.op)

    def position(self, tick: int) -> int:
        """The first position at or after this tick; a storage freed at the tick is not alive there."""
        return bisect_left(self._ticks, tick)

    def rerun_at(self, region: Region, tick: int) -> int:
        """The position after the reruns of all region ops before this tick."""
        return region.window.first + bisect_left(region.window.rerun_ticks, tick)

    def rerun_free(self, region: Region, free: int) -> int:
        """Position at which the second run of the region frees a storage that the first run freed at tick `free`."""
        return region.window.end if free > region.end else self.rerun_at(region, free)

    def recorded_until(self, region: Region, op: int) -> int:
        """The position at which the record of an op that runs again is dropped: with the graph where that is kept."""
        ran = region.windows[-1].rerun[op] + 1
        return max(ran, self.position(region.last_release)) if region.windows[-1].keeps else ran

    def _append(self, ops: Sequence[int], replayed: bool, tick: int | None) -> None:
        self.op.extend(ops)
        self.replayed.extend([replayed] * len(ops))
        self._ticks.extend(self._step.ticks[op] if tick is None else tick for op in ops)
