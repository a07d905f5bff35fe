"""Which module calls become regions: the largest whose share of the saved bytes a budget may carry.

Large regions cost less time (fewer values are needed only because a region ends there) but need their whole working
set during backward; so the choices are tried from coarse to fine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate

from autoac_solver.build.engines import DEFAULT, engine_model
from autoac_solver.records.engines import COMPILE
from autoac_solver.records.profile import NEVER, Profile

COARSEST_SHARE = 0.6
"""The largest share of all saved bytes that one region may hold."""

FINER = 0.5
"""Every next choice splits the regions that hold more than this share of the largest one."""

MOST_CHOICES = 5


def partitions(profile: Profile, engine: str = DEFAULT) -> list[tuple[int, ...]]:
    """Choices of regions (module calls), from coarse to fine, and at last the whole model as one region.

    Args:
        engine: what it may not run (`EngineModel.may_run`) is left alone.
    """
    weights, model = _saved_bytes(profile), engine_model(engine)
    if model.compiles and profile.compiled is not None:  # only what was measured can be chosen from
        return [tuple(sorted(call for region in profile.compiled.regions for call in region.calls))]
    children: list[list[int]] = [[] for _ in profile.calls]
    roots = []
    for index, call in enumerate(profile.calls):
        (roots if call.parent < 0 else children[call.parent]).append(index)
    possible = [call.grad and model.may_run(call) for call in profile.calls]
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


LEAST_SHARE = 0.05
"""Blocks of a class that hold a smaller share of all saved bytes together are not worth compiling, nor is a single
layer that does by itself."""

_ALIKE = 3
"""So many modules of a class inside of one another are its blocks."""


def blocks(profile: Profile) -> tuple[int, ...]:
    """The module calls to compile one by one where nobody names any: a model's blocks.

    As the coarsest choice of `partitions`, but that a module which holds several large ones of a class gives way to
    these, and that small ones are left out.
    """
    weights = _saved_bytes(profile)
    children: list[list[int]] = [[] for _ in profile.calls]
    roots = []
    for index, call in enumerate(profile.calls):
        (roots if call.parent < 0 else children[call.parent]).append(index)
    total = sum(weights[root] for root in roots)
    model = engine_model(COMPILE)
    possible = [
        call.grad and model.may_run(call) and not _holds_blocks(profile, children, weights, index)
        for index, call in enumerate(profile.calls)
    ]
    chosen = _descend(possible, roots, children, weights, COARSEST_SHARE * total)
    held: Counter[Hashable] = Counter()
    kind = {call: profile.calls[call].class_name if children[call] else call for call in chosen}
    for call in chosen:
        held[kind[call]] += weights[call]
    return tuple(call for call in chosen if possible[call] and held[kind[call]] >= LEAST_SHARE * total)


def whole(profile: Profile) -> tuple[int, ...]:
    """The calls of the model itself."""
    return tuple(index for index, call in enumerate(profile.calls) if call.parent < 0 and call.grad)


def _holds_blocks(profile: Profile, children: list[list[int]], weights: list[int], call: int) -> bool:
    """Whether there are several modules of a class in a module, none of them tiny, each made of others itself."""
    alike: Counter[str] = Counter()
    stack = list(children[call])
    while stack:
        inside = stack.pop()
        stack += children[inside]
        if children[inside] and weights[inside] >= LEAST_SHARE / 2 * weights[call]:
            alike[profile.calls[inside].class_name] += 1
    return max(alike.values(), default=0) >= _ALIKE
