"""Progress of long work: a bar on a terminal or in a notebook, else lines of the logger "autoac".

A bar goes to stderr, appears after half a second, and is removed when the work is done. It has no thread of its own,
which would be measured as well, and is drawn only a few times a second: progress is reported between timed ops.
"""

from __future__ import annotations

import contextlib
import html
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from autoac_solver.records.arguments import Tell

Progress = Tell | bool | None
"""Where progress is shown: a function of the caller's; False for nowhere; None or True for a bar or log lines."""

LOGGER = logging.getLogger("autoac")
OFF = "AUTOAC_PROGRESS"
"""Environment variable; if it is 0, nothing is shown unless `progress` is given."""

_AFTER_S = 0.5
_EVERY_S = 0.2
_LOG_EVERY_S = 10.0


class _Bar(Protocol):
    def draw(self, text: str, share: float) -> None: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def progress_shown(title: str, progress: Progress) -> Iterator[Tell]:
    """Context that yields the function to report progress with.

    Args:
        title: name of the work in the bar or the log.
    """
    if callable(progress):
        yield progress
    elif progress is False or (progress is None and os.environ.get(OFF) == "0"):
        yield lambda text, share: None
    elif _in_notebook() or _is_terminal():
        with drawn(lambda: (_Notebook if _in_notebook() else Terminal)(title)) as tell:
            yield tell
    else:
        yield _logged(title)


@contextlib.contextmanager
def drawn(make: Callable[[], _Bar]) -> Iterator[Tell]:
    """Context that draws progress in a bar, once the work has taken `_AFTER_S` seconds.

    Args:
        make: makes the bar.
    """
    start = last = time.monotonic()
    bar: _Bar | None = None

    def tell(text: str, share: float) -> None:
        nonlocal bar, last
        now = time.monotonic()
        if now - start < _AFTER_S or (bar is not None and now - last < _EVERY_S):
            return
        bar, last = bar or make(), now
        bar.draw(text, share)

    try:
        yield tell
    finally:
        if bar is not None:
            bar.close()


class Terminal:
    """A bar on stderr.

    Args:
        title: the text before the bar.
        console: of rich; None for stderr.
    """

    def __init__(self, title: str, console: Any = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", markup=False),
        )
        console = console or Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task(title, total=1.0, now="")
        self._bar.start()

    def draw(self, text: str, share: float) -> None:
        """Redraw the bar."""
        self._bar.update(self._task, completed=share, now=text, refresh=True)

    def close(self) -> None:
        """Leave nothing on the terminal."""
        self._bar.stop()


class _Notebook:
    """A bar in a cell's output; it needs no widgets, and leaves an empty output."""

    def __init__(self, title: str) -> None:
        from IPython.display import HTML, display

        self._html, self._title = HTML, title
        self._handle: Any = display(HTML(""), display_id=True)

    def draw(self, text: str, share: float) -> None:
        words = html.escape(f"{self._title}: {text}")
        self._handle.update(self._html(f'<progress max="1" value="{share:.3f}"></progress> {words}'))

    def close(self) -> None:
        self._handle.update(self._html(""))


def _logged(title: str) -> Tell:
    """Log a line when the text changes, and every ten seconds."""
    last, said = -_LOG_EVERY_S, ""

    def tell(text: str, share: float) -> None:
        nonlocal last, said
        now = time.monotonic()
        if text != said or now - last > _LOG_EVERY_S:
            last, said = now, text
            LOGGER.info("%s: %s (%.0f%%)", title, text, 100 * share)

    return tell


def _in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel, which shows displayed objects."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _is_terminal() -> bool:
    return bool(sys.stderr and sys.stderr.isatty())


def part(tell: Tell, start: float, end: float) -> Tell:
    """Progress of a part of the work: its shares 0 to 1 map to `start` to `end` of the whole."""
    return lambda text, share: tell(text, start + (end - start) * min(1.0, max(0.0, share)))
