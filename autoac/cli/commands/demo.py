"""`autoac demo`: train a small GPT with and without a plan."""

from __future__ import annotations

from typing import Annotated

import typer

from autoac.cli.options import Json, Verbose
from autoac.cli.output import Output


def main(
    context: typer.Context,
    steps: Annotated[
        int, typer.Option(min=3, help="Training steps; the first and the last are measured.")
    ] = 16,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train a small GPT with and without a plan for half of its peak, on CPU, and compare.

    Takes a minute or two. Exits with 1 if any gradient differs or the peak exceeds the budget.
    """
    from autoac.demo.report import render
    from autoac.demo.run import run

    out = Output(context)
    report = run(steps, progress=out.note)
    out.results(report.as_json(), render(report))
    if not (report.is_exact and report.is_within_budget):
        raise typer.Exit(1)
