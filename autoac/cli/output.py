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

Tell = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""

_WIDTH = 160
"""Of tables that go to a file or a pipe, which would else be cut to 80 columns."""


class Output:
    """Where one command's results, progress and messages go."""

    def __init__(self, context: typer.Context) -> None:
        self.command = context.info_name
        self.as_json: bool = context.meta.get("as_json", False)
        self.verbose: bool = context.meta.get("verbose", False)
        self._stdout = context.meta[RESULTS]

    def results(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """Print the JSON document if that is wanted, else what is to be shown."""
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
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            TextColumn("{task.fields[now]}"),
        )
        # Drawn when there is something to tell, by no thread of its own, which would be measured as well.
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
            task = bar.add_task(title, total=1.0, now="")

            def tell(text: str, share: float) -> None:
                bar.update(task, completed=share, now=text, refresh=True)

            yield tell

    def _tell_lines(self, title: str) -> Tell:
        return lambda text, share: self.note(f"{title}: {text} ({share:.0%})")


def _console(**where: Any) -> Console:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False, **where)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=_WIDTH, **where)
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
    """Names and what they stand for, side by side."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in pairs)


def mb(n_bytes: float) -> str:
    """Millions of bytes, for a column in which all numbers have one unit; large ones as GB."""
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes < 1e11 else f"{n_bytes / 1e9:.1f} GB"
