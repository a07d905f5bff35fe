"""A profile with indices for frequent lookups while a problem is built."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any

from autoac_solver.build.engine_model import Costs, costs_of
from autoac_solver.records.profile import NEVER, Profile, Unpack


class Step:
    """The recorded step.

    Args:
        profile: not changed.

    Attributes:
        ticks: the ticks of its ops, in order.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.ticks = [op.tick for op in profile.tape]
        self._writes: dict[int, list[int]] = {}  # storage -> ticks at which it is written
        for op in profile.tape:
            for storage in op.writes:
                self._writes.setdefault(storage, []).append(op.tick)
        self._costs: dict[str, Any] = {}
        self._saves = sorted((s.tick, i) for i, s in enumerate(profile.saved))
        self._unpacks: dict[int, list[Unpack]] = {}  # by saved tensor
        for unpack in profile.unpacks:
            self._unpacks.setdefault(unpack.saved, []).append(unpack)

    def costs_of(self, engine: str, kind: type[Costs]) -> Costs:
        """See `engine_model.costs_of`."""
        if engine not in self._costs:
            self._costs[engine] = costs_of(self.profile, engine, kind)
        return self._costs[engine]

    def ops(self, start: int, end: int) -> range:
        """The ops at ticks in [start, end)."""
        return range(bisect_left(self.ticks, start), bisect_left(self.ticks, end))

    def saves(self, start: int, end: int) -> list[int]:
        """Indices of the tensors that autograd saves at ticks in [start, end), in order."""
        first, last = bisect_left(self._saves, (start, -1)), bisect_left(self._saves, (end, -1))
        return [index for _, index in self._saves[first:last]]

    def unpacks(self, saves: Iterable[int]) -> list[Unpack]:
        """The rows of `Profile.unpacks` of these saved tensors, in order."""
        found = [unpack for index in saves for unpack in self._unpacks.get(index, ())]
        return sorted(found, key=lambda unpack: unpack.tick)

    def written_after(self, storage: int, tick: int, before: int) -> bool:
        """Whether a storage is written at a tick strictly between `tick` and `before`."""
        ticks = self._writes.get(storage, ())
        position = bisect_right(ticks, tick)
        return position < len(ticks) and ticks[position] < before

    def last_tick_before(self, tick: int) -> int:
        """The tick of the last op before a tick, `NEVER` if there is none."""
        index = bisect_left(self.ticks, tick)
        return self.ticks[index - 1] if index else NEVER

    def draws(self, ops: Iterable[int]) -> bool:
        """Whether any of these ops draws from the random state that torch stashes for a region."""
        tape = self.profile.tape
        return any(tape[op].random_bytes and not tape[op].side_effect for op in ops)
