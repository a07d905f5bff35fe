"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autoac.cli.target import is_recorded


def _remember(context: typer.Context, parameter: typer.CallbackParam, value: bool) -> bool:
    """Store the option for the code that shows results and errors."""
    context.meta[parameter.name or ""] = value  # "as_json" or "verbose", as the commands call them
    return value


def json_file(value: Path | None) -> Path | None:
    """Check for the suffix .json, by which later commands tell files from models."""
    if value is not None and value.suffix != ".json":
        raise typer.BadParameter(f"{value} is no .json: what is written there is JSON.")
    return writable(value)


def writable(value: Path | None) -> Path | None:
    """Check that a file can be written, before any work is done."""
    if value is not None and value.is_dir():
        raise typer.BadParameter(f"{value} is a folder.")
    if value is not None and not value.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {value.parent}.")
    if value is not None and value.exists() and not value.is_file():
        raise typer.BadParameter(f"{value} is a device, a pipe or a socket, not a file.")
    return value


Model = Annotated[
    str, typer.Argument(metavar="MODEL", show_default=False, help="package.module:factory or file.py:factory")
]
SOURCES = (
    "package.module:factory, file.py:factory, or a recorded profile or plan (.json), which needs no torch"
)
Source = Annotated[str, typer.Argument(metavar="MODEL_OR_FILE", show_default=False, help=SOURCES)]
OptionalBudget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        show_default=False,
        help="Limit for the peak: 20GB (10^9), 20GiB (2^30), 80% of the device's memory, or bytes.",
    ),
]
EngineName = Literal["replay", "sac", "compile"]
"""A copy of `records.engines.BuiltIn`: `--help` does not import the solver. A test compares them."""
DEFAULT_ENGINE: EngineName = "replay"
Engine = Annotated[Literal["auto", EngineName], typer.Option(help="What carries the plan out.")]
Granularity = Annotated[
    Literal["blocks", "whole"] | None,
    typer.Option(
        show_default="blocks", help="With --engine compile: compile the model's blocks, or the model as one."
    ),
]
Headroom = Annotated[str, typer.Option(help="Part of the budget to leave free, as --budget.")]
BudgetOf = Annotated[
    Literal["allocated", "reserved"],
    typer.Option(
        "--budget-of",
        help="What the budget limits; reserved is CUDA's, simulated with the options in PYTORCH_CUDA_ALLOC_CONF.",
    ),
]
Regions = Annotated[
    list[str] | None,
    typer.Option(
        "--regions", help="Modules to recompute as one, names or globs; may be repeated.  [default: chosen]"
    ),
]
TimeLimit = Annotated[float, typer.Option("--time-limit", min=0.0, help="Seconds for the solver.")]
Gap = Annotated[
    float, typer.Option(min=0.0, help="How far from the least time a plan may be, as a fraction of the step.")
]
Threads = Annotated[int | None, typer.Option(min=1, show_default="torch's", help="torch's threads on CPU.")]
MaxOverhead = Annotated[
    str | None,
    typer.Option(
        "--max-overhead",
        show_default=False,
        help="In place of --budget: the least memory with which a step takes at most so much longer, as 5%.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option(
        "--arg",
        "-a",
        metavar="NAME=VALUE",
        show_default=False,
        help="An argument for the factory: JSON, such as 8 or true, or else text; may be repeated.",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", callback=_remember, help="Print JSON, and nothing else, on stdout.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=_remember,
        help="Tell every stage on stderr; show the traceback of an error.",
    ),
]


PICTURES = (".png", ".svg", ".pdf")


def picture(value: Path | None) -> Path | None:
    """Check a picture's path, and that matplotlib is there, before anything is measured."""
    if value is None:
        return None
    if value.suffix not in PICTURES:
        raise typer.BadParameter(f"{value} is none of {', '.join(PICTURES)}.")
    import matplotlib.figure  # noqa: F401 - if it is missing, the command fails here

    return writable(value)


def budget_value(text: str) -> int | str:
    """Digits alone as an int of bytes, other text unchanged."""
    return int(text) if text.strip().isdecimal() else text


def compiling(engine: str, granularity: str | None, source: str | None) -> dict[str, Any]:
    """The arguments of `autoac.profile` and `autoac.plan` for these options.

    Args:
        source: a model, or the file of a recorded step; None for a model without weights (--hf).

    Raises:
        typer.BadParameter: an option does not go with the others.
    """
    from autoac_solver.records.engines import compiles

    if source is None and compiles(engine):
        raise typer.BadParameter(
            "engine compile measures compiled code, and with --hf no step is run: give a model, or take replay or sac.",
            param_hint="'--engine'",
        )
    if granularity is None:
        return {"engine": engine}
    if not compiles(engine):
        raise typer.BadParameter("it goes with --engine compile only.", param_hint="'--granularity'")
    if source is not None and is_recorded(source):
        raise typer.BadParameter(
            "the regions of a recorded step are compiled: give it to `autoac profile`.",
            param_hint="'--granularity'",
        )
    return {"engine": engine, "granularity": granularity}
