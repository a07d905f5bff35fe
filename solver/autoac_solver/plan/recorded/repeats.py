"""How often the profiled step calls modules within one call of the model, and what each call saves."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from autoac_solver.records.profile import ModuleCall, Profile

_LEAST_SHARE = 0.01
"""Modules count whose calls save at least this share of the step's activations."""


def most_calls(profile: Profile) -> dict[str, tuple[int, int]]:
    """Module -> its most calls with gradients on within one call of the model, and the bytes that one of them saves.

    Without the model itself, modules that are called outside of its calls too, and those whose calls save little.
    """
    roots: list[ModuleCall] = []
    for call in profile.calls:
        is_nested = bool(roots) and call.start < roots[-1].end  # in a forward that calls itself
        if call.grad and not (call.fqn or is_nested):
            roots.append(call)
    table = profile.storage_table
    starts = [root.start for root in roots]
    counts: dict[str, Counter[int]] = {}
    outside = set()
    saved_bytes: dict[str, int] = {}
    saved = sorted((one for one in profile.saved if table[one.storage].alloc > 0), key=lambda one: one.tick)
    ticks = [one.tick for one in saved]
    for call in _forward_calls(profile):
        root = bisect_left(starts, call.start + 1) - 1
        if root < 0 or call.start >= roots[root].end:
            outside.add(call.fqn)
            continue
        counts.setdefault(call.fqn, Counter())[root] += 1
        within = saved[bisect_left(ticks, call.start) : bisect_left(ticks, call.end)]
        size = sum(
            table[storage].bytes
            for storage in {one.storage for one in within if one.released > call.end}
            if table[storage].alloc >= call.start
        )
        saved_bytes[call.fqn] = max(saved_bytes.get(call.fqn, 0), size)
    least = _LEAST_SHARE * (profile.peak_bytes - profile.resident_bytes)
    most = {name: max(found.values()) for name, found in counts.items() if name not in outside}
    return {
        name: (n, saved_bytes[name]) for name, n in most.items() if n * saved_bytes[name] >= max(1, least)
    }


def _forward_calls(profile: Profile) -> Iterator[ModuleCall]:
    """Calls of submodules with gradients on, without those that backward makes (a checkpoint of the model's own)."""
    ticks = [op.tick for op in profile.tape]
    for call in profile.calls:
        first = bisect_left(ticks, call.start)
        if call.fqn and call.grad and first < len(ticks) and not profile.tape[first].backward:
            yield call
