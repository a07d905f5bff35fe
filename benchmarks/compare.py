"""Plans against other strategies, at ten budgets: `python -m benchmarks.compare`.

Progress goes to stderr; the Markdown tables to stdout and, with all samples as JSON and a picture of each model beside
them, to `--out`.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

import autoac
from autoac.compare import ours, quiet, strategies, torch_milp
from autoac.compare.measure import Bench, Tell
from autoac.compare.picture import draw
from autoac.compare.quiet import tell
from autoac.compare.results import ModelResult, Results, Row
from autoac.compare.run import conditions, examine
from autoac_solver.plan.planning import least_budget_bytes
from autoac_solver.records.disk.files import write_text
from autoac_solver.records.profile import Profile
from benchmarks import models
from benchmarks.checks import FULL
from benchmarks.report import render


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="gpt, resnet or t5; may be repeated. All by default.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Samples of each configuration, twice as many of none.")
    ] = 8,
    more: Annotated[
        float,
        typer.Option(
            min=0,
            help="About so many minutes a model for further samples of ours and of what may be the best other.",
        ),
    ] = 0.0,
    budgets: Annotated[int, typer.Option(min=2, help="How many, at equal distances.")] = 10,
    size: Annotated[str, typer.Option(help="full, or tiny for a trial.")] = "full",
    engine: Annotated[str, typer.Option(help="replay or sac.")] = "replay",
    device: Annotated[str, typer.Option(help="cpu, or cuda to time by CUDA events.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="Torch's threads on CPU. On one, CPU time is the time of a step.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path("benchmarks/results"),
) -> None:
    """Measure peak, gradients and step time of ours and of other strategies, side by side."""
    quiet.restart_if_needed({"HF_HUB_OFFLINE": "1"})  # random configs need no network
    torch.set_num_threads(threads)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    found: list[ModelResult] = []
    measured_on = conditions(place, [torch.float32], rounds)
    if more:
        measured_on["rounds"] += (
            f", and as many more of ours and of those that may be the best other at a budget as fit {more:g} minutes"
        )
    measured_on["rounds"] += "; twice as many of no checkpointing"
    for name in model or models.COMPARED:
        found.append(measure_model(name, size, place, engine, budgets, rounds, more))
        results = Results(measured_on, found)
        results.save(out / "compare.json")
        write_text(out / "compare.md", render(results))
        draw(found[-1], out / f"{name}.svg")
    typer.echo(render(Results(measured_on, found)))
    tell(f"done in {time.perf_counter() - started:.0f} s; compare.json, compare.md and pictures are in {out}")
    if any(not row.counts or row.peak_bytes > row.budget_bytes for result in found for row in result.ours):
        raise typer.Exit(1)


def measure_model(
    name: str, size: str, device: torch.device, engine: str, n_budgets: int, rounds: int, more: float = 0.0
) -> ModelResult:
    """All strategies on one model; arguments as for `main`."""
    workload = models.make(name, size, device)

    def profiled() -> Profile:
        return autoac.profile(
            workload.model, workload.sample, loss=workload.loss, progress=_tell(workload.title)
        )

    start = time.perf_counter()
    profile = profiled()
    profile_s = time.perf_counter() - start
    bench = Bench(workload, device, profile.resident_bytes)
    by_hand = strategies.by_hand(
        workload.blocks, strategies.policies_for(profile, workload.blocks), (2, 3, 4), (True, False)
    )
    configurations = examine(bench, by_hand, _tell("by hand"))
    least_bytes = least_budget_bytes(profile, engine)
    budgets = ours.budgets_between(least_bytes, configurations[0].peak_bytes, n_budgets)
    tell(f"torch's sac_milp for budgets from {budgets[0] / 1e6:.1f} to {budgets[-1] / 1e6:.1f} MB")
    numbered = {f"budget {number}": budget for number, budget in enumerate(budgets, 1)}
    advised = torch_milp.advised(workload, device, numbered)
    tell("our plans for them")
    start = time.perf_counter()
    planned = ours.planned(profile, {f"ours, {name}": budget for name, budget in numbered.items()}, engine)
    solve_s = time.perf_counter() - start
    again = [plan.predicted_overhead or 0.0 for plan in ours.planned(profiled(), numbered, engine)]
    configurations += examine(bench, (*advised, *planned), _tell("planned"))
    plain = [c for c in configurations if c.strategy.kind == "none"]
    everyone = [*configurations, *plain]  # no checkpointing twice as often, for all others are over it
    start = time.perf_counter()
    bench.time(everyone, rounds, _tell("timing"))
    sample_s = (time.perf_counter() - start) / (rounds * len(everyone))
    result = ModelResult.of(
        *(bench, configurations, profile),
        engine=engine,
        budgets=budgets,
        profile_s=profile_s,
        solve_s=solve_s,
        predicted_again=again,
    )
    names = in_the_running(result)
    best = [c for c in everyone if c.strategy.name in names]
    bench.time(best, round(60 * more / (sample_s * len(best))), _tell("timing the best"))
    rows = [Row.of(configuration) for configuration in configurations]
    return dataclasses.replace(result, rows=rows, taken_again=bench.taken_again)


def in_the_running(result: ModelResult) -> set[str]:
    """Rows of the table: no checkpointing, ours, full checkpointing, and candidates for the best other at a budget.

    A candidate fits the budget and is no slower than the best, beyond noise.
    """
    others = [row for row in result.of_kind("other") if row.counts]
    names = {row.name for row in result.rows if row.kind != "other" or row.name == FULL}
    noise = result.noise
    for budget in result.budgets:
        best = result.best_other(budget)
        if best is not None and best.kind == "other":
            limit = result.overhead(best) + noise
            names |= {r.name for r in others if r.peak_bytes <= budget and result.overhead(r) <= limit}
    return names


def _tell(what: str) -> Tell:
    return lambda text, share: tell(f"{what}: {text}")


if __name__ == "__main__":
    typer.run(main)
