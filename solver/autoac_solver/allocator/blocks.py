"""Blocks of device memory, and the pools of free blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

Key = tuple[int, int, int]
"""Sort key of a free block: stream, size, address, as in torch's `BlockComparatorSize`."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Args:
        pool: the pool it returns to when it is free.
        stream: the stream it belongs to; only allocations on this stream take it.
        address, size: bytes.
        allocated: it is in use.
        mapped: it is backed by memory; False only in expandable segments.
        expandable: it is part of an expandable segment.
        before, after: its neighbours in the segment.
        used_on: other streams that use it (`record_stream`).
        waits_for: after `free`: streams whose work on it is not done yet.
        age_base: number of searches of the pool when it became free.
    """

    pool: Pool
    stream: int
    address: int
    size: int
    allocated: bool = False
    mapped: bool = True
    expandable: bool = False
    before: Block | None = None
    after: Block | None = None
    used_on: set[int] = field(default_factory=set)
    waits_for: set[int] = field(default_factory=set)
    age_base: int = 0

    @property
    def key(self) -> Key:
        """Its sort key among the free blocks."""
        return self.stream, self.size, self.address

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether it is neither allocated nor waiting for a stream."""
        return not self.allocated and not self.waits_for

    def cut(self, size: int) -> Block:
        """Shrink the block to its first `size` bytes, and return the rest as a new block."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size)
        rest.mapped, rest.expandable = self.mapped, self.expandable
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, other: Block) -> None:
        """Merge a neighbour into the block."""
        if self.before is other:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class Pool:
    """Free blocks in ascending order of size, for small or for large allocations.

    Args:
        small: the pool is for allocations of at most 1 MiB.
    """

    def __init__(self, small: bool) -> None:
        self.small = small
        self.searches = 0
        self.unmapped: list[Block] = []  # Unmapped parts of expandable segments, by stream and address.
        self._keys: list[Key] = []
        self._blocks: dict[Key, Block] = {}

    def __iter__(self):
        return iter([self._blocks[key] for key in self._keys])

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.age_base = self.searches
        insort(self._keys, block.key)
        self._blocks[block.key] = block

    def remove(self, block: Block) -> None:
        """Remove a block. Call this before its size changes."""
        del self._keys[bisect_left(self._keys, block.key)]
        del self._blocks[block.key]

    def from_size(self, stream: int, size: int) -> list[Block]:
        """The free blocks of a stream of at least this size, smallest first."""
        first = bisect_left(self._keys, (stream, size, -1))
        last = bisect_left(self._keys, (stream + 1, -1, -1))
        return [self._blocks[key] for key in self._keys[first:last]]

    def smallest(self, stream: int, size: int) -> Block | None:
        """The first block of `from_size`, None if there is none."""
        first = bisect_left(self._keys, (stream, size, -1))
        if first == len(self._keys) or self._keys[first][0] != stream:
            return None
        return self._blocks[self._keys[first]]

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped block."""
        insort(self.unmapped, block, key=lambda block: (block.stream, block.address))
