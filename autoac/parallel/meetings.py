"""Meetings of the ranks of a training loop: no rank waits for another that does not come.

NOTE [ Ranks that run a loop in step ]
  1. Every rank counts the loop's steps. A rank that wants to meet announces it in the process group's store before its
     step does anything that the others wait for; all of them meet when the next step begins.
  2. A rank reaches its next step after its gradients were reduced, for which it waited for every other rank. So it
     cannot miss an earlier announcement.
  3. Each step begins with one query of the store, a round trip. It waits for no other rank.
"""

from __future__ import annotations

from collections import Counter

from autoac.torch_private import default_store

_loops: Counter[tuple[int, ...] | None] = Counter()


class Meetings:
    """The meetings of one loop; every rank creates these objects for the same loops in the same order.

    Args:
        members: the ranks that run it, in order; None for all.
    """

    def __init__(self, members: tuple[int, ...] | None) -> None:
        of = "all" if members is None else ",".join(map(str, members))
        self._name = f"autoac/loop/{of}/{_loops[members]}"
        _loops[members] += 1
        self._store = default_store().clone()
        self._step = 0
        self._held = 0

    def step_begins(self) -> bool:
        """Note that a step of the loop begins; returns whether the ranks meet now."""
        self._step += 1
        key = self._key()
        meet = bool(self._store.check([key])) and int(self._store.get(key)) <= self._step
        self._held += meet
        return meet

    def ask(self) -> None:
        """Make all ranks meet when the next step begins."""
        self._store.compare_set(self._key(), "", str(self._step + 1))

    def _key(self) -> str:
        return f"{self._name}/{self._held}"
