"""Reserved memory of a planned step: the caching allocator simulated on its allocations and frees, in order.

NOTE [ The order within a step ]
  Lifetimes define at which positions a storage is alive; the allocator also needs an order within a position.
  1. Before the first step: resident storages, in the order of the profile (parameters, buffers, the sample, optimizer
     state). Each has its own block.
  2. At a position, lifetimes that end there are freed first, in the order of their allocation. Then the op's results
     are allocated in the order of the profile, then its workspace.
  3. Storages that survive the step are freed after it (gradients, by `zero_grad`), and the step is repeated: a step
     that starts with other free blocks may reserve more. It repeats until reserved memory has not grown in `_STEADY`
     steps. Under some options it never stops growing: where free blocks are too large to be split for any request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from autoac_solver.allocator.blocks import Block
from autoac_solver.allocator.caching import CachingAllocator, OutOfReservedMemory
from autoac_solver.allocator.options import AllocatorOptions
from autoac_solver.problem.simulator import Decisions, Simulator

_STEADY, _MOST_STEPS = 2, 50


class NeverSteady(Exception):
    """Reserved memory grows with each step."""


class ReservedMemory:
    """Reserved memory under the decisions of one problem.

    Args:
        simulator: the problem's.
        resident: sizes of the storages alive before the step, bytes.
        parts: sizes of the blocks of a lifetime that is several requests in truth, by its index.
        options: the allocator's.
        device_bytes: the device's memory, 0 if unknown.
    """

    def __init__(
        self,
        simulator: Simulator,
        resident: Sequence[int],
        options: AllocatorOptions,
        device_bytes: int = 0,
        parts: Mapping[int, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self._simulator, self._resident = simulator, resident
        self._options, self._device_bytes = options, device_bytes
        lifetimes = simulator.problem.lifetimes
        self._bytes = [lifetime.bytes for lifetime in lifetimes]
        self._requests = [parts.get(index, (size,)) for index, size in enumerate(self._bytes)]
        self._start = np.array([lifetime.start for lifetime in lifetimes], dtype=np.int64)
        # Workspace and random states, which are no storages, come after the storages of the same position.
        last = max((lifetime.storage for lifetime in lifetimes), default=0) + 1
        self._rank = np.array(
            [lifetime.storage if lifetime.storage >= 0 else last for lifetime in lifetimes], dtype=np.int64
        )

    def peak_bytes(self, decisions: Decisions) -> int:
        """Peak reserved bytes over several repetitions of the step.

        Raises:
            OutOfReservedMemory: the step exceeds the process's memory fraction.
            NeverSteady: it still grows after `_MOST_STEPS` steps.
        """
        allocator = CachingAllocator(self._options, self._device_bytes)
        for size in self._resident:
            allocator.malloc(size)
        events = self._events(decisions)
        steady = 0
        for _ in range(_MOST_STEPS):
            before = allocator.peak_reserved_bytes
            self._step(allocator, events)
            steady = steady + 1 if allocator.peak_reserved_bytes == before else 0
            if steady == _STEADY:
                return before
        raise NeverSteady

    def peak_bytes_or_none(self, decisions: Decisions) -> int | None:
        """`peak_bytes`, or None where that raises."""
        try:
            return self.peak_bytes(decisions)
        except (OutOfReservedMemory, NeverSteady):
            return None

    def _events(self, decisions: Decisions) -> list[int]:
        """The ordered events of a step: allocation of a lifetime (index) or its free (-1 - index)."""
        exists, end = self._simulator.lives(decisions)
        alive = np.flatnonzero(exists & (end > self._start) & (np.array(self._bytes) > 0))
        order = np.lexsort((alive, self._rank[alive], self._start[alive]))
        allocated = alive[order]
        # Frees before allocations at a position; frees in the order of the allocations.
        times = np.concatenate([self._start[allocated], end[allocated]])
        kinds = np.concatenate([np.ones(len(allocated)), np.zeros(len(allocated))])
        what = np.concatenate([allocated, -1 - allocated])
        sequence = np.concatenate([np.arange(len(allocated))] * 2)
        return what[np.lexsort((sequence, kinds, times))].tolist()

    def _step(self, allocator: CachingAllocator, events: Sequence[int]) -> None:
        blocks: dict[int, list[Block | None]] = {}
        for event in events:
            if event >= 0:
                blocks[event] = [allocator.malloc(size) for size in self._requests[event]]
            else:
                for block in blocks.pop(-1 - event):
                    allocator.free(block)
        assert not blocks, "what survives the step ends with the axis"
