"""`autoac calibrate`: record this device's cost table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autoac.cli.options import Json, Verbose, json_file
from autoac.cli.output import Output, facts

Device = Annotated[
    Literal["cpu", "cuda"], typer.Option("--device", help="Where to run; cuda is the current GPU.")
]
Size = Annotated[
    Literal["tiny", "small", "full"],
    typer.Option("--size", help="Of the two models; full is meant for a GPU."),
]


def main(
    context: typer.Context,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", callback=json_file, show_default=False, help="The table to write, .json."
        ),
    ],
    device: Device = "cpu",
    size: Size = "small",
    name: Annotated[
        str | None, typer.Option(show_default=False, help="The table's name; the file's by default.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Record what ops take on this device, for `autoac profile --device TABLE` on another machine.

    Measures rates, the engines' own costs, and every op of a Llama-shaped and
    a ResNet-shaped model at several batch sizes.
    """
    out = Output(context)
    place = this_device(device)
    from autoac.calibrate.device_table import calibrate

    with out.progress("Calibrating") as tell:
        table = calibrate(name or output.stem, place, size, tell)
        table.save(output)
    rates = {dtype or "other": rate / 1e9 for dtype, rate in table.matrix_flops.items()}
    out.results(
        {
            "output": str(output),
            "name": table.name,
            "made": table.made,
            "entries": len(table.entries),
            "matrix_gflops": rates,
            "bandwidth_gb_s": table.bandwidth / 1e9,
            "launch_us": table.launch_s * 1e6,
        },
        facts(
            ("device", table.title),
            ("products", ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in rates.items()) + " GFLOP/s"),
            ("bandwidth", f"{table.bandwidth / 1e9:.1f} GB/s"),
            ("launch", f"{table.launch_s * 1e6:.1f} us"),
            ("ops", f"{len(table.entries)} distinct ones were timed"),
            ("written", str(output)),
        ),
    )


def this_device(device: str):  # -> torch.device, which is not imported for --help
    """The current device of a kind.

    Raises:
        typer.BadParameter: there is no GPU here.
    """
    from autoac.device import current_device

    found = current_device(device)
    if found is None:
        raise typer.BadParameter(f"there is no {device.upper()} device here.", param_hint="'--device'")
    return found
