"""`autoac report`: a plan, or a curve of plans, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoac.cli.options import Json, Verbose, writable
from autoac.cli.output import Output

PAGES = (".html", ".htm")


def _page(value: Path) -> Path | None:
    if value.suffix not in PAGES:
        raise typer.BadParameter(f"{value} is none of {', '.join(PAGES)}.")
    return writable(value)


def main(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_CURVE",
            exists=True,
            dir_okay=False,
            show_default=False,
            help="A plan that `autoac plan` wrote, or a curve that `autoac tradeoff -o curve.json` wrote.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", callback=_page, show_default=False, help="The page to write, .html."),
    ],
    points: Annotated[
        int | None,
        typer.Option(
            min=0, show_default="20", help="Budgets to plan for, for a plan's curve; 0 leaves the curve out."
        ),
    ] = None,
    curve: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            show_default=False,
            help="A plan's curve, instead of planning for one.",
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write a plan as one self-contained page: the memory over the step, the trade-off curve, the decisions.

    It opens offline and can be sent to a colleague. Making it needs no torch.
    The page of a curve opens with the plan of its knee; nothing is solved for it.
    """
    if points == 1:
        raise typer.BadParameter("a curve takes at least 2 budgets.", param_hint="'--points'")
    out = Output(context)
    from autoac_solver.plan.curve import SCHEMA, Tradeoff
    from autoac_solver.records.disk.files import schema_of
    from autoac_solver.records.plan import PlanRecord
    from autoac_solver.show.page import write_report

    is_curve = schema_of(source) == SCHEMA
    if points is not None and (is_curve or curve is not None):
        raise typer.BadParameter("the curve has its budgets; leave this out.", param_hint="'--points'")
    if is_curve and curve is not None:
        raise typer.BadParameter(f"{source} is a curve itself.", param_hint="'--curve'")
    points = 20 if points is None else points
    with out.progress("Report") as tell:
        if is_curve:
            known = Tradeoff.load(source)
            record = known.record(known.opening_row)
        else:
            known = None if curve is None else Tradeoff.load(curve)
            record = PlanRecord.load(source)
        try:
            write_report(record, output, curve=known, points=points, progress=tell)
        except ValueError as error:  # of another profile or engine
            raise typer.BadParameter(str(error), param_hint="'--curve'") from error
    size, shown = output.stat().st_size, points if known is None else len(known)
    out.results(
        {"output": str(output), "bytes": size, "points": shown}, f"Written: {output} ({size / 1e6:.1f} MB)"
    )
