"""`autoac tradeoff`: step time against peak memory, over a range of budgets."""

from __future__ import annotations

import contextlib
import io
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoac.cli.commands.plan import matching
from autoac.cli.options import (
    PICTURES,
    Arguments,
    Engine,
    Gap,
    Granularity,
    Json,
    Regions,
    Source,
    TimeLimit,
    Verbose,
    budget_value,
    compiling,
    picture,
    writable,
)
from autoac.cli.output import Output, in_one_unit, table
from autoac.cli.target import Recorded, is_recorded, load_target, no_arguments, recorded

if TYPE_CHECKING:
    from autoac_solver.plan.curve import Tradeoff


def _curve_file(value: Path) -> Path | None:
    if value.suffix not in (".json", ".csv", *PICTURES):
        raise typer.BadParameter(f"{value} is none of .json, .csv, {', '.join(PICTURES)}.")
    return picture(value) if value.suffix in PICTURES else writable(value)


def _points(value: int) -> int:
    from autoac_solver.records.arguments import MOST_CURVE_POINTS  # here, as --help waits for no import

    if value > MOST_CURVE_POINTS:
        raise typer.BadParameter(f"{value} points are too many: a curve takes at most {MOST_CURVE_POINTS}.")
    return value


def main(
    context: typer.Context,
    source: Source,
    points: Annotated[
        int,
        typer.Option(min=2, callback=_points, help="How many budgets, from the least to no recomputation."),
    ] = 20,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            "--budget", "-b", show_default=False, help="A budget to plan for instead; may be repeated."
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            show_default=False,
            help="Write it here: .json, .csv, .png, .svg; may be repeated.",
        ),
    ] = None,
    engine: Engine = "auto",
    granularity: Granularity = None,
    regions: Regions = None,
    time_limit: TimeLimit = 60.0,
    gap: Gap = 1e-3,
    arguments: Arguments = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Plan for a range of budgets: what memory costs in time.

    --time-limit is for each budget. Ctrl-C keeps what is done.
    """
    out = Output(context)
    files = [_curve_file(path) for path in output or ()]
    found = _recorded(out, source, compiling(engine, granularity, source), regions, arguments)
    from autoac_solver.plan.planning import plan_budgets

    with out.progress("Planning") as tell, noticing_ctrl_c() as ctrl_c:
        curve = plan_budgets(
            found.profile,
            [budget_value(text) for text in budget] if budget else None,
            points,
            regions=matching(found.profile, regions),
            policies=found.policies,
            time_limit_s=time_limit,
            gap=gap,
            progress=tell,
            **found.engine_for(engine),
        )
    data = document(curve, interrupted=ctrl_c.pressed)
    for path in files:
        assert path is not None
        save(curve, path)
    out.results(
        {**data, "output": [str(path) for path in files]},
        shown(curve),
        by_hand(curve),
        *[f"note: {note}" for note in data["notes"]],
        *[f"Written: {path}" for path in files],
    )
    if ctrl_c.pressed:
        out.note(
            f"Interrupted: {len(curve.frame)} of {len(budget) if budget else points} budgets are done and kept."
        )
        raise typer.Exit(130)


def _recorded(
    out: Output,
    source: str,
    compiled: dict[str, Any],
    regions: list[str] | None,
    arguments: list[str] | None,
) -> Recorded:
    """The step in a file, or that of a model, recorded with these options (see `compiling`)."""
    if is_recorded(source):
        no_arguments(arguments)
        return recorded(source)
    target = load_target(source, arguments)
    import autoac
    from autoac_solver.records.engines import compiles

    with out.progress("Profiling") as tell:
        return Recorded(
            autoac.profile(
                target.model,
                target.sample,
                loss=target.loss,
                optimizer=target.optimizer,
                regions=regions
                if compiles(compiled["engine"])
                else None,  # these are compiled while profiling
                progress=tell,
                **compiled,
            )
        )


@dataclass
class CtrlC:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextlib.contextmanager
def noticing_ctrl_c() -> Iterator[CtrlC]:
    """Context in which Ctrl-C raises KeyboardInterrupt as usual, and is remembered in case it is caught."""
    seen = CtrlC()

    def interrupt(number: int, frame: Any) -> None:
        seen.pressed = True
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield seen  # signals do not arrive here
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)


def document(curve: Tradeoff, interrupted: bool = False) -> dict[str, Any]:
    """A curve as plain data."""
    return {
        "model": curve.model,
        "engine": curve.engine,
        "resident_bytes": curve.resident_bytes,
        "step_s": curve.step_s,
        "interrupted": interrupted,
        "notes": [*curve.notes, *curve.profile.notes],
        "knee": None if curve.knee is None else int(curve.frame["budget_bytes"].iloc[curve.knee]),
        "by_hand": curve.baselines.to_dict("records"),
        "budgets": [
            {name: None if value != value else value for name, value in row.items()}  # NaN is no JSON
            for row in curve.frame.to_dict("records")
        ],
    }


def save(curve: Tradeoff, path: Path) -> None:
    """Write a curve in the format of the file's suffix."""
    from autoac_solver.records.disk.files import write_bytes, write_text

    if path.suffix == ".json":
        curve.save(path)
    elif path.suffix == ".csv":
        write_text(path, curve.frame.to_csv(index=False))
    else:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        curve.plot(figure.subplots())
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix[1:], dpi=150)
        write_bytes(path, content.getvalue())


def shown(curve: Tradeoff) -> Any:
    """A curve as a table."""
    made = table(
        f"{curve.model}, engine {curve.engine}, a step takes {curve.step_s:.3g} s",
        "budget",
        "predicted peak",
        "extra time",
        "bound",
        "greedy",
        "",
    )
    mb = _amounts(curve)
    for index, row in enumerate(curve.frame.to_dict("records")):
        notes = [] if row["status"] == "optimal" else [str(row["status"])]
        greedy = row["greedy_overhead"]
        made.add_row(
            mb(row["budget_bytes"]),
            mb(row["peak_bytes"]),
            f"{row['overhead']:.1%}",
            f"{row['bound']:.1%}",
            f"{greedy:.1%}" if greedy == greedy else "-",  # NaN: it does not meet the budget
            ", ".join([*notes, "the knee"] if index == curve.knee else notes),
        )
    return made


def _amounts(curve: Tradeoff) -> Callable[[float], str]:
    """One unit for both tables."""
    return in_one_unit(float(curve.frame["budget_bytes"].max()), float(curve.baselines["peak_bytes"].max()))


def by_hand(curve: Tradeoff) -> Any:
    """Table of common manual checkpointing strategies."""
    made = table("Predicted for checkpointing by hand", "strategy", "predicted peak", "extra time")
    mb = _amounts(curve)
    for row in curve.baselines.to_dict("records"):
        made.add_row(str(row["name"]), mb(row["peak_bytes"]), f"{row['overhead']:.1%}")
    return made
