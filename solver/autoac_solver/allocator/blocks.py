"""Blocks of device memory, and the pools that free ones wait in."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

Key = tuple[int, int, int]
"""Of a free block: stream, size, address. It is the order of torch's `BlockComparatorSize`."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Args:
        pool: where it goes when it is free.
        stream: that it belongs to; only work on this stream is given it.
        address, size: bytes.
        allocated: somebody has it.
        mapped: there is memory behind it; never False outside of expandable segments.
        expandable: it is part of an expandable segment.
        before, after: its neighbours in the segment.
        used_on: other streams that work on it.
        waits_for: streams whose work on it is not done, where it was freed before.
        age_base: how often the pool had been searched when it became free.
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
        """Its place among the free ones."""
        return self.stream, self.size, self.address

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def is_free(self) -> bool:
        """Whether nobody has it, or works on it still."""
        return not self.allocated and not self.waits_for

    def cut(self, size: int) -> Block:
        """Make it the first `size` bytes of what it was, and return the rest."""
        rest = Block(self.pool, self.stream, self.address + size, self.size - size)
        rest.mapped, rest.expandable = self.mapped, self.expandable
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, other: Block) -> None:
        """Take in a neighbour."""
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
    """Free blocks, smallest first, for small allocations or for large ones.

    Args:
        small: for allocations of at most 1 MiB.
    """

    def __init__(self, small: bool) -> None:
        self.small = small
        self.searches = 0
        self.unmapped: list[Block] = []  # parts of expandable segments without memory, by stream and address
        self._keys: list[Key] = []
        self._blocks: dict[Key, Block] = {}

    def __iter__(self):
        return iter([self._blocks[key] for key in self._keys])

    def add(self, block: Block) -> None:
        """Let a block be found."""
        block.age_base = self.searches
        insort(self._keys, block.key)
        self._blocks[block.key] = block

    def remove(self, block: Block) -> None:
        """Let a block not be found any more; before its size changes."""
        del self._keys[bisect_left(self._keys, block.key)]
        del self._blocks[block.key]

    def from_size(self, stream: int, size: int) -> list[Block]:
        """The free blocks of a stream that have at least this size, smallest first."""
        first = bisect_left(self._keys, (stream, size, -1))
        last = bisect_left(self._keys, (stream + 1, -1, -1))
        return [self._blocks[key] for key in self._keys[first:last]]

    def smallest(self, stream: int, size: int) -> Block | None:
        """The first of `from_size`."""
        first = bisect_left(self._keys, (stream, size, -1))
        if first == len(self._keys) or self._keys[first][0] != stream:
            return None
        return self._blocks[self._keys[first]]

    def add_unmapped(self, block: Block) -> None:
        """Let a block without memory be found."""
        insort(self.unmapped, block, key=lambda block: (block.stream, block.address))
