"""`autoac compare`: manual strategies and torch's planner against our plans, on the user's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoac.cli.options import (
    DEFAULT_ENGINE,
    Arguments,
    EngineName,
    Json,
    Model,
    Threads,
    Verbose,
    budget_value,
    json_file,
    picture,
)
from autoac.cli.output import Output
from autoac.cli.target import load_target


def main(
    context: typer.Context,
    model: Model,
    budget: Annotated[
        list[str] | None,
        typer.Option("--budget", "-b", show_default=False, help="Plan for this, too; may be repeated."),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(
            show_default="found",
            help="Modules to checkpoint one by one, names or globs ('layers.*'); may be repeated.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of the step time of each strategy.")] = 8,
    engine: Annotated[
        EngineName,
        typer.Option(help="Of our plans. With compile, torch's own budgets are measured, too."),
    ] = DEFAULT_ENGINE,
    threads: Threads = None,
    arguments: Arguments = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=picture, show_default=False, help="Write a picture here, .png or .svg."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=json_file, show_default=False, help="Write all samples here, .json."
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure peak, gradients and step time of what people use today and of our plans, side by side.

    No checkpointing, full checkpointing of each and of every second block,
    saving attention and matmuls (or convolutions), torch's sac_milp if pwlf is
    installed, and ours at the peak of each of these and at your budgets. With
    --engine compile also blocks compiled at torch's own memory budgets.

    The process restarts once, with settings that keep the times quiet. Exits
    with 1 if a gradient or buffer under one of our plans differs, a peak
    exceeds its budget, or a plan fails, and with 3 if no plan fits any of your
    budgets, with 4 if none was found in time.
    """
    from autoac.compare.quiet import restart_if_needed

    restart_if_needed()
    out = Output(context)
    target = load_target(model, arguments)
    import torch

    from autoac.cli.failures import INFEASIBLE, NO_PLAN_IN_TIME
    from autoac.compare.blocks import find_blocks
    from autoac.compare.ours import NO_PLAN_FITS
    from autoac.compare.results import Results
    from autoac.compare.run import AT_BUDGET, compare, conditions
    from autoac.compare.workload import Workload
    from autoac.step.model import device_of, unwrapped

    if threads is not None:
        torch.set_num_threads(threads)
    inner = unwrapped(target.model)
    found = find_blocks(inner, blocks)
    title = f"{type(inner).__name__} of {target.spec}"
    workload = Workload(
        type(inner).__name__, title, target.model, target.sample, found, target.loss, target.optimizer
    )
    with out.progress("Comparing") as tell:
        result = compare(
            workload,
            [budget_value(text) for text in budget or ()],
            engine=engine,
            rounds=rounds,
            progress=tell,
        )
    measured_on = conditions(device_of(inner), (p.dtype for p in inner.parameters()), rounds)
    if output is not None:
        Results(measured_on, [result]).save(output)
    from autoac.compare.table import document, render

    if plot is not None:
        from autoac.compare.picture import draw

        draw(result, plot)
    written = [f"Written: {path}" for path in (output, plot) if path is not None]
    out.results(document(result, measured_on, found), render(result, measured_on, found), *written)
    if any(row.is_wrong for row in result.ours):
        raise typer.Exit(1)
    asked = [row for row in result.ours if row.name.startswith(AT_BUDGET)]
    if asked and all(row.error for row in asked):
        fits_none = all(row.error.startswith(NO_PLAN_FITS) for row in asked)
        raise typer.Exit(INFEASIBLE if fits_none else NO_PLAN_IN_TIME)
