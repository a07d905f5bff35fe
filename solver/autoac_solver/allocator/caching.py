"""Simulation of CUDA's caching allocator: the same blocks, segments and counts for the same calls, without memory.

NOTE [ The allocator's rules ]
  From `c10/cuda/CUDACachingAllocator.cpp` in torch; the names of its functions are in brackets.
  1. Sizes are rounded up to 512 bytes, or to parts of a power of two if `roundup_power2_divisions` is set
     [`round_size`, `roundup_power2_next_division`].
  2. Allocations of at most 1 MiB come from the small pool, others from the large pool [`get_pool`].
  3. The smallest free block of the same stream that is large enough is taken; at equal size, the lowest address
     [`get_free_block`, `BlockComparatorSize`].
  4. The remainder becomes a free block if it has at least 512 bytes in the small pool and in expandable segments, or
     more than 1 MiB in the large pool [`should_split`]. Otherwise the whole block counts as allocated.
  5. `max_split_size_mb`: allocations below it never take a block of at least that size. Allocations of at least that
     size take no block that is larger by `max_non_split_rounding_mb` or more, and do not split it [`get_free_block`].
  6. If no block fits, a segment is requested from the driver: 2 MiB for a small allocation, 20 MiB
     (`large_segment_size_mb`) below 10 MiB, else the size rounded up to 2 MiB [`get_allocation_size`].
  7. A freed block is merged with its free neighbours in the segment [`free_block`, `try_merge_blocks`].
  8. A block used by other streams (`record_stream`) becomes free when they are done [`insert_events`].
  9. With `garbage_collection_threshold`, before a segment is requested, whole free segments of the large pool that have
     been unused for longer than the average are released, until reserved memory is below the threshold
     [`garbage_collect_cached_blocks`].
  10. If the driver is out of memory, oversized free blocks are released if `max_split_size_mb` is set, then all whole
      free segments, and the request is repeated [`release_available_cached_blocks`, `release_cached_blocks`].
  11. `expandable_segments`: one segment per pool and stream, in which memory is mapped page by page: 2 MiB pages in the
      small pool, 20 MiB pages in the large one. An allocation takes the lowest address at which adjacent free and
      unmapped blocks are large enough together, and maps only the missing part [`find_expandable_block`, `map_block`,
      `try_allocate_expandable_block`].

  Two assumptions: the driver returns ascending addresses, which only matters for the choice between blocks of equal
  size (rule 3); and an expandable segment never runs out of addresses (torch: 1 1/8 of the device).

  No library does this. Torch's memory_viz draws snapshots of a real allocator, and the two simulators that were looked
  at are parts of other projects: one in Python (Amazon's `TorchCachingAllocatorSimulator`) with one pool, and neither
  garbage collection nor uses on other streams; one in C++ (`allocatorSim`) of 2022, before expandable segments.
"""

from __future__ import annotations

from collections.abc import Callable

from autoac_solver.allocator.blocks import Block, Pool
from autoac_solver.allocator.options import MIB, AllocatorOptions

BLOCK_BYTES = 512  # `kMinBlockSize` in torch's c10/core/AllocatorConfig.h
SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LEAST_LARGE_BYTES = 10 * MIB
ROUND_LARGE_BYTES = 2 * MIB
_ENDLESS = 2**60


class OutOfReservedMemory(Exception):
    """An allocation exceeds the reservation limit even after all free memory was released."""


