"""Points worth compiling a region at: a few sets of heavy ops to save, and torch's own choices.

Only each set's saved bytes and each op's flops are known here; the points are measured later, and useless ones are
dropped. Sets are found greedily: from all heavy ops, drop one at a time the op with the fewest flops per byte freed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FRACTIONS = 0.8, 0.4, 0.25, 0.125
"""Torch's memory budgets to propose, beside 1, if no op must run once: below 1, torch 2.13 runs any op again."""

WRITTEN = "it reads a buffer or an argument and writes it afterwards, and compiled backward would read the new values"
"""Why a region is not compiled. Torch compiles such code: its gradients are wrong."""

_EXACT = 12
"""With more heavy ops than this, the bytes freed by dropping one are taken to be its own size."""


class Graph(Protocol):
    """Interface of a region's graph, see `torch_private.partitioner.JointGraph`."""

    @property
    def heavy(self) -> Sequence[Any]: ...
    @property
    def draws(self) -> bool: ...
    @property
    def has_once(self) -> bool: ...
    @property
    def is_tagged(self) -> bool: ...
    @property
    def text(self) -> str: ...
    def kept_with(self, heavy: Iterable[int]) -> list[Any]: ...
    def kept_by_torch(self, budget: float) -> list[Any]: ...
    def kept_bytes(self, values: Sequence[Any]) -> int: ...
    def is_sound(self, values: Sequence[Any]) -> bool: ...


@dataclass(frozen=True)
class Survey:
    """The points that a region can be compiled at.

    Args:
        heavy: names of the heavy ops in order.
        points: names of the points worth compiling, no two of which save the same values.
        draws: whether the graph has random ops. Compiled code draws other numbers than eager ops.
        graph: a hash of the graph, with shapes and dtypes.
    """

    heavy: tuple[str, ...]
    points: tuple[str, ...]
    draws: bool
    graph: str


def survey(graph: Graph, most: int, never: Collection[str] = ()) -> Survey:
    """The points of a region's graph that are worth compiling.

    Args:
        most: maximum number of points, at least 2.
        never: full names of ops whose results are other ones when they run again; every point saves them.

    Raises:
        RuntimeError: torch's own choice would read in backward what the region has written.
    """
    heavy = graph.heavy
    pinned = frozenset(index for index, op in enumerate(heavy) if op.overload in never)
    names = tuple(op.name for op in heavy)
    identity = hashlib.sha256(graph.text.encode()).hexdigest()
    if graph.is_tagged:  # the user's own checkpoints in it decide what is saved
        return Survey(names, (_of_torch(1.0),), graph.draws, identity)
    proposed: dict[frozenset[Any], tuple[str, int]] = {}

    def propose(name: str, values: list[Any]) -> None:
        if graph.is_sound(values):
            proposed.setdefault(frozenset(values), (name, graph.kept_bytes(values)))

    propose(_of_torch(1.0), graph.kept_by_torch(1.0))
    if not proposed:
        raise RuntimeError(WRITTEN)
    for kept in _chain(graph, heavy, pinned):
        propose(_of_ours(kept), graph.kept_with(kept))
    first, *ours = proposed.values()
    for fraction in FRACTIONS if not (graph.has_once or pinned) else ():
        propose(_of_torch(fraction), graph.kept_by_torch(fraction))
    torchs = [value for value in proposed.values() if value != first and value not in ours]
    half = max(1, most // 2) - 1  # of torch's, beside the first
    some = _spread(torchs, max(half, most - 1 - len(ours)))
    points = (first, *some, *_spread(ours, most - 1 - len(some)))
    return Survey(names, tuple(name for name, _ in points), graph.draws, identity)


def _of_torch(fraction: float) -> str:
    return f"torch:{fraction:g}"


def _of_ours(kept: Iterable[int]) -> str:
    return "save:" + ",".join(map(str, sorted(kept)))


def _chain(graph: Graph, heavy: Sequence[Any], pinned: frozenset[int]) -> list[frozenset[int]]:
    """Sets of heavy ops to save, from all to those that must be, each with one op less."""
    kept = frozenset(range(len(heavy)))
    chain = [kept]
    exact = len(heavy) <= _EXACT
    while kept != pinned:
        size = graph.kept_bytes(graph.kept_with(kept)) if exact else 0

        def price(op: int, kept: frozenset[int] = kept, size: int = size) -> tuple[float, int]:
            """Flops per byte freed by dropping the op."""
            saved = size - graph.kept_bytes(graph.kept_with(kept - {op})) if exact else heavy[op].bytes
            return (heavy[op].flops / saved if saved > 0 else float("inf")), heavy[op].flops

        kept -= {min(kept - pinned, key=price)}
        chain.append(kept)
    return chain


def _spread(found: Sequence[tuple[str, int]], most: int) -> list[tuple[str, int]]:
    """At most `most` of some points with their bytes, by bytes: the smallest, the largest, and others in between."""
    found = sorted(found, key=lambda point: point[1])
    if len(found) <= most:
        return list(found)
    if most <= 1:
        return found[:most]
    sizes = [size for _, size in found]
    wanted = [sizes[0] + (sizes[-1] - sizes[0]) * i / (most - 1) for i in range(most)]
    nearest = (min(range(len(sizes)), key=lambda i: abs(sizes[i] - want)) for want in wanted)
    return [found[i] for i in sorted({0, len(sizes) - 1, *nearest})]
