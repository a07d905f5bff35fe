"""What is reserved for a step: the order of its allocations, and steps that are run again."""

import pytest

from autoac_solver.allocator.caching import CachingAllocator
from autoac_solver.allocator.options import MIB, parse_options
from autoac_solver.allocator.step import NeverSteady, ReservedMemory
from autoac_solver.problem.problem import (
    Lifetime,
    Problem,
    RegionCost,
    save_or_recompute,
    when_recomputed,
    when_saved,
)
from autoac_solver.problem.simulator import Simulator


def problem(lifetimes: list[Lifetime], positions: int = 10, resident: int = 0) -> Simulator:
    groups = (save_or_recompute(0, 1.0),)
    return Simulator(Problem(positions, resident, 1.0, groups, (RegionCost(),), tuple(lifetimes)))


def reserved_mib(
    lifetimes: list[Lifetime], decisions=(0,), text: str = "", resident: tuple[int, ...] = ()
) -> float:
    memory = ReservedMemory(problem(lifetimes, resident=sum(resident)), resident, parse_options(text))
    return memory.peak_bytes(decisions) / MIB


def test_what_dies_makes_room_for_what_is_allocated_at_the_same_position():
    one, next_ = Lifetime(30 * MIB, 0, 4, storage=0), Lifetime(30 * MIB, 4, 8, storage=1)
    assert reserved_mib([one, next_]) == 30


def test_resident_memory_has_blocks_of_its_own():
    assert (
        reserved_mib([Lifetime(30 * MIB, 0, 4, storage=0)], resident=(12 * MIB, 4 * MIB, 100))
        == 12 + 20 + 2 + 30
    )


def test_decisions_say_what_is_allocated():
    lifetimes = [
        Lifetime(40 * MIB, 0, 9, when_saved(0), storage=0),
        Lifetime(60 * MIB, 2, 3, when_recomputed(0), storage=1),
    ]
    assert reserved_mib(lifetimes, (0,)) == 40
    assert reserved_mib(lifetimes, (1,)) == 60


def test_results_come_before_workspace_and_in_the_profiles_order():
    """The workspace of 12 would take the hole of 14 if it came first, and the result of 14 a segment of its own."""
    lifetimes = [
        Lifetime(14 * MIB, 0, 2, storage=0),
        Lifetime(12 * MIB, 2, 3),  # workspace
        Lifetime(14 * MIB, 2, 5, storage=1),
    ]
    assert reserved_mib(lifetimes) == 14 + 12


def test_a_second_step_may_reserve_more():
    """In the first step 20 MiB are new. In the second 4 MiB are cut from the segment of 24, which then has no room."""
    lifetimes = [
        Lifetime(24 * MIB, 1, 3, storage=1),
        Lifetime(4 * MIB, 0, 8, storage=0),
        Lifetime(24 * MIB, 4, 6, storage=2),
    ]
    simulator = problem(lifetimes)
    memory = ReservedMemory(simulator, (), parse_options("large_segment_size_mb:32"))
    allocator = CachingAllocator(parse_options("large_segment_size_mb:32"))
    events = memory._events((0,))
    memory._step(allocator, events)
    first = allocator.peak_reserved_bytes
    assert memory.peak_bytes((0,)) >= first
    assert allocator.allocated_bytes == 0


def test_memory_that_never_stops_growing_has_no_peak():
    """Each step a new segment: a free one of 20 MiB is too large to be split, and so no request gets it."""
    memory = ReservedMemory(
        problem([Lifetime(11 * MIB, 0, 4, storage=0)]), (), parse_options("max_split_size_mb:20")
    )
    assert memory.peak_bytes_or_none((0,)) == 12 * MIB
    grown = ReservedMemory(
        problem([Lifetime(2 * MIB, 0, 4, storage=0)]), (), parse_options("max_split_size_mb:20")
    )
    with pytest.raises(NeverSteady):
        grown.peak_bytes((0,))
    assert grown.peak_bytes_or_none((0,)) is None


def test_several_requests_at_once_fit_where_one_does_not():
    """30 MiB in one block need a segment of their own; as 20 and 10 they take the place of what has died."""
    lifetimes = [
        Lifetime(20 * MIB, 0, 4, storage=0),
        Lifetime(12 * MIB, 0, 4, storage=1),
        Lifetime(30 * MIB, 4, 8),
    ]
    simulator, options = problem(lifetimes), parse_options("")
    parts = {2: (20 * MIB, 10 * MIB)}
    assert ReservedMemory(simulator, (), options).peak_bytes((0,)) == (20 + 12 + 30) * MIB
    assert ReservedMemory(simulator, (), options, parts=parts).peak_bytes((0,)) == (20 + 12) * MIB


def test_frees_before_allocations_in_order():
    lifetimes = [
        Lifetime(100, 2, 5, storage=2),
        Lifetime(100, 0, 2, storage=0),
        Lifetime(100, 0, 2, storage=1),
        Lifetime(100, 2, 3),
        Lifetime(0, 2, 3, storage=3),
        Lifetime(100, 4, 4, storage=4),
    ]
    memory = ReservedMemory(problem(lifetimes), (), parse_options(""))
    assert memory._events((0,)) == [1, 2, -2, -3, 0, 3, -4, -1]


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_survivors_are_freed_after_the_step(text: str):
    grows = [Lifetime(30 * MIB, 3, 10, storage=0)]
    assert reserved_mib(grows, text=text) == (30 if not text else 40)