class CachingAllocator:
    """See NOTE [ The allocator's rules ].

    Args:
        options: see `AllocatorOptions`; None for the defaults.
        device_bytes: the device's memory, for `memory_fraction`; 0 if unknown.

    Attributes:
        allocated_bytes, reserved_bytes: current bytes, as in `torch.cuda.memory_allocated` and `memory_reserved`.
        peak_allocated_bytes, peak_reserved_bytes: their maxima so far.
    """

    def __init__(self, options: AllocatorOptions | None = None, device_bytes: int = 0) -> None:
        self.options = AllocatorOptions() if options is None else options
        fraction = self.options.memory_fraction
        self._limit = int(fraction * device_bytes) if fraction < 1 and device_bytes else None
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self._small, self._large = Pool(small=True), Pool(small=False)
        self._next_address = 0
        self._waiting: list[Block] = []

    # -- calls by a program ------------------------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> Block | None:
        """Allocate a block; None for 0 bytes, for which torch does not call the allocator.

        Raises:
            OutOfReservedMemory: there is not enough memory even after rule 10.
        """
        if not size:
            return None
        size = self.round_size(size)
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._cached(pool, stream, size)
        if block is None:
            if self._limit is not None and self.options.garbage_collection_threshold:
                self._collect_garbage()
            block = self._new(pool, stream, size)
        if self._splits(block, size):
            pool.add(block.cut(size))
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Free a block returned by `malloc`."""
        if block is None:
            return
        assert block.allocated, "it was freed before"
        block.allocated = False
        self.allocated_bytes -= block.size
        if block.used_on:
            block.waits_for, block.used_on = block.used_on, set()
            self._waiting.append(block)
        else:
            self._release(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that work on another stream uses a block."""
        if stream != block.stream:
            block.used_on.add(stream)

    def stream_done(self, stream: int) -> None:
        """Record that the work queued on a stream is done: its event has completed."""
        waiting, self._waiting = self._waiting, []
        for block in waiting:  # one after the other: a neighbour whose turn is still to come is not free yet
            block.waits_for.discard(stream)
            if block.waits_for:
                self._waiting.append(block)
            else:
                self._release(block)

    def empty_cache(self) -> None:
        """Release all free memory: whole segments, and whole pages of expandable segments."""
        for stream in {stream for block in self._waiting for stream in block.waits_for}:
            self.stream_done(stream)
        for pool in (self._large, self._small):
            for block in pool:
                if block.expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._give_back(block)

    # -- rules -------------------------------------------------------------------------------------------------

    def round_size(self, size: int) -> int:
        """Rule 1."""
        return rounded_size(size, self.options)

    def segment_size(self, size: int) -> int:
        """Rule 6."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < LEAST_LARGE_BYTES:
            return self.options.large_segment_bytes
        return _up(size, ROUND_LARGE_BYTES)

    def _splits(self, block: Block, size: int) -> bool:
        """Rule 4."""
        rest = block.size - size
        if block.pool.small or self.options.expandable_segments:
            return rest >= BLOCK_BYTES
        return not self._is_oversized(size) and rest > SMALL_BYTES

    def _is_oversized(self, size: int) -> bool:
        most = self.options.max_split_bytes
        return most is not None and size >= most

    def _cached(self, pool: Pool, stream: int, size: int) -> Block | None:
        """Rules 3 and 5."""
        pool.searches += 1
        block = pool.smallest(stream, size)
        if block is None:
            return None
        if block.expandable:
            block = _least_expandable(pool.from_size(stream, size))
        if self._is_oversized(size):
            if block.size >= size + self.options.max_non_split_rounding_bytes:
                return None
        elif self._is_oversized(block.size):
            return None
        pool.remove(block)
        return block

    def _release(self, block: Block) -> None:
        """Rule 7."""
        pool = block.pool
        for neighbour in (block.before, block.after):
            self._join(block, neighbour)
        pool.add(block)

    def _join(self, block: Block, neighbour: Block | None) -> None:
        if neighbour is None or not neighbour.is_free or neighbour.mapped != block.mapped:
            return
        if neighbour.mapped:
            block.pool.remove(neighbour)
        else:
            block.pool.unmapped.remove(neighbour)
        block.absorb(neighbour)

    # -- the driver --------------------------------------------------------------------------------------------

    def _new(self, pool: Pool, stream: int, size: int) -> Block:
        """A new block from the driver, after releasing free memory if necessary: rule 10."""
        wanted = self.segment_size(size)
        for give_back in (_nothing, lambda: self._give_back_oversized(pool, stream, size), self.empty_cache):
            if give_back() is False:
                continue
            if self._limit is None or self.reserved_bytes + wanted <= self._limit:
                break
        else:
            raise OutOfReservedMemory(f"{wanted} bytes on top of {self.reserved_bytes} of {self._limit}")
        if self.options.expandable_segments:
            return self._expanded(pool, stream, size)
        block = Block(pool, stream, self._next_address, wanted)
        self._next_address += wanted
        self._reserve(wanted)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _give_back(self, block: Block) -> None:
        """Release a whole segment."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _give_back_oversized(self, pool: Pool, stream: int, size: int) -> bool:
        """Release the smallest oversized free block that is large enough, else the largest ones until it suffices.

        Returns:
            Whether it suffices. If not, torch does not ask the driver before it has released everything.
        """
        if self.options.max_split_bytes is None:
            return False
        wanted = max(size, self.options.max_split_bytes)
        fitting = pool.smallest(stream, wanted)
        if fitting is not None:
            if not fitting.expandable:
                self._give_back(fitting)
            return True
        given = 0
        for block in reversed(pool.from_size(stream, self.options.max_split_bytes)):
            if given >= wanted or block.expandable:
                break
            given += block.size
            self._give_back(block)
        return given >= wanted

    def _collect_garbage(self) -> None:
        """Rule 9."""
        assert self._limit is not None
        target = self.reserved_bytes - int(self.options.garbage_collection_threshold * self._limit)
        if target <= 0:
            return
        blocks = [block for block in self._large if not block.is_split]
        ages = {id(block): self._large.searches - block.age_base for block in blocks}
        reclaimed = 0
        while blocks and reclaimed < target:
            average = sum(ages[id(block)] for block in blocks) / len(blocks)
            old = [block for block in blocks if ages[id(block)] >= average]
            if not old:
                break
            for block in old:
                reclaimed += block.size
                self._give_back(block)
            blocks = [block for block in blocks if ages[id(block)] < average]

    # -- expandable segments: rule 11 --------------------------------------------------------------------------

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.small else self.options.large_segment_bytes

    def _expanded(self, pool: Pool, stream: int, size: int) -> Block:
        block = self._room(pool, stream, size)
        if not block.mapped:
            block = self._map(block, min(block.size, size))
        while block.size < size:
            assert block.after is not None
            block = self._map(block.after, min(size - block.size, block.after.size))
        pool.remove(block)
        return block

    def _room(self, pool: Pool, stream: int, size: int) -> Block:
        """The first free or unmapped block at which a long enough run of such blocks starts."""
        for block in pool.unmapped:
            if block.stream == stream:
                first = block.before if block.before is not None and block.before.is_free else block
                if _free_from(first, size):
                    return first
        segment = Block(pool, stream, self._next_address, _ENDLESS, mapped=False, expandable=True)
        self._next_address += _ENDLESS
        pool.add_unmapped(segment)
        return segment

    def _map(self, block: Block, size: int) -> Block:
        """Map whole pages at the beginning of an unmapped block, and merge the result with free neighbours."""
        size = _up(size, self._page_bytes(block.pool))
        block.pool.unmapped.remove(block)
        block.mapped = True
        if size < block.size:
            rest = block.cut(size)
            rest.mapped = False
            block.pool.add_unmapped(rest)
        self._reserve(block.size)
        self._release(block)
        return block

    def _unmap(self, block: Block) -> None:
        """Unmap the whole pages of a free block."""
        page = self._page_bytes(block.pool)
        segment = block.address // _ENDLESS * _ENDLESS
        first = segment + _up(block.address - segment, page)
        last = segment + (block.address + block.size - segment) // page * page
        if first >= last:
            return
        block.pool.remove(block)
        if first > block.address:
            middle = block.cut(first - block.address)
            block.pool.add(block)
            block = middle
        if block.size > last - first:
            block.pool.add(block.cut(last - first))
        self.reserved_bytes -= block.size
        block.mapped = False
        for neighbour in (block.before, block.after):
            self._join(block, neighbour)
        block.pool.add_unmapped(block)


