"""`autoac profile`: record one training step of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autoac.cli.options import Arguments, Granularity, Json, Model, Verbose, compiling, json_file
from autoac.cli.output import Output, facts, in_one_unit
from autoac.cli.ranks import (
    CpuOffload,
    ParamDtype,
    Prefetch,
    Ranks,
    ReduceDtype,
    Replicas,
    ReshardAfterForward,
    Split,
    Units,
    sharding,
    sizes,
    sizes_table,
)
from autoac.cli.ranks import document as of_ranks
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
    granularity: Granularity = None,
    fsdp: Ranks = None,
    tp: Split = None,
    units: Units = None,
    reshard_after_forward: ReshardAfterForward = None,
    replicas: Replicas = None,
    prefetch: Prefetch = None,
    param_dtype: ParamDtype = None,
    reduce_dtype: ReduceDtype = None,
    cpu_offload: CpuOffload = False,
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
    compiled = compiling(engine, granularity, model)
    sharded = sharding(
        fsdp,
        units,
        reshard_after_forward,
        replicas,
        prefetch,
        param_dtype,
        reduce_dtype,
        cpu_offload,
        split=tp,
        source=model,
        engine=engine,
    )
    if sharded is not None and mode == "real":
        raise typer.BadParameter(
            "a step of ranks that are not here cannot be run: leave --mode out, or take fake.",
            param_hint="'--mode'",
        )
    target = load_target(model, arguments)
    spec = None if sharded is None else sharded.spec(target)
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
            parallel=spec,
            progress=part(tell, 0.0, 0.9),
            **compiled,
        )
        profile.save(output)
        tell("least possible peak", 0.9)
        least_bytes = profile.least_peak_bytes
    held = [] if spec is None else sizes(spec, target, profile)
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
            **({} if spec is None else of_ranks(spec, held)),
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
        *(["", sizes_table(spec, held)] if spec is not None and held else []),
    )
