"""Results on stdout, as tables or as one JSON document; progress and messages on stderr."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from autoac._version import __version__
from autoac.cli.shell import RESULTS

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from autoac.progress import Tell

_WIDTH = 160
"""Width of tables that go to a file or a pipe, which would otherwise be cut to 80 columns."""


class Output:
    """Output of one command: results, progress and messages."""

    def __init__(self, context: typer.Context) -> None:
        self.command = context.info_name
        self.as_json: bool = context.meta.get("as_json", False)
        self.verbose: bool = context.meta.get("verbose", False)
        self._stdout = context.meta[RESULTS]

    def results(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """Print the JSON document with --json, else what is `shown`."""
        if self.as_json:
            head = {"command": self.command, "autoac_version": __version__}
            typer.echo(json.dumps({**head, **document}, indent=2, allow_nan=False), file=self._stdout)
            return
        console = _console(file=self._stdout)
        for renderable in shown:
            console.print(renderable, markup=False, emoji=False)

    def note(self, text: str) -> None:
        """A message on stderr."""
        typer.echo(text, err=True)

    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Tell]:
        """Context in which progress is shown: a bar on a terminal, lines with --verbose, else nothing."""
        console = _console(stderr=True)
        if self.verbose or not console.is_terminal:
            yield self._tell_lines(title) if self.verbose else lambda text, share: None
            return
        from autoac.progress import Terminal, drawn

        with drawn(lambda: Terminal(title, console)) as tell:
            yield tell

    def _tell_lines(self, title: str) -> Tell:
        return lambda text, share: self.note(f"{title}: {text} ({share:.0%})")


def _console(**where: Any) -> Console:
    from rich.console import Console

    # Names from models and files are shown as they are, not as rich's markup.
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, **where}
    console = Console(**plain)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH, **plain)
    return console


def table(title: str, *headings: str) -> Table:
    """A table with a column of text and columns of numbers."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index else "left", overflow="fold")
    return made


def facts(*pairs: tuple[str, str]) -> str:
    """Names and their values, side by side."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


_GB_FROM = 1e10


def in_one_unit(*amounts: float) -> Callable[[float], str]:
    """A formatter for bytes in one column or text: all in MB, or in GB if the largest is 10 GB or more."""
    size, unit = (1e9, "GB") if max(amounts, default=0) >= _GB_FROM else (1e6, "MB")
    return lambda n_bytes: f"{n_bytes / size:.1f} {unit}"
