"""Meetings of the ranks of a training loop: no rank waits for another that does not come.

NOTE [ Ranks that run a loop in step ]
  1. Every rank counts the loop's steps. A rank that wants to meet announces it in the process group's store before its
     step does anything that the others wait for; all of them meet when the next step begins.
  2. A rank reaches its next step after its gradients were reduced, for which it waited for every other rank. So it
     cannot miss an earlier announcement.
  3. Each step begins with one query of the store, a round trip. It waits for no other rank.
  4. A loop whose steps may be refused (`on_larger="error"`) begins each step on all ranks, or on none: each counts
     itself in the store, or leaves its reason there, and waits for the others, at most for the store's timeout (the
     process group's, by default).
"""

from __future__ import annotations

import json
import time
from collections import Counter

import torch

from autoac.ranks.session import own_store, store_is_there
from autoac.torch_private import default_store
from autoac_solver.records.errors import ParallelError

_LOOK_S = 0.002

_loops: Counter[tuple[int, ...] | None] = Counter()


class Meetings:
    """The meetings of one loop; every rank creates these objects for the same loops in the same order.

    Args:
        members: the ranks that run it, in order; None for all.
    """

    def __init__(self, members: tuple[int, ...] | None) -> None:
        of = "all" if members is None else ",".join(map(str, members))
        self._size = torch.distributed.get_world_size() if members is None else len(members)
        self._name = f"autoac/loop/{of}/{_loops[members]}"
        _loops[members] += 1
        self._store = own_store()
        self._step = 0
        self._held = 0
        self._last = ""  # key under which the last step was begun together

    @store_is_there()
    def step_begins(self) -> bool:
        """Note that a step of the loop begins; returns whether the ranks meet now."""
        self._step += 1
        key = self._key()
        meet = bool(self._store.check([key])) and int(self._store.get(key)) <= self._step
        self._held += meet
        return meet

    @store_is_there()
    def ask(self) -> None:
        """Make all ranks meet when the next step begins."""
        self._store.compare_set(self._key(), "", str(self._step + 1))

    @property
    def were_held(self) -> bool:
        """Whether the ranks have met, and so know that their arguments are the same."""
        return self._held > 0

    @store_is_there()
    def begin_together(self, refusal: str) -> None:
        """Begin a step on all ranks, or on none; every rank calls this in the same steps.

        Args:
            refusal: why this rank does not begin; "" if it does.

        Raises:
            ParallelError: a rank does not begin, or has not come in time.
        """
        rank, key, last = torch.distributed.get_rank(), f"{self._name}/begins/{self._step}", self._last
        self._last = key
        if refusal:
            self._store.compare_set(key, "", json.dumps({"rank": rank, "words": refusal}))
        elif self._store.add(f"{key}/count", 1) == self._size:
            self._store.compare_set(key, "", "{}")
            for done in (last, f"{last}/count") if last else ():  # all have read it
                self._store.delete_key(done)
        until = time.monotonic() + default_store().timeout.total_seconds()
        while not self._store.check([key]):
            if time.monotonic() > until:
                raise ParallelError(
                    f"not all ranks began step {self._step} within {default_store().timeout}: one has died, or runs "
                    "fewer steps.",
                    rank,
                )
            time.sleep(_LOOK_S)
        found = json.loads(self._store.get(key))
        if found:
            raise ParallelError(
                f"rank {found['rank']} does not begin the step: {found['words']}", found["rank"]
            )

    def _key(self) -> str:
        return f"{self._name}/{self._held}"
