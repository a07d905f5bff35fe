"""One rank's part in a session: its signs of life, and the end of a step that waits for a rank that has failed.

NOTE [ Late, or dead ]
  1. A rank that has sent a heartbeat and sends no more has died.
  2. A rank that has sent none may be late: it loads its data, or writes a checkpoint. It is waited for as long as
     torch's own collectives would wait, until the process group's timeout; a warning tells for which rank.
  3. A rank of a training loop is due at the second step. From its first step on it tells that it is alive
     (`Presence`), so that its death is noticed soon, too.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from autoac.torch_private import close_connections, default_store, lost_a_rank
from autoac.warned import warn
from autoac_solver.records.errors import ParallelError

_BEAT_S, LOOK_S = 1.0, 0.02
_BEATS_MISSED = 3
"""A rank to which a connection was lost has died if it sends no heartbeat for so many of their intervals."""


class Session:
    """Common to sessions whose ranks are known from the start (`Ranks`), and those whose ranks are found (`Met`).

    Ranks are named by their global numbers in the store and in errors.

    Args:
        what: what the ranks do, in words.
        patience_s: how long they wait for a silent rank, and a step for one that has failed.
        name: of the session, in the store.
    """

    def __init__(self, what: str, patience_s: float, name: str):
        self.what, self.patience_s = what, patience_s
        self.own_rank = torch.distributed.get_rank()
        self._name = name
        self._store = own_store()
        self._over = threading.Event()
        self._step_began: float | None = None

    def key(self, *parts: object) -> str:
        """The name of something in the store."""
        return "/".join(map(str, (self._name, *parts)))

    # -- signs of life -----------------------------------------------------------------------------------------

    def has_failure(self, store: Any) -> bool:
        """Whether a rank has failed for which this one may wait.

        Args:
            store: that of the thread which asks.
        """
        raise NotImplementedError

    def _beat(self, store: Any) -> None:
        failed: float | None = None
        for count in itertools.count():
            store.set(self.key("beat", self.own_rank), str(count))
            if self._over.wait(_BEAT_S):
                return
            began = self._step_began
            if began is None:
                continue
            if failed is None and self.has_failure(store):
                failed = time.monotonic()
            if failed is not None and time.monotonic() - max(failed, began) > self.patience_s:
                close_connections()
                return

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step in which the ranks wait for each other: it fails `patience_s` after one of them has."""
        self._step_began = time.monotonic()
        try:
            yield
        finally:
            self._step_began = None

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Context in which this rank sends heartbeats."""
        thread = threading.Thread(target=_quietly(self._beat), args=(own_store(),), daemon=True)
        thread.start()
        try:
            yield
        finally:
            _stop(thread, self._over)

    def _get(self, key: str) -> str:
        return self._store.get(key).decode()

    def beat_of(self, rank: int) -> str:
        """The last heartbeat of a rank, "" if there is none."""
        return self._found(self.key("beat", rank))

    def presence_of(self, rank: int) -> str:
        """The last sign of life of a rank before this session, "" if there is none."""
        return self._found(_presence(rank))

    def _found(self, key: str) -> str:
        return self._get(key) if self._store.check([key]) else ""

    def gone(self, ranks: Iterable[int]) -> int | None:
        """One of these ranks that has sent heartbeats and sends no more; None if there is none, or one has failed."""
        before = {rank: beat for rank in ranks if (beat := self.beat_of(rank))}
        until = time.monotonic() + _BEATS_MISSED * _BEAT_S
        while time.monotonic() < until:
            if self.has_failure(self._store):
                return None
            time.sleep(LOOK_S)
        return next((rank for rank, beat in before.items() if self.beat_of(rank) == beat), None)

    # -- errors, as all ranks raise them -----------------------------------------------------------------------

    def error_of(self, error: BaseException, ranks: Iterable[int]) -> ParallelError:
        """What has failed on this rank.

        Args:
            ranks: the others; one of them may have died.
        """
        if lost_a_rank(error) and (lost := self.gone(ranks)) is not None:
            return ParallelError(f"rank {lost} has died while the ranks {self.what}: {error!s:.300}", lost)
        if isinstance(error, ParallelError):
            return error
        words = f"rank {self.own_rank} failed while the ranks {self.what}: {type(error).__name__}: {error}"
        return ParallelError(words, self.own_rank, getattr(error, "minimum_bytes", 0))

    @property
    def timeout_s(self) -> float:
        """How long the process group waits for a rank."""
        return default_store().timeout.total_seconds()  # that of a copy of a file store is another


class Listener:
    """Notices that a rank is silent; see NOTE [ Late, or dead ].

    Args:
        rank: its global number.
    """

    def __init__(self, session: Session, rank: int):
        self._session, self._rank = session, rank
        self._began = self._heard = time.monotonic()
        self._last, self._has_warned = ("", ""), False

    def check(self) -> None:
        """Warn if the rank is late.

        Raises:
            ParallelError: it sends no more signs of life, or has not come within the process group's timeout.
        """
        session, rank, now = self._session, self._rank, time.monotonic()
        came, present = session.beat_of(rank), session.presence_of(rank)
        if (came, present) != self._last:
            self._heard, self._last = now, (came, present)
        if (came or present) and now - self._heard > session.patience_s:
            words = f"rank {rank} has given no sign of life for {session.patience_s:g} s"
            raise ParallelError(f"{words}, while the others {session.what}.", rank)
        if came:
            return
        words = (
            f"while the ranks {session.what}. Every rank has to: the same calls of autoac, in the same order."
        )
        if now - self._began > session.timeout_s:
            late = f"rank {rank} has not come within the process group's timeout of {session.timeout_s:g} s"
            raise ParallelError(f"{late}, {words}", rank)
        if now - self._began > session.patience_s and not self._has_warned:
            self._has_warned = True
            alive = "It is alive, and is" if present else "It is"
            until = f"{alive} waited for until the process group's timeout of {session.timeout_s:g} s."
            warn(f"rank {rank} has not come for {session.patience_s:g} s, {words} {until}")


class Presence:
    """Signs of life of this rank before a session that it is due at, until `end`, or until this object is gone."""

    def __init__(self) -> None:
        over = threading.Event()
        own = own_store(), _presence(torch.distributed.get_rank()), over
        thread = threading.Thread(target=_quietly(_be_present), args=own, daemon=True)
        thread.start()
        atexit.unregister(leave_with_process)  # it is registered once
        atexit.register(leave_with_process)
        _present.append((thread, over))
        self._finalizer = weakref.finalize(self, _no_more_present, thread, over)

    def end(self) -> None:
        """Stop."""
        self._finalizer()


_present: list[tuple[threading.Thread, threading.Event]] = []
_process_ends = threading.Event()


def _no_more_present(thread: threading.Thread, over: threading.Event) -> None:
    _present.remove((thread, over))
    _stop(thread, over)


def leave_with_process() -> None:
    """Stop the threads before the interpreter does, which would abort the process if one of them is in the store."""
    _process_ends.set()
    for thread, over in [*_present]:
        _stop(thread, over)


def _stop(thread: threading.Thread, over: threading.Event) -> None:
    over.set()
    thread.join(timeout=2 * _BEAT_S)


def own_store() -> Any:
    """A connection of its own to the processes' store, for one thread.

    Raises:
        torch.distributed.DistError: the store is gone. A new connection would be tried until its timeout.
    """
    store = default_store()
    store.check(["autoac"])
    return store.clone()


@contextlib.contextmanager
def store_is_there() -> Iterator[None]:
    """Context in which it is a `ParallelError` if the processes' store is gone."""
    try:
        yield
    except torch.distributed.DistError as error:
        raise ParallelError(f"the processes' store is gone, and with it rank 0: {error!s:.300}", 0) from error


def _presence(rank: int) -> str:
    return f"autoac/present/{rank}"


def _be_present(store: Any, key: str, over: threading.Event) -> None:
    for count in itertools.count():
        store.set(key, str(count))
        if over.wait(_BEAT_S):
            if not _process_ends.is_set():  # then it has died, to ranks that wait for it
                store.set(key, "")  # no deletion: another rank that has just seen the key would wait for it
            return


def told(error: ParallelError) -> dict[str, Any]:
    """An error as it is written to the store."""
    return {"rank": error.rank, "words": str(error), "minimum_bytes": error.minimum_bytes}


def heard(found: dict[str, Any]) -> ParallelError:
    """The error that `told` wrote."""
    return ParallelError(found["words"], found["rank"], found.get("minimum_bytes", 0))


def _quietly(beat: Callable[..., None]) -> Callable[..., None]:
    """Send heartbeats until the store is gone, without an error."""

    def run(*args: Any) -> None:
        with contextlib.suppress(RuntimeError):
            beat(*args)

    return run
