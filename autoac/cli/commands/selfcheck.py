"""`autoac selfcheck`: check predictions and gradients on this device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoac.cli.commands.calibrate import Device, Size, this_device
from autoac.cli.options import Json, Verbose, writable
from autoac.cli.output import Output, in_one_unit, table

if TYPE_CHECKING:
    from autoac.compare.selfcheck import ModelCheck


def main(
    context: typer.Context,
    device: Device = "cpu",
    size: Size = "small",
    report: Annotated[
        Path | None,
        typer.Option(
            callback=writable, show_default=False, help="Write all of it in a file for an issue, .json."
        ),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Profile, plan and train two models here, and hold everything that was predicted against the measured.

    A Llama-shaped and a ResNet-shaped model (bf16 on CUDA), with deterministic
    kernels, at four budgets, against no and full checkpointing. Exits with 1 if
    a gradient differs, a peak exceeds its budget, or is more than 1 % off.
    --report writes a file without weights, data or paths.
    """
    out = Output(context)
    place = this_device(device)
    from autoac.compare.selfcheck import selfcheck

    with out.progress("Checking") as tell:
        found = selfcheck(place, size, tell)
    if report is not None:
        from autoac.compare.selfcheck import for_an_issue
        from autoac_solver.records.disk.files import write_bytes

        write_bytes(report, json.dumps(for_an_issue(found, place), indent=1).encode())
    conditions = ", ".join(f"{name} {value}" for name, value in found.conditions.items())
    verdict = "Every plan kept its promises." if found.ok else "NOT every plan kept its promises."
    out.results(found.as_json(), *map(shown, found.models), f"{conditions}\n{verdict}")
    if not found.ok:
        raise typer.Exit(1)


def shown(model: ModelCheck) -> Any:
    """One model's rows as a table."""
    made = table(
        f"{model.title}: a step takes {model.measured_step_s:.3g} s, predicted {model.predicted_step_s:.3g} s",
        "",
        "budget",
        "predicted peak",
        "measured peak",
        "predicted time",
        "measured time",
        "gradients",
        "",
    )
    mb = in_one_unit(*(row.measured_peak_bytes for row in model.rows))
    for row in model.rows:
        planned = bool(row.budget_bytes)
        made.add_row(
            row.name,
            mb(row.budget_bytes) if planned else "",
            mb(row.predicted_peak_bytes) if planned else "",
            mb(row.measured_peak_bytes),
            f"{row.predicted_overhead:+.1%}" if planned else "",
            f"{row.overhead:+.1%}",
            "equal" if row.equal else "differ",
            "" if not planned else "ok" if row.ok else "NOT ok",
        )
    return made
