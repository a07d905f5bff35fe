"""Delays Ctrl-C while the model is changed or restored; it arrives while the user's step runs, or afterwards."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class _HeldBack:
    """The handler of SIGINT within `held_back`.

    Attributes:
        before: the earlier handler, which usually raises KeyboardInterrupt.
        allowed: whether that is called at once. It is not after it has raised, so that a second Ctrl-C cannot arrive
            while the first one's KeyboardInterrupt propagates.
        came: whether there is an interrupt that was not passed on yet.
    """

    def __init__(self, before: Callable[[int, FrameType | None], Any]):
        self.before = before
        self.allowed = False
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self.allowed:
            self.came = True
            return
        self.allowed = False
        self.before(number, frame)
        self.allowed = True

    def tell(self) -> None:
        """Pass on a delayed interrupt."""
        if self.came:
            self.came = False
            self.before(signal.SIGINT, None)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Context that delays Ctrl-C until its end, or until the next `interruptible` in it."""
    before = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or not callable(before) or isinstance(before, _HeldBack):
        yield
        return
    handler = _HeldBack(before)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)
        handler.tell()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which Ctrl-C arrives at once, inside of `held_back` too."""
    handler = signal.getsignal(signal.SIGINT)
    if not _is_main_thread() or not isinstance(handler, _HeldBack):
        yield
        return
    handler.tell()
    handler.allowed = True
    try:
        yield
    finally:
        handler.allowed = False


def _is_main_thread() -> bool:
    """Whether this thread handles signals: no other thread gets a KeyboardInterrupt."""
    return threading.current_thread() is threading.main_thread()
