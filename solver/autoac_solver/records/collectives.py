"""Collectives that may run a second time, and their bytes on a link.

These are the functional ones (`_c10d_functional`): they write no tensor that they are given. A ring of n ranks sends,
per rank, the shares below of the data (of all ranks, for a gather or a scatter), see "Bus bandwidth" in the
documentation of NVIDIA's nccl-tests (doc/PERFORMANCE.md):

    all_gather, reduce_scatter, all_to_all    (n - 1) / n
    all_reduce                                2 (n - 1) / n
    broadcast                                 1

A profile has the bytes that a rank reads and writes: (n + 1) / n of the data for a gather or a scatter, else twice it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WITH_ALL = {
    "all_gather_into_tensor": lambda n: (n - 1) / (n + 1),
    "reduce_scatter_tensor": lambda n: (n - 1) / (n + 1),
    "all_reduce": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / (2 * n),
    "broadcast": lambda n: 0.5,
}
_SHARES: dict[str, Callable[[int], float]] = {
    f"_c10d_functional.{name}.default": share for name, share in _WITH_ALL.items()
}
"""Op -> number of ranks -> bytes on the link, as a share of the bytes that a rank reads and writes."""

WAIT = "_c10d_functional.wait_tensor.default"
"""The op that waits for the result of one of them."""

_RANKS = re.compile(r"\b(\d+) ranks\)$")


def may_repeat(name: str) -> bool:
    """Whether an op of this name is a collective that may run a second time, if it does so on all ranks."""
    return name in _SHARES


def over(ranks: int) -> str:
    """The text that stands for a group of ranks in a signature, as its last argument."""
    return f"{ranks} ranks"


def ranks_in(signature: str) -> int:
    """The number of ranks in a collective's signature, 0 if it does not say."""
    found = _RANKS.search(signature)
    return int(found.group(1)) if found else 0


def link_bytes(name: str, moved_bytes: int, ranks: int) -> float:
    """The bytes that a rank sends in a collective.

    Args:
        moved_bytes: bytes that it reads and writes, as in `Op`.
    """
    return _SHARES[name](ranks) * moved_bytes
