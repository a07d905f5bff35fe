"""Compiled models under byte budgets, beside other ways: `python -m benchmarks.compiled`.

At some budgets, on one model, with CPU time and peak measured: engine compile; the fastest of torch's own budgets whose
measured peak fits, one fraction for all blocks or for the model compiled as a whole; engine replay, which compiles
nothing; and compiled blocks under plain full checkpointing. All runs take turns. Gradients are those of `plan.verify`.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import autoac
from autoac.compare import quiet
from autoac.compare.compiled import at_fraction, checkpoint_compiled
from autoac.compare.measure import Installed
from autoac.compare.workload import Workload
from autoac.device import device_for
from autoac.execute.compiled.code import compiled
from autoac.measure import in_turn, measure_peak
from autoac.step.restore import untouched
from autoac_solver.records.compiled import CompiledTable
from autoac_solver.records.disk.files import write_json
from benchmarks.models import MODELS, make

ENGINE, TORCH, REPLAY, CHECKPOINT = (
    "engine compile",
    "torch's budget",
    "engine replay",
    "compiled, checkpointed",
)

Applied = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Row:
    """Measurements of one way.

    Args:
        way: one of the four, with torch's fraction where it has one, and "whole" where the model is one graph.
        budget_bytes: the budget asked for, 0 where the way has none.
        predicted_bytes: predicted peak, 0 where there is no prediction.
        peak_bytes: measured, resident bytes included.
        samples_s: CPU seconds of a step, one number a round.
    """

    way: str
    budget_bytes: int
    predicted_bytes: int
    peak_bytes: int
    samples_s: list[float]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def fractions_of(count: int) -> list[float]:
    """Fractions for torch's own budget, from all to nothing."""
    return [round(1 - i / max(1, count - 1), 3) for i in range(count)]


