"""Which module calls become regions: the largest whose share of the saved bytes a budget may carry.

Large regions cost less time (fewer values are needed only because a region ends there) but need their whole working
set during backward; so the choices are tried from coarse to fine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from autoac_solver.build import may_run_twice
from autoac_solver.profile import NEVER, Profile

COARSEST_SHARE = 0.6
"""The largest share of all saved bytes that one region may hold."""

FINER = 0.5
"""Every next choice splits the regions that hold more than this share of the largest one."""

MOST_CHOICES = 5


def partitions(profile: Profile, engine: str = "replay") -> list[tuple[int, ...]]:
    """Choices of regions (module calls), from coarse to fine, and at last the whole model as one region.

    Args:
        engine: "replay" or "sac", which leaves alone what `may_run_twice` does not allow.
    """
    weights = _saved_bytes(profile)
    children: list[list[int]] = [[] for _ in profile.calls]
    roots = []
    for index, call in enumerate(profile.calls):
        (roots if call.parent < 0 else children[call.parent]).append(index)
    possible = [call.grad and (engine != "sac" or may_run_twice(call)) for call in profile.calls]
    limit = COARSEST_SHARE * sum(weights[root] for root in roots)
    choices: list[tuple[int, ...]] = []
    while len(choices) < MOST_CHOICES:
        choice = _descend(possible, roots, children, weights, limit)
        choices.append(choice)
        largest = max((weights[call] for call in choice if children[call]), default=0)
        if not largest:
            break
        limit = FINER * largest
    choices.append(tuple(root for root in roots if possible[root]))
    return [choice for choice in dict.fromkeys(choices) if choice] or [()]


def named_calls(profile: Profile, names: Sequence[str]) -> list[int]:
    """The module calls of the modules with these names, without calls inside another one of them."""
    wanted = set(names)
    chosen: set[int] = set()
    for index, call in enumerate(profile.calls):
        inside, parent = False, call.parent
        while parent >= 0 and not inside:
            inside, parent = parent in chosen, profile.calls[parent].parent
        if call.fqn in wanted and call.grad and not inside:
            chosen.add(index)
    return sorted(chosen)


def _descend(
    possible: list[bool], roots: list[int], children: list[list[int]], weights: list[int], limit: float
) -> tuple[int, ...]:
    chosen = []
    stack = list(reversed(roots))
    while stack:
        call = stack.pop()
        if not weights[call]:
            continue  # autograd saved nothing in it
        if possible[call] and (weights[call] <= limit or not children[call]):
            chosen.append(call)
        else:
            stack.extend(reversed(children[call]))
    return tuple(chosen)


def _saved_bytes(profile: Profile) -> list[int]:
    """For each module call, the bytes that were made in it and that autograd saved."""
    saved = {s.storage for s in profile.saved}
    marks = sorted(
        (storage.alloc, storage.bytes)
        for index, storage in enumerate(profile.storage_table)
        if index in saved and storage.alloc != NEVER
    )
    ticks = [tick for tick, _ in marks]
    sums = [0, *accumulate(size for _, size in marks)]
    return [
        sums[bisect_left(ticks, call.end)] - sums[bisect_left(ticks, call.start)] for call in profile.calls
    ]
