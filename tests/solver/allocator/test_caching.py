"""CUDA's caching allocator, rule by rule, by hand; and what holds of every sequence."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoac_solver.allocator.blocks import Block
from autoac_solver.allocator.caching import CachingAllocator, OutOfReservedMemory
from autoac_solver.allocator.options import MIB, parse_options

KIB = 2**10


def allocator(text: str = "", device_mib: int = 0) -> CachingAllocator:
    return CachingAllocator(parse_options(text), device_mib * MIB)


def given_block(found: Block | None) -> Block:
    assert found is not None
    return found


def mib(size: int) -> float:
    return size / MIB


# -- rule 1: rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (1000, 1024), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_512_bytes(size: int, rounded: int):
    assert allocator().round_size(size) == rounded


@pytest.mark.parametrize(
    ("size", "rounded"),
    [
        (
            1200 * MIB,
            1280 * MIB,
        ),  # torch's own example: 1200 with 4 divisions lies between 1024 and 2048, in steps of 256
        (1024 * MIB, 1024 * MIB),
        (1025 * MIB, 1280 * MIB),
        (2048, 2048),  # not more than 512 bytes for each division: rounded as without
        (2049, 2560),
    ],
)
def test_divisions_of_powers_of_two(size: int, rounded: int):
    assert allocator("roundup_power2_divisions:4").round_size(size) == rounded


def test_each_interval_has_its_own_divisions():
    """As torch reads this text, ">" begins with the last interval named, so that 1024 has 8 divisions."""
    some = allocator("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert [mib(some.round_size(size * MIB)) for size in (300, 600, 1100, 2100)] == [300, 768, 1152, 2304]
    assert some.round_size(100 * MIB + 1) == 100 * MIB + 512


# -- rules 2 and 6: pools and segments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ],
)
def test_what_is_asked_of_the_driver(size: int, segment: int):
    some = allocator()
    some.malloc(size)
    assert some.reserved_bytes == segment


def test_large_segments_of_another_size():
    some = allocator("large_segment_size_mb:64")
    some.malloc(2 * MIB)
    some.malloc(30 * MIB)
    assert mib(some.reserved_bytes) == 64  # the second is cut from the first's segment


def test_small_and_large_do_not_share_segments():
    some = allocator()
    some.free(some.malloc(20 * MIB))
    some.malloc(MIB)
    assert mib(some.reserved_bytes) == 22
    some.malloc(MIB)
    assert mib(some.reserved_bytes) == 22  # the other half of the small segment
    some.malloc(512)
    assert mib(some.reserved_bytes) == 24


def test_nothing_is_asked_for_no_bytes():
    some = allocator()
    assert some.malloc(0) is None
    some.free(None)
    assert some.reserved_bytes == 0


# -- rule 3: best fit ------------------------------------------------------------------------------------------------


def test_the_smallest_block_that_fits_is_taken():
    some = allocator()
    blocks = [given_block(some.malloc(size * MIB)) for size in (40, 12, 30)]
    for block in blocks:
        some.free(block)
    found = given_block(some.malloc(24 * MIB))
    assert found.address == blocks[2].address
    assert mib(some.reserved_bytes) == 82


def test_of_equal_blocks_the_one_at_the_lower_address():
    some = allocator()
    first, second = given_block(some.malloc(12 * MIB)), given_block(some.malloc(12 * MIB))
    some.free(second)
    some.free(first)
    assert given_block(some.malloc(12 * MIB)).address == first.address


# -- rule 4: splitting -----------------------------------------------------------------------------------------------


def test_a_rest_of_up_to_one_mib_is_not_cut_from_a_large_block():
    some = allocator()
    some.free(some.malloc(20 * MIB))
    whole = given_block(some.malloc(19 * MIB))
    assert (whole.size, some.allocated_bytes) == (20 * MIB, 20 * MIB)
    some.free(whole)
    assert given_block(some.malloc(19 * MIB - 512)).size == 19 * MIB - 512


def test_small_blocks_are_cut_to_512_bytes():
    some = allocator()
    assert given_block(some.malloc(MIB - 512)).size == MIB - 512
    assert given_block(some.malloc(MIB)).size == MIB
    assert given_block(some.malloc(512)).size == 512  # what was left between them and the end
    assert mib(some.reserved_bytes) == 2


# -- rule 5: max_split_size ------------------------------------------------------------------------------------------


def test_small_requests_leave_oversized_blocks_alone():
    some = allocator("max_split_size_mb:32")
    some.free(some.malloc(40 * MIB))
    some.malloc(12 * MIB)
    assert mib(some.reserved_bytes) == 52


def test_oversized_requests_take_oversized_blocks_near_their_size_whole():
    some = allocator("max_split_size_mb:32")
    some.free(some.malloc(60 * MIB))
    assert given_block(some.malloc(41 * MIB)).size == 60 * MIB  # less than 20 MiB too large, and not split
    other = allocator("max_split_size_mb:32")
    other.free(other.malloc(60 * MIB))
    assert given_block(other.malloc(40 * MIB)).size == 40 * MIB
    assert mib(other.reserved_bytes) == 100
    rounding = allocator("max_split_size_mb:32,max_non_split_rounding_mb:21")
    rounding.free(rounding.malloc(60 * MIB))
    assert given_block(rounding.malloc(40 * MIB)).size == 60 * MIB


# -- rule 7: joining -------------------------------------------------------------------------------------------------


def test_free_neighbours_become_one_block():
    some = allocator()
    parts = [given_block(some.malloc(5 * MIB)) for _ in range(4)]
    assert mib(some.reserved_bytes) == 20
    for part in (parts[0], parts[2], parts[3]):
        some.free(part)
    some.malloc(10 * MIB)  # behind the second part
    assert mib(some.reserved_bytes) == 20
    some.malloc(6 * MIB)  # before it there are only 5
    assert mib(some.reserved_bytes) == 40


def test_fragments_that_are_no_neighbours_do_not_help():
    some = allocator()
    parts = [given_block(some.malloc(5 * MIB)) for _ in range(4)]
    some.free(parts[0])
    some.free(parts[2])
    some.malloc(10 * MIB)
    assert (mib(some.allocated_bytes), mib(some.reserved_bytes)) == (20, 30)


# -- rule 8: streams -------------------------------------------------------------------------------------------------


def test_streams_have_blocks_of_their_own():
    some = allocator()
    some.free(some.malloc(12 * MIB, stream=0))
    some.malloc(12 * MIB, stream=1)
    assert mib(some.reserved_bytes) == 24
    some.malloc(12 * MIB, stream=0)
    assert mib(some.reserved_bytes) == 24


def test_a_block_that_another_stream_uses_waits_for_it():
    some = allocator()
    block = given_block(some.malloc(12 * MIB))
    some.record_stream(block, 1)
    some.free(block)
    assert some.allocated_bytes == 0
    some.malloc(12 * MIB)
    assert mib(some.reserved_bytes) == 24
    some.stream_done(1)
    some.malloc(12 * MIB)
    assert mib(some.reserved_bytes) == 24


def test_neighbours_that_wait_for_the_same_stream_are_joined():
    some = allocator()
    parts = [given_block(some.malloc(5 * MIB)) for _ in range(4)]
    for part in parts:
        some.record_stream(part, 1)
        some.free(part)
    some.stream_done(1)
    some.malloc(20 * MIB)
    assert mib(some.reserved_bytes) == 20


def test_use_on_the_blocks_own_stream_needs_no_waiting():
    some = allocator()
    block = given_block(some.malloc(12 * MIB))
    some.record_stream(block, 0)
    some.free(block)
    some.malloc(12 * MIB)
    assert mib(some.reserved_bytes) == 12


# -- rules 9 and 10: giving back -------------------------------------------------------------------------------------


def test_garbage_is_collected_above_the_threshold():
    some = allocator("garbage_collection_threshold:0.5,per_process_memory_fraction:0.99", device_mib=100)
    old, young = given_block(some.malloc(20 * MIB)), given_block(some.malloc(16 * MIB))
    some.free(old)
    some.malloc(22 * MIB)  # 36 MiB are reserved, less than half of 99: nothing is given back
    some.free(young)
    assert mib(some.reserved_bytes) == 58
    some.malloc(40 * MIB)
    # The old block was passed over in two searches, the young one in one: only the old one is as old as the average.
    assert mib(some.reserved_bytes) == 16 + 22 + 40


def test_without_a_fraction_no_garbage_is_collected():
    some = allocator("garbage_collection_threshold:0.1", device_mib=100)
    some.free(some.malloc(30 * MIB))
    some.malloc(60 * MIB)
    assert mib(some.reserved_bytes) == 90


def test_whole_free_segments_are_given_back_where_there_is_no_more():
    some = allocator("per_process_memory_fraction:0.5", device_mib=120)
    some.free(some.malloc(30 * MIB))
    part = some.malloc(5 * MIB)
    assert mib(some.reserved_bytes) == 30  # cut from the first
    some.free(part)
    some.malloc(40 * MIB)
    assert mib(some.reserved_bytes) == 40
    with pytest.raises(OutOfReservedMemory, match="on top of"):
        some.malloc(30 * MIB)


def test_a_segment_in_use_is_not_given_back():
    some = allocator("per_process_memory_fraction:0.5", device_mib=120)
    some.free(some.malloc(30 * MIB))
    some.malloc(5 * MIB)
    with pytest.raises(OutOfReservedMemory):
        some.malloc(40 * MIB)


def test_an_oversized_block_that_is_large_enough_is_given_back_first():
    some = allocator("max_split_size_mb:20,per_process_memory_fraction:0.5", device_mib=200)
    for block in [some.malloc(size * MIB) for size in (12, 80)]:
        some.free(block)
    some.malloc(56 * MIB)  # for which that of 80 MiB is too large by more than 20
    assert mib(some.reserved_bytes) == 12 + 56  # that of 12 MiB may stay


def test_oversized_blocks_that_are_not_enough_bring_all_others_with_them():
    """Without the two of 24 MiB there is room for 60, but they are less than that: then everything is given back."""
    some = allocator("max_split_size_mb:20,per_process_memory_fraction:0.8", device_mib=100)
    for block in [some.malloc(size * MIB) for size in (12, 24, 24)]:
        some.free(block)
    some.malloc(60 * MIB)
    assert mib(some.reserved_bytes) == 60


def test_of_oversized_blocks_the_largest_go_first_and_no_more_than_needed():
    some = allocator("max_split_size_mb:20,per_process_memory_fraction:0.9", device_mib=150)
    for block in [some.malloc(size * MIB) for size in (24, 30, 40, 12)]:
        some.free(block)
    some.malloc(60 * MIB)
    assert mib(some.reserved_bytes) == 24 + 12 + 60  # 40 and 30 suffice


# -- rule 11: expandable segments ------------------------------------------------------------------------------------


def test_pages_are_mapped_as_needed():
    some = allocator("expandable_segments:True")
    some.malloc(512)
    assert mib(some.reserved_bytes) == 2
    some.malloc(2 * MIB)
    assert mib(some.reserved_bytes) == 22
    some.malloc(18 * MIB)
    assert mib(some.reserved_bytes) == 22
    some.malloc(50 * MIB)
    assert mib(some.reserved_bytes) == 2 + 20 + 60  # 10 MiB of the last page are left
    some.malloc(25 * MIB)
    assert mib(some.reserved_bytes) == 2 + 20 + 60 + 20  # and are used, with 15 of a new one


def test_growing_does_not_leave_holes_where_other_segments_do():
    """Torch's own case for them: a batch that is a little larger finds no room in what the smaller one left."""
    growing, fixed = allocator("expandable_segments:True"), allocator()
    for some in (growing, fixed):
        for size in (100, 104, 108):
            blocks = [some.malloc(size * MIB) for _ in range(4)]
            for block in blocks:
                some.free(block)
    assert mib(growing.reserved_bytes) == 440  # 4 times 108, in pages of 20
    assert mib(fixed.reserved_bytes) == 4 * (100 + 104 + 108)


