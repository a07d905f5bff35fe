"""Choices of module calls as regions: the largest modules within a share of the saved bytes.

Large regions cost less time (fewer values are needed only because a region ends there) but need their whole working
set during backward. So several choices are tried, from coarse to fine.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from autoac_solver.build.engines import DEFAULT, EngineModel, engine_model
from autoac_solver.build.losses.cross_entropy import LOG_SOFTMAX
from autoac_solver.build.regions import may_be_region
from autoac_solver.build.step import Step
from autoac_solver.plan.parts import PartTree
from autoac_solver.records.compiled import CompiledTable
from autoac_solver.records.engines import COMPILE, REPLAY
from autoac_solver.records.profile import NEVER, ModuleCall, Op, Profile

COARSEST_SHARE = 0.6
"""The largest share of all saved bytes that one region may hold."""

FINER = 0.5
"""The next finer choice splits regions that hold more than this share of the largest one."""

MOST_CHOICES = 5


def partitions(profile: Profile, engine: str = DEFAULT) -> list[tuple[int, ...]]:
    """Choices of regions (module calls), from coarse to fine, and last the whole model as one region.

    Args:
        engine: module calls that it refuses are left out.
    """
    weights, model = _saved_bytes(profile), engine_model(engine)
    if model.compiles and profile.compiled is not None:
        return _around_compiled(profile, profile.compiled)
    children, roots = _tree(profile)
    possible = _possible(profile, len(profile.calls), model)
    choices = _by_size(possible, roots, children, weights)
    choices.append(tuple(root for root in roots if possible[root]))
    return [choice for choice in dict.fromkeys(choices) if choice] or [()]


def _around_compiled(profile: Profile, table: CompiledTable) -> list[tuple[int, ...]]:
    """The measured regions; and if some are not compiled, the compiled ones with those of engine replay around them.

    Each with the tails, and without: then the loss may be computed over chunks of rows.
    """
    found = _around_blocks(profile, table)
    without = (tuple(call for call in choice if call not in profile.tail_spans) for choice in found)
    return [choice for choice in dict.fromkeys((*found, *without)) if choice]


def _around_blocks(profile: Profile, table: CompiledTable) -> list[tuple[int, ...]]:
    measured = tuple(sorted(call for region in table.regions for call in region.calls))
    compiled = [call for region in table.regions if not region.failure for call in region.calls]
    if len(compiled) == len(measured):
        return [measured]
    windows = [(profile.spans[call].start, profile.spans[call].end) for call in compiled]
    choices = [measured]
    for choice in partitions(profile, REPLAY):
        spans = ((call, profile.calls[call].start, profile.calls[call].end) for call in choice)
        beside = [call for call, start, end in spans if all(end <= s or e <= start for s, e in windows)]
        choices.append(tuple(sorted((*compiled, *beside))))
    return list(dict.fromkeys(choices))


def partitions_in_parts(profile: Profile, engine: str = DEFAULT) -> list[tuple[int, ...]]:
    """Choices of regions with parts of calls among them, from coarse to fine; empty if the engine cannot have parts."""
    model = engine_model(engine)
    if model.runs_code_twice or model.compiles or not profile.parts:
        return []
    children, roots = _tree(profile)
    tree, weights = PartTree(profile, children), _saved_bytes(profile, profile.spans)
    possible = _possible(profile, len(profile.spans), model)
    inside = [tree.inside(span) for span in range(len(profile.spans))]
    choices = _by_size(possible, roots, inside, weights)
    return [choice for choice in dict.fromkeys(choices) if any(span >= len(profile.calls) for span in choice)]


def _possible(profile: Profile, count: int, model: EngineModel) -> list[bool]:
    """For each of the first spans whether it may be a region."""
    step = Step(profile)
    return [may_be_region(step, span, model) for span in range(count)]


def named_calls(profile: Profile, names: Sequence[str]) -> list[int]:
    """The outermost module calls of the modules with these names."""
    wanted = set(names)
    chosen: set[int] = set()
    for index, call in enumerate(profile.calls):
        inside, parent = False, call.parent
        while parent >= 0 and not inside:
            inside, parent = parent in chosen, profile.calls[parent].parent
        if call.fqn in wanted and call.grad and not inside:
            chosen.add(index)
    return sorted(chosen)


def _tree(profile: Profile) -> tuple[list[list[int]], list[int]]:
    """Per module call the calls directly in it, and the calls that are in no other."""
    children: list[list[int]] = [[] for _ in profile.calls]
    roots = []
    for index, call in enumerate(profile.calls):
        (roots if call.parent < 0 else children[call.parent]).append(index)
    return children, roots


def _by_size(
    possible: list[bool], roots: list[int], children: list[list[int]], weights: list[int]
) -> list[tuple[int, ...]]:
    """Choices from coarse to fine; arguments as for `_descend`."""
    limit = COARSEST_SHARE * sum(weights[root] for root in roots)
    choices: list[tuple[int, ...]] = []
    while len(choices) < MOST_CHOICES:
        choice = _descend(possible, roots, children, weights, limit)
        choices.append(choice)
        largest = max((weights[call] for call in choice if children[call]), default=0)
        if not largest:
            break
        limit = FINER * largest
    return choices


def _descend(
    possible: list[bool], roots: list[int], children: list[list[int]], weights: list[int], limit: float
) -> tuple[int, ...]:
    chosen = []
    stack = list(reversed(roots))
    while stack:
        call = stack.pop()
        if not weights[call]:
            continue  # Autograd saved nothing in it.
        if possible[call] and (weights[call] <= limit or not children[call]):
            chosen.append(call)
        else:
            stack.extend(reversed(children[call]))
    return tuple(chosen)


def _saved_bytes(profile: Profile, spans: Sequence[ModuleCall] | None = None) -> list[int]:
    """Per module call the bytes that were made in it and saved by autograd."""
    saved = {s.storage for s in profile.saved}
    marks = sorted(
        (storage.alloc, storage.bytes)
        for index, storage in enumerate(profile.storage_table)
        if index in saved and storage.alloc != NEVER
    )
    ticks = [tick for tick, _ in marks]
    sums = [0, *accumulate(size for _, size in marks)]
    return [
        sums[bisect_left(ticks, call.end)] - sums[bisect_left(ticks, call.start)]
        for call in (profile.calls if spans is None else spans)
    ]


LEAST_SHARE = 0.05
"""Blocks of a class that together hold a smaller share of all saved bytes are not worth compiling; the same holds for a
single layer."""

_ALIKE = 3
"""A module with at least this many modules of one class inside is split into these blocks."""


def blocks(profile: Profile) -> tuple[int, ...]:
    """The module calls to compile by default: a model's blocks.

    Like the coarsest choice of `partitions`, except that a module containing several large modules of one class is
    replaced by those, and that small modules are left out.
    """
    weights = _saved_bytes(profile)
    children, roots = _tree(profile)
    total = sum(weights[root] for root in roots)
    possible = [
        may_be and not _holds_blocks(profile, children, weights, index)
        for index, may_be in enumerate(_possible(profile, len(profile.calls), engine_model(COMPILE)))
    ]
    chosen = _descend(possible, roots, children, weights, COARSEST_SHARE * total)
    held: Counter[Hashable] = Counter()
    kind = {call: profile.calls[call].class_name if children[call] else call for call in chosen}
    for call in chosen:
        held[kind[call]] += weights[call]
    return tuple(call for call in chosen if possible[call] and held[kind[call]] >= LEAST_SHARE * total)


def tails_after(profile: Profile, regions: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The calls with a tail worth compiling: after all regions in it, a call's own code computes a cross entropy.

    Args:
        regions: module calls.

    Returns:
        Call -> the calls directly in it that are left out, see `before_tail`.
    """
    found = {}
    for call, tick in _losses(profile).items():
        children = before_tail(profile, call, regions)
        if children and _has_tail(profile, call, children, tick):
            found[call] = children
    return found


