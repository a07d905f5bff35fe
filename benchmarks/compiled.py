"""Compiled models under byte budgets, beside other ways: `python -m benchmarks.compiled`.

At some budgets, on each model, with CPU time, peak and gradients measured: engine compile; torch's own budgets, one
fraction for all blocks or for the model compiled as a whole; engine replay, which compiles nothing; and compiled blocks
under plain full checkpointing. All samples are taken in turns (`autoac.compare`). Progress goes to stderr; the tables
to stdout and, with all samples as JSON and a picture of each model beside them, to `--out`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import autoac
from autoac.compare import ours, quiet
from autoac.compare.compiled import ALL, CHECKPOINTED, TORCHS_BUDGET, by_torch
from autoac.compare.measure import Bench, from_zero_grad
from autoac.compare.picture import draw
from autoac.compare.results import ModelResult, Results, Row
from autoac.compare.run import conditions, examine
from autoac.compare.strategies import AGAIN, Strategy
from autoac.execute.compiled.code import compiled
from autoac.step.step import TrainingStep
from autoac_solver.records.disk.files import write_text
from autoac_solver.records.engines import COMPILE
from autoac_solver.records.profile import Profile
from benchmarks import models

MODELS = "gpt", "t5", "vit"
OURS, REPLAY = "ours, budget ", "engine replay, budget "
TORCHS_WHOLE = "torch.compile of the whole model, budget "


def fractions_of(count: int) -> list[float]:
    """Fractions for torch's own budget, from all to nothing."""
    return [round(1 - i / max(1, count - 1), 3) for i in range(count)]


