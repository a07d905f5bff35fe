"""`autoac report`: a plan as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoac.cli.options import Json, PlanFile, Verbose, writable
from autoac.cli.output import Output

PAGES = (".html", ".htm")


def _page(value: Path) -> Path | None:
    if value.suffix not in PAGES:
        raise typer.BadParameter(f"{value} is none of {', '.join(PAGES)}.")
    return writable(value)


def main(
    context: typer.Context,
    plan: PlanFile,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", callback=_page, show_default=False, help="The page to write, .html."),
    ],
    points: Annotated[
        int, typer.Option(min=0, help="Budgets of the trade-off curve; 0 leaves the curve out.")
    ] = 20,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a plan as one self-contained page: the memory over the step, the trade-off curve, the decisions.

    It opens offline and can be sent to a colleague. Making it needs no torch.
    """
    if points == 1:
        raise typer.BadParameter("a curve takes at least 2 budgets.", param_hint="'--points'")
    out = Output(context)
    from autoac_solver.page import write_report
    from autoac_solver.plan_record import PlanRecord

    record = PlanRecord.load(plan)
    with out.progress("Report") as tell:
        write_report(record, output, points=points, progress=tell)
    size = output.stat().st_size
    out.results(
        {"output": str(output), "bytes": size, "points": points}, f"Written: {output} ({size / 1e6:.1f} MB)"
    )
