"""When the ranks of a training loop meet: no rank waits for another that does not come.

NOTE [ Ranks that run a loop in step ]
  1. Every rank counts the loop's steps. A rank that wants to meet says so, through the processes' store, before its
     step does anything that the others wait for; all of them meet when the next step begins.
  2. A rank comes to its next step after its gradients were reduced, for which it has waited for every other one. So it
     cannot miss what was said before.
  3. Each step begins with a look into the store, a message there and back. Nothing is waited for.
"""

from __future__ import annotations

import itertools

from autoac.torch_private import default_store

_loops = itertools.count()


class Meetings:
    """The meetings of one loop; every rank makes this, for the same loops in the same order."""

    def __init__(self) -> None:
        self._name = f"autoac/loop/{next(_loops)}"
        self._store = default_store().clone()
        self._step = 0
        self._held = 0

    def step_begins(self) -> bool:
        """A step of the loop begins; whether the ranks meet now."""
        self._step += 1
        key = self._key()
        meet = bool(self._store.check([key])) and int(self._store.get(key)) <= self._step
        self._held += meet
        return meet

    def ask(self) -> None:
        """Let all ranks meet when the next step begins."""
        self._store.compare_set(self._key(), "", str(self._step + 1))

    def _key(self) -> str:
        return f"{self._name}/{self._held}"
