"""A step of micro-batches of different sizes, as if they came in any order and each could be as large as the largest.

NOTE [ Micro-batches in any order ]
  With batches of drawn lengths, a later step of a loop has its largest micro-batch elsewhere. A plan has a program for
  each recorded call, and runs each call under that of the smallest one with at least as many elements (`attach.Root`).
  Then more memory can be alive at the largest call than was recorded. So that its peak holds anywhere, each call is
  planned as if it found
  - the gradients of all calls, to which it adds its own at once;
  - as much memory from the call before it as any recorded call finds from its own predecessor;
  - as many bytes of inputs as if all were the largest, if the loop has fetched them before the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from autoac_solver.records.profile.rows import LOSS_SIZED_BY_VALUES, SIZED_BY_VALUES, ModuleCall, Storage

if TYPE_CHECKING:
    from autoac_solver.records.profile.profile import Profile

IN_ITS_ORDER = "If their order varies, plan for all orders: autoac.solve(profile.in_any_order(), budget)"
_IN_ANY_ORDER = "They may come in any order, and the predicted peak is that of the worst"
"""End of a profile's note on the calls."""

_STAYS = "Parameter", "Buffer", "Gradient", "Optstate"


def in_any_order(profile: Profile) -> Profile:
    """The profile with calls in any order; itself if they are equal, or if one begins before another's backward."""
    roots = [call for call in profile.calls if not call.fqn and call.grad]
    if profile.any_order or len(set(profile.call_elements)) < 2 or has_unequal_calls_at_once(profile):
        return profile
    found = _gradients_first(profile, roots[0].start)
    found += _left(profile, roots)
    found += _inputs(profile, roots)
    notes = tuple(note.replace(IN_ITS_ORDER, _IN_ANY_ORDER) for note in profile.notes)
    return replace(profile, storage_table=tuple(found), notes=notes, any_order=True)


def is_sized_by_values(profile: Profile) -> bool:
    """Whether shapes in the step depend on the values of its batch."""
    return not {SIZED_BY_VALUES, LOSS_SIZED_BY_VALUES}.isdisjoint(profile.facts)


def has_unequal_calls_at_once(profile: Profile) -> bool:
    """Whether calls of the root module differ in size, and the graph of one is alive when a later one begins."""
    if len(set(profile.call_elements)) < 2:
        return False
    starts = [call.start for call in profile.calls if not call.fqn and call.grad]
    return any(
        bisect_left(starts, saved.tick) != bisect_left(starts, saved.released) for saved in profile.saved
    )


def _gradients_first(profile: Profile, start: int) -> list[Storage]:
    """The storages; what becomes a gradient in the step is one from the first call on, and is added to.

    That is done when the backward node has ended, whose next op may be another parameter's gradient: a linear layer's
    weight comes before its bias.
    """
    found, before = [], []
    ticks = [*(op.tick for op in profile.tape), profile.end, profile.end]
    for storage in profile.storage_table:
        if storage.kind == "Gradient" and storage.alloc > 0:
            before.append(replace(storage, alloc=start))
            storage = replace(storage, free=min(storage.free, ticks[bisect_left(ticks, storage.alloc) + 2]))
        found.append(storage)
    return [*found, *before]


def _left(profile: Profile, roots: list[ModuleCall]) -> list[Storage]:
    """Storages for the bytes that calls may find from the call before, beyond those found in the recorded step.

    Some are freed when the call returns, where the loop binds its output to the name of the last one.
    """
    inputs = {storage for root in roots for storage in root.inputs}
    ticks = [op.tick for op in profile.tape]
    left: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for root, following in zip(roots, [*roots[1:], None], strict=True):
        after = bisect_left(ticks, root.end)
        returns = ticks[after] if after < len(ticks) else profile.end
        alive = [
            storage
            for index, storage in enumerate(profile.storage_table)
            if index not in inputs
            and storage.kind not in _STAYS
            and 0 <= storage.alloc < root.start < storage.free
        ]
        rebound = sum(storage.bytes for storage in alive if storage.free <= returns)
        left.append((rebound, sum(storage.bytes for storage in alive) - rebound))
        ends.append((returns, profile.end if following is None else following.start))
    most = [max(sizes) for sizes in zip(*left, strict=True)]
    return [
        Storage(limit - size, root.start, end, "Temp")
        for root, sizes, until in zip(roots, left, ends, strict=True)
        for limit, size, end in zip(most, sizes, until, strict=True)
        if limit > size
    ]


def _inputs(profile: Profile, roots: list[ModuleCall]) -> Iterable[Storage]:
    """Further inputs before the step, if all calls' inputs are there."""
    table = profile.storage_table
    sizes = []
    for root in roots:
        own = [table[index] for index in root.inputs if table[index].kind not in _STAYS]
        if any(storage.alloc > 0 for storage in own):
            return []
        sizes.append(sum(storage.bytes for storage in own))
    further = max(sizes) * len(sizes) - sum(sizes)
    return [Storage(further, roots[0].start, profile.end, "Input")] if further else []
