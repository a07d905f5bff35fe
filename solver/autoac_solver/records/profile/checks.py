"""Consistency checks of a profile from a file, beyond types and ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoac_solver.records.compiled import EAGER, MOST_POINTS
from autoac_solver.records.disk.limits import MOST_BYTES
from autoac_solver.records.names import PART
from autoac_solver.records.profile.rows import NEVER, Part

if TYPE_CHECKING:
    from autoac_solver.records.profile.profile import Profile


def check(profile: Profile) -> None:
    """Check that all references in a profile are valid and consistent.

    Raises:
        ValueError: they are not.
    """
    _check_ops(profile)
    _check_storages(profile)
    _check_calls(profile)
    _check_parts(profile)
    _check_compiled(profile)
    _demand(
        len(profile.call_elements) in (0, profile.n_root_calls),
        "it has sizes for other calls of the model than it has",
    )
    for saved in profile.saved:
        _demand(_refers(profile.storage_table, saved.storage), "a saved tensor has no storage")
        _demand(saved.module == NEVER or _refers(profile.calls, saved.module), "a saved tensor has no module")
        in_order = 0 <= saved.tick <= saved.dropped <= saved.released <= profile.end
        _demand(in_order, "a saved tensor's ticks are out of order")
        _demand(
            saved.unpacked == NEVER or saved.tick <= saved.unpacked <= profile.end,
            "a saved tensor is used before it is saved, or after the step",
        )
    _check_unpacks(profile)


def _check_unpacks(profile: Profile) -> None:
    last_tick = -1
    for unpack in profile.unpacks:
        _demand(_refers(profile.saved, unpack.saved), "a use in backward is of no saved tensor")
        saved = profile.saved[unpack.saved]
        in_order = last_tick < unpack.tick <= unpack.dropped and saved.unpacked <= unpack.tick
        _demand(in_order and unpack.dropped <= saved.released, "a use in backward is out of order")
        last_tick = unpack.tick


def _check_ops(profile: Profile) -> None:
    last_tick, created = -1, [False] * len(profile.storage_table)
    for op in profile.tape:
        where = f"op {op.name} at tick {op.tick}"
        _demand(last_tick < op.tick < profile.end, f"{where} is out of order")
        last_tick = op.tick
        for storage in (*op.reads, *op.writes, *op.creates):
            _demand(_refers(created, storage), f"{where} refers to a storage that is not there")
        _demand(op.module == NEVER or _refers(profile.calls, op.module), f"{where} is in no module")
        _demand(
            op.signature == NEVER or _refers(profile.signatures, op.signature), f"{where} has no signature"
        )
        for storage in op.creates:
            _demand(not created[storage], f"{where} creates a storage that was created before")
            _demand(
                profile.storage_table[storage].alloc == op.tick, f"{where} creates a storage of another tick"
            )
            created[storage] = True


def _check_storages(profile: Profile) -> None:
    for storage in profile.storage_table:
        _demand(NEVER <= storage.alloc <= storage.free <= profile.end, "a storage's ticks are out of order")
    total = sum(storage.bytes for storage in profile.storage_table)
    total += sum(op.workspace_bytes + op.random_bytes for op in profile.tape)
    _demand(total <= MOST_BYTES, f"it speaks of more than {MOST_BYTES} bytes of memory")


def _check_calls(profile: Profile) -> None:
    """Check that calls start in order, nest inside their parents without overlaps, and are numbered per module."""
    free_from: dict[int, int] = {NEVER: 0}  # Call -> least start of the next call inside it.
    numbers: dict[str, int] = {}
    views: dict[int, int] = {}  # Call -> number of views in its direct child calls.
    for index, call in enumerate(profile.calls):
        where = f"call {call.call} of module {call.fqn!r}"
        _demand(call.parent in free_from, f"{where} is inside of one that is not there")
        until = profile.end if call.parent == NEVER else profile.calls[call.parent].end
        _demand(free_from[call.parent] <= call.start <= call.end <= until, f"{where} has ticks out of order")
        free_from[call.parent], free_from[index] = call.end, call.start
        _demand(call.call == numbers.get(call.fqn, 0), f"{where} has a wrong number")
        numbers[call.fqn] = call.call + call.grad
        _demand(
            all(_refers(profile.storage_table, storage) for storage in call.inputs),
            f"{where} refers to a storage that is not there",
        )
        views[call.parent] = views.get(call.parent, 0) + call.views
    for index, inside in views.items():
        _demand(
            index == NEVER or inside <= profile.calls[index].views,
            f"call {index} has fewer views than the calls in it",
        )


def _check_parts(profile: Profile) -> None:
    """Check that parts are numbered from 1 in each call and hold ops, and that each is inside or beside the others."""
    ticks = [op.tick for op in profile.tape]
    numbers: dict[int, int] = {}
    around: list[Part] = []
    for part in profile.parts:
        where = _check_part(profile, part, ticks)
        _demand(numbers.get(part.call, 0) < part.number, f"{where} is out of order")
        numbers[part.call] = part.number
        while around and (around[-1].call != part.call or around[-1].end <= part.start):
            around.pop()
        _demand(not around or part.end <= around[-1].end, f"{where} overlaps another one")
        around.append(part)
    for tail in profile.tails:
        where = _check_part(profile, tail, ticks)
        _demand(tail.call not in numbers, f"{where} is of a call that has other parts")
        numbers[tail.call] = tail.number


def _check_part(profile: Profile, part: Part, ticks: Sequence[int]) -> str:
    """Check one part by itself; what to call it."""
    where = f"part {part.number} of call {part.call}"
    _demand(_refers(profile.calls, part.call), f"{where} is of a call that is not there")
    call = profile.calls[part.call]
    _demand(PART not in call.fqn, f"{where} is of a module with {PART!r} in its name")
    _demand(
        call.grad and call.start <= part.start < part.end <= call.end,
        f"{where} is not inside of its call",
    )
    _demand(bisect_left(ticks, part.start) < bisect_left(ticks, part.end), f"{where} has no op")
    _demand(
        all(_refers(profile.storage_table, storage) for storage in part.inputs),
        f"{where} refers to a storage that is not there",
    )
    _demand(part.views <= call.views, f"{where} has more views than its call")
    return where


def _check_compiled(profile: Profile) -> None:
    """Check that measured regions are calls of the profile, none in two rows, each with points or a failure."""
    regions = () if profile.compiled is None else profile.compiled.regions
    calls = [call for region in regions for call in region.calls]
    known = range(len(profile.calls)), profile.tail_spans
    _demand(all(any(call in some for some in known) for call in calls), "a compiled region is no call")
    _demand(len(set(calls)) == len(calls), "a call is in two compiled regions")
    compiled = [
        point for region in regions if region.failure for point in region.points if point.name != EAGER
    ]
    _demand(not compiled, "a region that is not compiled has compiled points")
    _demand(all(r.points or r.failure for r in regions), "a compiled region has no points")
    most = max((len(region.points) for region in regions), default=0)
    _demand(most <= MOST_POINTS, f"a compiled region has more than {MOST_POINTS} points")


def _refers(table: Sequence[Any], index: int) -> bool:
    return 0 <= index < len(table)


def _demand(holds: bool, fault: str) -> None:
    if not holds:
        raise ValueError(fault)
