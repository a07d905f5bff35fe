"""The clock that orders the events of a recorded step."""

from __future__ import annotations

from typing import Any


class Clock:
    """Counts the events of a step.

    Attributes:
        tick: the number of the last event.
        suspended: while this is not zero, ops are not part of the step.
    """

    __slots__ = ("suspended", "tick")

    def __init__(self) -> None:
        self.tick = 0
        self.suspended = 0

    def next(self) -> int:
        """Count an event; returns its number."""
        self.tick += 1
        return self.tick


class Suspended:
    """Context: ops in it are not part of the step."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def __enter__(self) -> None:
        self.clock.suspended += 1

    def __exit__(self, *_: Any) -> None:
        self.clock.suspended -= 1
