"""`autoac profile`: record one training step of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autoac.cli.options import Arguments, Json, Model, Verbose, json_file
from autoac.cli.output import Output, facts, in_one_unit
from autoac.cli.target import load_target


def main(
    context: typer.Context,
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=json_file, show_default=False, help="The file to write, .json."
        ),
    ],
    mode: Annotated[
        Literal["auto", "real", "fake"],
        typer.Option(
            help="Run the step; or only its shapes, for a model that does not fit; or what is possible."
        ),
    ] = "auto",
    device: Annotated[
        str | None,
        typer.Option(
            show_default=False, help="A GPU that is not here: h200 and the like, or a cost table (.json)."
        ),
    ] = None,
    engine: Annotated[
        Literal["auto", "compile"],
        typer.Option(
            help="With compile, the regions that engine compile chooses from are compiled and measured, too."
        ),
    ] = "auto",
    arguments: Arguments = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Record one training step: time and bytes of every op, and what autograd saves.

    The step is run with everything recomputed, so a model that does not fit
    can be recorded. Prints which budgets are possible. `autoac plan` and
    `autoac tradeoff` take the file.
    """
    out = Output(context)
    target = load_target(model, arguments)
    import autoac
    from autoac.progress import part
    from autoac_solver.records.format import format_seconds

    with out.progress("Profiling") as tell:
        profile = autoac.profile(
            target.model,
            target.sample,
            loss=target.loss,
            optimizer=target.optimizer,
            mode=mode,
            device=device,
            engine=engine,
            progress=part(tell, 0.0, 0.9),
        )
        profile.save(output)
        tell("least possible peak", 0.9)
        least_bytes = profile.least_peak_bytes
    mb = in_one_unit(profile.resident_bytes, profile.peak_bytes, least_bytes)
    out.results(
        {
            "output": str(output),
            "model": profile.model,
            "device": profile.device,
            "ops": len(profile.tape),
            "module_calls": len(profile.calls),
            "step_s": profile.step_s,
            "resident_bytes": profile.resident_bytes,
            "unplanned_peak_bytes": profile.peak_bytes,
            "least_peak_bytes": least_bytes,
            "notes": list(profile.notes),
        },
        facts(
            ("model", f"{profile.model} on {profile.device}, {len(profile.tape)} ops in a step"),
            ("step time", f"{format_seconds(profile.step_s)} with nothing recomputed"),
            ("resident", f"{mb(profile.resident_bytes)} are there before the step"),
            ("peak", f"{mb(profile.peak_bytes)} with nothing recomputed"),
            ("least peak", f"{mb(least_bytes)}: --budget {least_bytes} or more is possible"),
            ("written", str(output)),
            *(("note", note) for note in profile.notes),
        ),
    )
