"""The command line. Results go to stdout, progress to stderr.

Importing torch takes seconds, so the commands import it themselves and `--help` does without.

Exit codes: 0 done, 1 error, 2 usage.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console

from autoac._version import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoac {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Plan activation checkpointing for PyTorch: a peak memory budget in bytes, the least extra time."""


@app.command()
def demo(
    steps: Annotated[
        int, typer.Option(min=3, help="Training steps; the first and the last are measured.")
    ] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")] = False,
) -> None:
    """Train a small GPT with and without a plan for half of its peak, on CPU, and compare.

    Takes a minute or two. Exits with 1 if any gradient differs or the peak exceeds the budget.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler reports its start and stop on stderr
    from autoac.demo.report import render
    from autoac.demo.run import run

    report = run(steps, progress=Console(stderr=True, highlight=False).print)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        Console(highlight=False).print(render(report))
    if not (report.is_exact and report.is_within_budget):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