def compile_whole(fraction: float, model: torch.nn.Module) -> None:
    """Compile a model as one graph at torch's own budget, permanently."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(type(model), f"torch:{fraction:g}", "")(model, args, kwargs)

    model.__dict__["forward"] = forward


def measure(
    name: str, size: str, n_budgets: int, rounds: int, fractions: Sequence[float], whole: bool
) -> ModelResult:
    """All ways on one model.

    Args:
        n_budgets: at equal distances, from the least to that at which a plan recomputes nothing.
        fractions: of torch's own budget; 1 is the first.
        whole: have torch compile the model as one graph, too.
    """
    workload = models.make(name, size, torch.device("cpu"))
    model = workload.modules
    step = TrainingStep(model, workload.sample, workload.loss)
    start = time.perf_counter()
    with from_zero_grad(workload):
        profile = autoac.profile(
            model, workload.sample, loss=workload.loss, engine="compile", progress=_tell(name)
        )
    profile_s = time.perf_counter() - start
    curve = autoac.tradeoff(profile, points=n_budgets, engine="compile")
    budgets = [int(budget) for budget in curve.frame["budget_bytes"]]
    bench = Bench(workload, torch.device("cpu"), profile.resident_bytes)
    none = [Strategy(title, "none", lambda model: model) for title in ("none", AGAIN)]
    others = by_torch(profile, fractions)
    if whole:
        others += [
            Strategy(
                f"{TORCHS_WHOLE}{fraction:g}",
                "other",
                functools.partial(compile_whole, fraction),
                compiled=ALL,
            )
            for fraction in fractions
        ]
    start = time.perf_counter()
    with from_zero_grad(workload):
        planned = ours.planned(profile, _named(OURS, budgets), COMPILE, step)
    solve_s = time.perf_counter() - start
    found = examine(bench, [*none, *others, *_replayed(profile, budgets), *planned], _tell(name))
    bench.time(found, rounds, _tell(name))
    return ModelResult.of(
        bench, found, profile, engine=COMPILE, budgets=budgets, profile_s=profile_s, solve_s=solve_s
    )


def _replayed(profile: Profile, budgets: Sequence[int]) -> list[Strategy]:
    """Plans of engine replay. Without the points of engine compile, which they would carry."""
    eager = dataclasses.replace(profile, compiled=None)
    plans = ours.planned(eager, _named(REPLAY, budgets), "replay")
    return [dataclasses.replace(plan, kind="other") for plan in plans]


def _named(prefix: str, budgets: Sequence[int]) -> dict[str, int]:
    return {f"{prefix}{number}": budget for number, budget in enumerate(budgets, 1)}


def render(results: Results) -> str:
    """A table for each model: at each budget the four ways, their measured peaks and extra times."""
    said = "; ".join(f"{name} {value}" for name, value in results.conditions.items())
    parts = [
        "# Compiled models at a memory budget",
        f"Conditions: {said}.",
        "MB is 10^6 bytes. A peak is that of the whole step, by the allocator's own account. Time is extra CPU time "
        "over the uncompiled step without checkpointing: the median of the samples, each over how slow the machine was "
        "by the samples just before and after. In brackets: the predicted peak; torch's fraction.",
    ]
    return "\n\n".join([*parts, *(f"## {model.title}\n\n{table(model)}" for model in results.models)]) + "\n"


def table(model: ModelResult) -> str:
    """The table of one model, and the sentence on its noise."""
    lines = [
        "| budget MB | engine *compile*: peak (predicted) | time | torch's own budget, the fastest that fits: peak "
        "| time | engine *replay*: peak | time | compiled blocks, checkpointed: peak | time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = {row.name: row for row in model.rows if not row.error}
    torchs = [row for name, row in rows.items() if name.startswith((TORCHS_BUDGET, TORCHS_WHOLE))]
    for number, budget in enumerate(model.budgets, 1):
        fits = [row for row in torchs if row.peak_bytes <= budget]
        torch_row = min(fits, key=model.overhead, default=None)
        by_hand = rows.get(CHECKPOINTED)
        ours_row, replay = (rows.get(f"{prefix}{number}") for prefix in (OURS, REPLAY))
        cells = [
            f"{budget / 1e6:.1f}",
            *_cells(model, ours_row, f" ({_predicted(ours_row)})"),
            *_cells(model, torch_row, f" ({_fraction(torch_row)})"),
            *_cells(model, replay),
            *_cells(model, by_hand if by_hand is not None and by_hand.peak_bytes <= budget else None),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    wrong = Counter(
        row.name.partition(", ")[0] for row in model.rows if not row.error and not row.gradients_equal
    )
    notes = f"Two equal configurations differ by up to {model.noise * 100:.1f} points in 95 of 100 cases."
    if wrong:
        named = "; ".join(f"{name}, at {count} budgets" for name, count in wrong.items())
        notes += (
            f" Other gradients than those of blocks compiled without a budget, beyond 1e-6 relative: {named}."
        )
    failed = [
        f"{row.name}: {row.error}" for row in model.rows if row.error and not row.name.startswith(REPLAY)
    ]
    return "\n".join([*lines, "", " ".join([notes, *failed, model.about_taken_again]).rstrip()])


def _predicted(row: Row | None) -> str:
    return "" if row is None else f"{(row.predicted_peak_bytes or 0) / 1e6:.1f}"


def _fraction(row: Row | None) -> str:
    if row is None:
        return ""
    fraction = row.name.rpartition(" ")[2]
    return f"{fraction}, whole" if row.name.startswith(TORCHS_WHOLE) else fraction


def _cells(model: ModelResult, row: Row | None, more: str = "") -> tuple[str, str]:
    if row is None:
        return "none", ""
    return f"{row.peak_bytes / 1e6:.1f}{more}", f"{100 * model.overhead(row):.1f} %"


def _tell(name: str) -> Any:
    return lambda text, share: quiet.tell(f"{name}: {text}")


def main(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(models.MODELS)}; may be repeated.")
    ] = None,
    size: Annotated[str, typer.Option(help="full, or tiny for a try.")] = "full",
    budgets: Annotated[
        int, typer.Option(min=2, help="From the least to that which needs no recomputation.")
    ] = 10,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    fractions: Annotated[int, typer.Option(min=1, help="Of torch's own budget, from all to nothing.")] = 15,
    whole: Annotated[bool, typer.Option(help="Have torch compile the model as one graph, too.")] = True,
    threads: Annotated[int, typer.Option(min=1, help="Torch's. On one, CPU time is the time of a step.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for what is written.")] = Path(
        "benchmarks/results/compiled"
    ),
) -> None:
    """Measure engine compile beside torch's own budgets, engine replay and checkpointing."""
    quiet.restart_if_needed({"HF_HUB_OFFLINE": "1"})  # random configs need no network
    torch.set_num_threads(threads)
    out.mkdir(parents=True, exist_ok=True)
    found: list[ModelResult] = []
    results = Results(conditions(torch.device("cpu"), [torch.float32], rounds), found)
    for name in model or MODELS:
        found.append(measure(name, size, budgets, rounds, fractions_of(fractions), whole))
        results.save(out / "compiled.json")
        write_text(out / "compiled.md", render(results))
        draw(found[-1], out / f"{name}.svg")
    typer.echo(render(results))


if __name__ == "__main__":
    typer.run(main)