def before_tail(profile: Profile, call: int, regions: Iterable[int]) -> tuple[int, ...]:
    """The calls directly in a call that are no part of its tail, which comes after the last of them.

    These are the ones that hold regions or are some, and a head whose logits the call returns: as a result of the
    tail's code, logits would be held for backward, and their gradient, of zeros, made beside that of the loss.
    """
    inside = (child_of(profile, call, region) for region in regions)
    children = tuple(dict.fromkeys(child for child in inside if child != NEVER))
    if not children:
        return ()
    after = max(profile.calls[child].end for child in children)
    record, loss = profile.calls[call], _losses(profile).get(call, NEVER)
    heads = tuple(
        index
        for index, child in enumerate(profile.calls)
        if child.parent == call and after <= child.start and child.end <= loss
        if any(_makes_result(profile, op, child, record.end) for op in profile.tape)
    )
    return (*children, *heads[-1:])


def _makes_result(profile: Profile, op: Op, child: ModuleCall, end: int) -> bool:
    """Whether a forward op in a call makes a tensor that the program holds beyond a tick."""
    made = (profile.storage_table[storage] for storage in op.creates)
    return not op.backward and child.start <= op.tick < child.end and any(s.free >= end for s in made)


def _losses(profile: Profile) -> dict[int, int]:
    """The tick of the first cross entropy of each call whose own code computes one."""
    found: dict[int, int] = {}
    for op in profile.tape:
        if op.name == LOG_SOFTMAX and not op.backward and op.module != NEVER:
            found.setdefault(op.module, op.tick)
    return found


def _has_tail(profile: Profile, call: int, children: Sequence[int], loss: int) -> bool:
    """Whether compiling what a call's own code does after some calls in it is possible, and worth it.

    Args:
        loss: tick of its first cross entropy.
    """
    record, inside = profile.calls[call], [profile.calls[child] for child in children]
    after = max(child.end for child in inside)
    if not record.grad or len({child.fqn for child in inside}) < len(inside) or loss < after:
        return False
    every = _saved_bytes(profile, [dataclasses.replace(record, start=after), record])
    return every[0] >= LEAST_SHARE * every[1]


def child_of(profile: Profile, call: int, inside: int) -> int:
    """The call directly in `call` that another one is in, or is; `NEVER` if it is not in it."""
    while inside >= 0 and profile.calls[inside].parent != call:
        inside = profile.calls[inside].parent
    return inside if inside >= 0 else NEVER


def whole(profile: Profile) -> tuple[int, ...]:
    """The calls of the root module with gradients on."""
    return tuple(index for index, call in enumerate(profile.calls) if call.parent < 0 and call.grad)


def _holds_blocks(profile: Profile, children: list[list[int]], weights: list[int], call: int) -> bool:
    """Whether a module contains several non-tiny modules of one class that have submodules themselves."""
    alike: Counter[str] = Counter()
    stack = list(children[call])
    while stack:
        inside = stack.pop()
        stack += children[inside]
        if children[inside] and weights[inside] >= LEAST_SHARE / 2 * weights[call]:
            alike[profile.calls[inside].class_name] += 1
    return max(alike.values(), default=0) >= _ALIKE