def test_pages_are_given_back():
    some = allocator("expandable_segments:True")
    blocks = [some.malloc(30 * MIB) for _ in range(3)]
    some.free(blocks[1])
    some.empty_cache()
    assert mib(some.reserved_bytes) == 80  # of 30 to 60 the page from 40 to 60
    some.malloc(30 * MIB)  # what is missing of the hole is mapped again
    assert mib(some.reserved_bytes) == 100
    for block in blocks[::2]:
        some.free(block)


def test_large_segments_of_another_size_are_pages_of_that_size():
    some = allocator("expandable_segments:True,large_segment_size_mb:64")
    some.malloc(2 * MIB)
    assert mib(some.reserved_bytes) == 64


# -- whatever the sequence -------------------------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(MIB // 2, 3 * MIB), st.integers(8 * MIB, 64 * MIB))
CALLS = st.lists(st.tuples(SIZES, st.integers(0, 5), st.booleans()), max_size=60)
"""A size to allocate; which of the blocks that are there to free before, and whether to."""
OPTIONS = st.sampled_from(
    [
        *("", "expandable_segments:True", "max_split_size_mb:24", "roundup_power2_divisions:4"),
        *("large_segment_size_mb:32", "expandable_segments:True,roundup_power2_divisions:8"),
    ]
)