def compile_whole(fraction: float, model: torch.nn.Module) -> None:
    """Compile a model as one graph at torch's own budget, permanently."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(type(model), f"torch:{fraction:g}", "")(model, args, kwargs)

    model.__dict__["forward"] = forward


def ways(
    workload: Workload, budgets: int, fractions: int, whole: bool
) -> dict[tuple[str, int], tuple[Applied, int]]:
    """All compared ways, by name and budget: a function that applies it to the model, and its predicted peak."""
    model = workload.modules
    quiet.tell("profiling, compiling, measuring")
    profile = autoac.profile(model, workload.sample, loss=workload.loss, engine="compile")
    assert isinstance(profile.compiled, CompiledTable)
    # Without the points of engine compile, so that replay's plans do not carry them.
    eager = dataclasses.replace(profile, compiled=None)
    curve = autoac.tradeoff(profile, points=budgets, engine="compile")
    found: dict[tuple[str, int], tuple[Applied, int]] = {}
    for budget in map(int, curve.frame["budget_bytes"]):
        quiet.tell(f"plans for {budget} bytes")
        plan = autoac.plan(model, workload.sample, budget, loss=workload.loss, engine="compile")
        found[ENGINE, budget] = (lambda plan=plan: plan.applied(model)), plan.predicted_peak_bytes
        try:
            replay = autoac.solve(eager, budget, engine="replay")
        except autoac.InfeasibleBudgetError:
            continue
        found[REPLAY, budget] = (lambda plan=replay: plan.applied(model)), replay.predicted_peak_bytes
    for fraction in fractions_of(fractions):
        torchs = at_fraction(curve.plans[0], fraction)
        found[f"{TORCH} {fraction:g}", 0] = (lambda plan=torchs: plan.applied(model)), 0
        if whole:
            one_graph = Installed(model, functools.partial(compile_whole, fraction))
            found[f"{TORCH} {fraction:g} whole", 0] = one_graph.applied, 0
    names = list({region.fqn for region in curve.plans[0].regions})
    found[CHECKPOINT, 0] = Installed(model, functools.partial(checkpoint_compiled, names)).applied, 0
    return found


def measure(workload: Workload, budgets: int, rounds: int, fractions: int, whole: bool) -> list[Row]:
    """Peak and CPU time of every way."""
    model, run, known = workload.modules, workload.step(), device_for(torch.device("cpu"))
    compared = ways(workload, budgets, fractions, whole)
    resident = autoac.profile(model, workload.sample, loss=workload.loss).resident_bytes

    def step(applied: Applied) -> float:
        with untouched(model, workload.inputs, lambda _: None), applied():
            return known.step_seconds(run)[0]

    def peak(applied: Applied) -> int:
        with untouched(model, workload.inputs, lambda _: None), applied():
            return measure_peak(run).peak_above_start_bytes

    peaks = {}
    for key, (applied, _) in compared.items():
        quiet.tell(f"peak of {key[0]} {key[1] or ''}")
        step(applied)  # compiles
        step(applied)
        peaks[key] = resident + peak(applied)
    runs: dict[tuple[str, int], Callable[[], float]] = {
        key: functools.partial(step, applied) for key, (applied, _) in compared.items()
    }
    runs["plain", 0] = functools.partial(step, nullcontext)
    times = in_turn(runs, rounds, after_round=lambda done: quiet.tell(f"round {done} of {rounds}"))
    peaks["plain", 0] = resident + peak(nullcontext)
    predicted = {key: known for key, (_, known) in compared.items()} | {("plain", 0): 0}
    return [Row(*key, predicted[key], peaks[key], times[key]) for key in runs]


def render(rows: list[Row]) -> str:
    """The table: for each budget the four ways, their measured peaks and times over the uncompiled step's."""
    plain_s = next(row.median_s for row in rows if row.way == "plain")
    fixed = [row for row in rows if not row.budget_bytes and row.way != "plain"]

    def cell(row: Row | None) -> str:
        return "-" if row is None else f"{row.peak_bytes / 1e6:.1f} MB : {row.median_s / plain_s:.2f}"

    lines = [
        f"| budget | {ENGINE} (predicted) | {TORCH}, the best that fits | {REPLAY} | {CHECKPOINT} |",
        "|---|---|---|---|---|",
    ]
    for budget in sorted({row.budget_bytes for row in rows if row.budget_bytes}):
        asked = {row.way: row for row in rows if row.budget_bytes == budget}
        fits = [row for row in fixed if row.peak_bytes <= budget]
        torchs = min((r for r in fits if r.way.startswith(TORCH)), key=lambda row: row.median_s, default=None)
        by_hand = next((row for row in fits if row.way == CHECKPOINT), None)
        ours = asked[ENGINE]
        name = "" if torchs is None else f" ({torchs.way.removeprefix(TORCH).strip()})"
        lines.append(
            f"| {budget / 1e6:.1f} MB | {cell(ours)} ({ours.predicted_bytes / 1e6:.1f}) | {cell(torchs)}{name} | "
            f"{cell(asked.get(REPLAY))} | {cell(by_hand)} |"
        )
    return "\n".join(lines)


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "gpt",
    size: Annotated[str, typer.Option(help="full, or tiny for a try.")] = "full",
    budgets: Annotated[
        int, typer.Option(min=2, help="From the least to that which needs no recomputation.")
    ] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    fractions: Annotated[int, typer.Option(min=1, help="Of torch's own budget, from all to nothing.")] = 15,
    whole: Annotated[bool, typer.Option(help="Have torch compile the model as one graph, too.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write all samples, .json.")] = None,
) -> None:
    """Measure engine compile beside torch's own budgets, engine replay and checkpointing."""
    workload = make(model, size, torch.device("cpu"))
    rows = measure(workload, budgets, rounds, fractions, whole)
    print(
        f"{workload.title}; CPU time over the uncompiled step without checkpointing, medians of {rounds} rounds\n"
    )
    print(render(rows))
    if output is not None:
        data = {"model": workload.title, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
        write_json(output, "autoac.benchmark.compiled", 1, data, dict[str, Any])


if __name__ == "__main__":
    quiet.restart_if_needed()
    typer.run(main)