_nothing: Callable[[], bool | None] = lambda: None  # noqa: E731


def _least_expandable(blocks: list[Block]) -> Block:
    """The best fit of blocks in expandable segments; unmapped room behind a free block counts as its size."""

    def room(block: Block) -> int:
        after = block.after
        return block.size + (after.size if after is not None and not after.mapped else 0)

    best = blocks[0]
    for block in blocks[1:]:
        if room(block) >= room(best):
            break
        best = block
    return best


def _free_from(block: Block | None, size: int) -> bool:
    """Whether the run of free and unmapped blocks starting here has at least `size` bytes."""
    room = 0
    while room < size and block is not None and block.is_free:
        room += block.size
        block = block.after
    return room >= size


def rounded_size(size: int, options: AllocatorOptions) -> int:
    """The size of the block that a request of `size` bytes gets, if it is cut to fit: rule 1."""
    if size < BLOCK_BYTES:
        return BLOCK_BYTES
    divisions = options.divisions(size)
    if divisions > 1 and size > BLOCK_BYTES * divisions:
        return _next_division(size, divisions)
    return _up(size, BLOCK_BYTES)


def _next_division(size: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal parts between two powers of two."""
    if not size & (size - 1):
        return size
    floor = 1 << (size.bit_length() - 1)
    part = floor >> (divisions.bit_length() - 1)
    return floor << 1 if not part else _up(size, part)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
