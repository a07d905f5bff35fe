"""Ranks that meet in the collectives of a step: if one fails while it plans, all of them raise its error.

NOTE [ Ranks that meet in a step ]
  1. A callable sample may wait for other ranks (context parallelism, gradients that are reduced by hand), or for none.
     Neither the sample nor the model says for which. So each rank notes which process groups its step uses: it has met
     the ranks of these.
  2. Each rank has one entry in the store: whether it plans now, and how it last ended, which is the ranks that it has
     met, or a failure. A call whose step has run and met nobody leaves the end before it there, and raises its own
     errors.
  3. A rank that is done waits until the ranks that it has met are done, and those that these have met. If one of them
     fails, all raise its error. A step that waits for it in a collective is ended as in NOTE [ All or none ], rule 3;
     a collective has no time limit of its own here, so a slow rank is waited for.
  4. A rank that fails before its step has met anybody tells so, too: the others may be on their way.
  5. Ranks need not plan equally often: one of them may plan something alone in between. So an end counts once, and only
     for a call that had begun before it (by tickets, which the store gives out), or while its rank has not begun
     another. A failure of a rank that had met nobody counts until that rank begins anew: the others' collectives then
     find their partner.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from autoac.ranks import all_or_none
from autoac.ranks.session import LOOK_S, Listener, Session, heard, store_is_there, told
from autoac.torch_private import collectives_asked_for
from autoac_solver.records.errors import ParallelError


@dataclass
class _Memory:
    """What this process keeps between calls.

    Args:
        end: how its last call ended in which it met others.
        counted: tickets of the ends of other ranks that have counted.
        raised: tickets of failures that it has raised.
    """

    end: dict[str, Any] | None = None
    counted: dict[int, int] = field(default_factory=dict)
    raised: set[int] = field(default_factory=set)


_memory = _Memory()


class Met(Session):
    """One call of this rank, and the ranks that its step meets; see NOTE [ Ranks that meet in a step ].

    Args:
        what: what they do, in words.
        patience_s: as for `Session`.
    """

    def __init__(self, what: str, patience_s: float):
        global _memory
        super().__init__(what, patience_s, "autoac/met")
        if not self._store.check([self.key("entry", self.own_rank)]):
            _memory = _Memory()  # a new process group has another store
        self._began = self._ticket()
        self._met: frozenset[int] = frozenset()
        self._asked_before: dict[Any, int] = {}
        self._has_run = False
        self._last_look: tuple[Any, dict[str, Any] | None] = None, None
        self._tell(plans=True)

    # -- who is met --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """See `Session`."""
        self._asked_before = collectives_asked_for()
        with super().step():
            try:
                yield
                self._has_run = True
            finally:
                self._note_met()

    def _note_met(self) -> None:
        if self._step_began is not None:
            asked = collectives_asked_for().items()
            groups = [group for group, count in asked if count != self._asked_before.get(group, 0)]
            found = (torch.distributed.get_process_group_ranks(group) for group in groups)
            self._met = self._met.union(*found) - {self.own_rank}

    # -- entries -----------------------------------------------------------------------------------------------

    def _ticket(self) -> int:
        return self._store.add(self.key("tickets"), 1)

    def _tell(self, plans: bool) -> None:
        self._store.set(self.key("entry", self.own_rank), json.dumps({"plans": plans, "end": _memory.end}))

    def _end_of(self, store: Any, rank: int) -> dict[str, Any] | None:
        """How another rank has ended, if that counts for this call: see rule 5."""
        key = self.key("entry", rank)
        entry = json.loads(store.get(key)) if store.check([key]) else {"end": None}
        end = entry["end"]
        if end is None or end["ticket"] <= _memory.counted.get(rank, 0):
            return None
        if end["failure"] is not None and end["failure"]["ticket"] in _memory.raised:
            return None
        is_past = end["ticket"] < self._began or not end["met"]
        return None if entry["plans"] and is_past else end

    def has_failure(self, store: Any) -> bool:
        """See `Session`."""
        self._note_met()
        return self._failure(store) is not None

    def _failure(self, store: Any) -> dict[str, Any] | None:
        """The first failure of the ranks that are met."""
        now = self._met, store.add(self.key("failures"), 0)
        if self._last_look != (now, None):  # else no entry needs to be read: there may be many ranks
            ends = [self._end_of(store, rank) for rank in sorted(self._met)]
            failures = [end["failure"] for end in ends if end is not None and end["failure"] is not None]
            first = min(failures, key=lambda failure: failure["ticket"], default=None)
            self._last_look = now, first
        return self._last_look[1]

    # -- ends --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all are done that the step has brought together; raises the error of one that has failed."""
        if not self._met:
            return
        _memory.end = {"ticket": self._ticket(), "met": sorted(self._met), "failure": None}
        self._tell(plans=True)
        done: dict[int, int] = {}
        while missing := self._met - set(done):
            rank = min(missing)
            end = self._wait_for(rank)
            done[rank] = end["ticket"]
            self._met = self._met.union(end["met"]) - {self.own_rank}
        _memory.counted.update(done)

    def _wait_for(self, rank: int) -> dict[str, Any]:
        listener = Listener(self, rank)
        while True:
            end = self._end_of(self._store, rank)
            failure = end["failure"] if end is not None else None
            if failure := failure or self._failure(self._store):
                raise heard(failure)
            if end is not None:
                return end
            listener.check()
            time.sleep(LOOK_S)

    def fail(self, error: BaseException) -> ParallelError | None:
        """Announce that this rank has failed; returns the error that all ranks raise, None if it has run alone."""
        if self._has_run and not self._met:
            return None
        failure = self._failure(self._store)
        if failure is None:
            own = self.error_of(error, self._met)  # takes a while, if a connection was lost
            failure = self._failure(self._store) or {"ticket": self._ticket(), **told(own)}
        _memory.raised.add(failure["ticket"])
        _memory.end = {"ticket": self._ticket(), "met": sorted(self._met), "failure": failure}
        self._tell(plans=False)
        self._store.add(self.key("failures"), 1)
        return heard(failure)

    def leave(self) -> None:
        """Tell that this rank plans no more."""
        self._tell(plans=False)


@contextlib.contextmanager
def meeting(what: str) -> Iterator[Met]:
    """Context in which this rank does something together with those that its steps meet, if any.

    Args:
        what: what they do, in words ("plan"). It goes into errors.

    Raises:
        ParallelError: a rank has failed or is silent, or the store is gone. Errors of a rank that has run its step
            without others are its own.
    """
    with store_is_there():
        met = Met(what, all_or_none.PATIENCE_S)
        with met.alive():
            try:
                yield met
                met.finish()
            except BaseException as error:
                failure = met.fail(error)
                if failure is None or not isinstance(error, Exception):
                    raise
                raise failure from error
            finally:
                met.leave()