def run(some: CachingAllocator, calls: list[tuple[int, int, bool]], streams: int = 1) -> list[Block]:
    """What is there in the end; every state on the way is checked."""
    there: list[Block] = []
    for index, (size, which, frees) in enumerate(calls):
        if frees and there:
            some.free(there.pop(which % len(there)))
        there.append(given_block(some.malloc(size, stream=index % streams)))
        assert there[-1].size >= size
        assert some.allocated_bytes == sum(block.size for block in there)
        assert some.reserved_bytes >= some.allocated_bytes
        spans = sorted((block.address, block.address + block.size) for block in there)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    return there


@settings(max_examples=150, deadline=None)
@given(CALLS, OPTIONS, st.integers(1, 3))
def test_blocks_never_overlap_and_reserved_is_never_less_than_allocated(calls, text: str, streams: int):
    some = allocator(text)
    for block in run(some, calls, streams):
        some.free(block)
    assert some.allocated_bytes == 0
    some.empty_cache()
    assert some.reserved_bytes == 0  # all neighbours were joined again


@settings(max_examples=100, deadline=None)
@given(CALLS)
def test_the_same_step_again_never_reserves_less(calls):
    some = allocator()
    peaks = []
    for _ in range(3):
        for block in run(some, calls):
            some.free(block)
        peaks.append(some.peak_reserved_bytes)
    assert peaks == sorted(peaks)


