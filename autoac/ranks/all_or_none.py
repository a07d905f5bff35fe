"""Joint work of ranks through the process group's store: it succeeds on all of them, or on none.

NOTE [ All or none ]
  1. Every rank enters the same sessions in the same order. In a session it sends its values to the first rank, waits
     for those of all from there, and leaves.
  2. A rank in which anything is raised announces that first. Waiting ranks see it within moments, leave, and raise the
     same error. The first failure counts; failures that follow from it (a collective that nobody joins) do not.
  3. Every rank sends a heartbeat each second. A rank that sends no more for `patience_s` is considered dead.
     A rank may wait long in a collective for another that is busy. So if a rank has announced a failure and this one
     is in a step for `patience_s` since then (see `step`), the thread that sends heartbeats closes this rank's
     connections, which ends any wait (gloo). If a process has ended, gloo itself notices.
  4. Only texts go through the store, no pickles.
  5. The ranks that hold one model together have a session of their own: another stage of a pipeline has another model.
     Errors name global ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from autoac.ranks.session import LOOK_S, Listener, Session, heard, store_is_there, told
from autoac_solver.records.errors import ParallelError

PATIENCE_S = 20.0
"""Seconds without a heartbeat after which a rank is considered dead, and that a step waits for one that has failed."""

_PIECE = 1 << 20
_sessions: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Ranks(Session):
    """The ranks in one session; see NOTE [ All or none ].

    Args:
        what: what they do, in words.
        patience_s: see rule 3.
        members: the ranks that take part, None for all; `rank` and `size` count these. See rule 5.
    """

    def __init__(self, what: str, patience_s: float, members: tuple[int, ...] | None = None):
        self.members = tuple(range(torch.distributed.get_world_size())) if members is None else members
        self.rank, self.size = self.members.index(torch.distributed.get_rank()), len(self.members)
        name = f"autoac/{','.join(map(str, self.members))}/{next(_sessions[self.members])}"
        super().__init__(what, patience_s, name)
        self._rounds = 0
        self._sent: list[str] = []  # keys of the texts that this rank has sent

    def has_failure(self, store: Any) -> bool:
        """See `Session`."""
        return store.check([self.key("failure")])

    # -- telling and waiting -----------------------------------------------------------------------------------

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order; each rank calls this with its own.

        Args:
            value: any JSON value.
        """
        self._rounds += 1
        self.raise_failure()  # also if this rank comes late to a session that the others have given up
        together = self.key(self._rounds, "all")
        if self.rank:
            self._store.set(self.key(self._rounds, self.rank), json.dumps(value))
            return json.loads(self._wait(together, 0))
        # One rank collects: if each asked for each, requests would grow with the square of the ranks.
        others = (json.loads(self._wait(self.key(self._rounds, rank), rank)) for rank in range(1, self.size))
        values = json.loads(json.dumps([value, *others]))
        self._store.set(together, json.dumps(values))
        return values

    def from_one(self, rank: int, text: str | None) -> str:
        """A text from one rank; only that rank passes it."""
        self._rounds += 1
        if self.rank == rank:
            assert text is not None
            pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
            for index, piece in enumerate(pieces):
                self._sent.append(self.key(self._rounds, "piece", index))
                self._store.set(self._sent[-1], piece)
            self._store.set(self.key(self._rounds, "pieces"), str(len(pieces)))
            return text
        count = int(self._wait(self.key(self._rounds, "pieces"), rank))
        return "".join(self._get(self.key(self._rounds, "piece", index)) for index in range(count))

    def clear(self) -> None:
        """Delete the texts that this rank has sent, some MB for each plan; all ranks have read them.

        The process that keeps the store may have ended by now.
        """
        with contextlib.suppress(RuntimeError):
            for key in self._sent:
                self._store.delete_key(key)

    def _wait(self, key: str, rank: int) -> str:
        """Wait for the value that a rank sets under a key."""
        listener = Listener(self, self.members[rank])
        while not self._store.check([key]):
            self.raise_failure()
            listener.check()
            time.sleep(LOOK_S)
        return self._get(key)

    # -- failures ----------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> ParallelError:
        """Announce that this rank has failed; returns the error that all ranks raise."""
        mine = json.dumps(told(self.error_of(error, self.members)))
        return heard(json.loads(self._store.compare_set(self.key("failure"), "", mine).decode()))

    def raise_failure(self) -> None:
        """Raise the error of a failed rank, if there is one."""
        if self.has_failure(self._store):
            raise heard(json.loads(self._get(self.key("failure"))))


@contextlib.contextmanager
def together(
    what: str, patience_s: float | None = None, members: tuple[int, ...] | None = None
) -> Iterator[Ranks]:
    """Context in which all ranks do something; if one fails, all raise the same `ParallelError`.

    Args:
        what: what they do, in words ("plan"). It goes into errors.
        patience_s: None for `PATIENCE_S`.
        members: the ranks that take part, this one among them; None for all.

    Raises:
        ParallelError: a rank has failed or is silent, or the store is gone.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    with store_is_there():
        ranks = Ranks(what, patience_s, members)
        with ranks.alive():
            try:
                yield ranks
                ranks.all(None)  # no rank continues before all are done
            except BaseException as error:
                failure = ranks.fail(error)
                if not isinstance(error, Exception):
                    raise  # Ctrl-C stays what it is on its own rank
                raise failure from error
            ranks.clear()