@settings(max_examples=150, deadline=None)
@given(st.lists(SIZES, max_size=30))
def test_expandable_segments_reserve_the_peak_in_pages_where_the_last_is_freed_first(sizes: list[int]):
    """In the order of a stack, free memory is always in one piece: only whole pages are lost."""
    growing, fixed = allocator("expandable_segments:True"), allocator()
    for some in (growing, fixed):
        stack = []
        for index, size in enumerate(sizes):
            stack.append(some.malloc(size))
            if index % 3 == 2:
                some.free(stack.pop())
    small = large = most_small = most_large = 0
    stack = []
    for index, size in enumerate(sizes):
        rounded = growing.round_size(size)
        stack.append(rounded)
        small, large = small + rounded * (rounded <= MIB), large + rounded * (rounded > MIB)
        most_small, most_large = max(most_small, small), max(most_large, large)
        if index % 3 == 2:
            rounded = stack.pop()
            small, large = small - rounded * (rounded <= MIB), large - rounded * (rounded > MIB)
    expected = -(-most_small // (2 * MIB)) * 2 * MIB + -(-most_large // (20 * MIB)) * 20 * MIB
    assert growing.peak_reserved_bytes == expected
    assert growing.peak_reserved_bytes <= fixed.peak_reserved_bytes + 20 * MIB  # the last page
