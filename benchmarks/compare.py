"""Our plans against what people do today, at ten budgets: `python -m benchmarks.compare`.

Progress goes to stderr; the Markdown tables to stdout and, with all samples as JSON beside them, to `--out`.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import models, ours, quiet, strategies, torch_milp
from benchmarks.measure import Bench
from benchmarks.quiet import tell
from benchmarks.report import render, write_text
from benchmarks.results import ModelResult, Results, Row


def main(
    model: Annotated[
        list[str] | None, typer.Option(help="gpt, resnet or t5; may be repeated. All by default.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each configuration.")] = 8,
    budgets: Annotated[int, typer.Option(min=2, help="How many, at equal distances.")] = 10,
    size: Annotated[str, typer.Option(help="full, or tiny for a trial.")] = "full",
    engine: Annotated[str, typer.Option(help="replay or sac.")] = "replay",
    device: Annotated[str, typer.Option(help="cpu, or cuda to time by CUDA events.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Torch's threads on CPU.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.md.")] = Path(
        "benchmarks/results"
    ),
) -> None:
    """Measure peak, gradients and step time of ours and of other strategies, side by side."""
    quiet.restart_if_needed()
    torch.set_num_threads(threads)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    found: list[ModelResult] = []
    for name in model or models.MODELS:
        found.append(measure_model(name, size, place, engine, budgets, rounds))
        results = Results(conditions(device, rounds), found)
        results.save(out / "compare.json")
        write_text(out / "compare.md", render(results))
    typer.echo(render(Results(conditions(device, rounds), found)))
    tell(
        f"done in {time.perf_counter() - started:.0f} s; {out}/compare.json and {out}/compare.md are written"
    )
    if any(not row.counts or row.peak_bytes > row.budget_bytes for result in found for row in result.ours):
        raise typer.Exit(1)


def measure_model(
    name: str, size: str, device: torch.device, engine: str, n_budgets: int, rounds: int
) -> ModelResult:
    """All strategies on one model."""
    workload = models.make(name, size, device)
    tell(f"{workload.title}: profiling")
    start = time.perf_counter()
    profile = ours.profiled(workload)
    profile_s = time.perf_counter() - start
    bench = Bench(workload, device)
    tell("  peaks and gradients of what is done by hand")
    configurations = [bench.examine(strategy) for strategy in strategies.by_hand(workload)]
    least_bytes = ours.least_budget_bytes(profile, engine)
    budgets = ours.budgets_between(least_bytes, configurations[0].peak_bytes, n_budgets)
    tell(f"  torch's sac_milp for budgets from {budgets[0] / 1e6:.1f} to {budgets[-1] / 1e6:.1f} MB")
    advised = torch_milp.advised(workload, size, device, budgets)
    tell("  our plans for them")
    start = time.perf_counter()
    planned = ours.planned(profile, budgets, engine)
    solve_s = time.perf_counter() - start
    tell("  peaks and gradients of both")
    configurations += [bench.examine(strategy) for strategy in (*advised, *planned)]
    tell(f"  timing {sum(not c.error for c in configurations)} configurations")
    bench.time(configurations, rounds)
    return ModelResult(
        name=name,
        title=workload.title,
        engine=engine,
        budgets=budgets,
        resident_bytes=bench.resident_bytes,
        profile_s=profile_s,
        solve_s=solve_s,
        rows=[Row.of(configuration) for configuration in configurations],
    )


def conditions(device: str, rounds: int) -> dict[str, str]:
    """What the results depend on."""
    cuda = device.startswith("cuda")
    return {
        "on": torch.cuda.get_device_name(device)
        if cuda
        else f"{_processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "precision": "fp32",
        "time": "by CUDA events"
        if cuda
        else "is CPU time of the process, waiting threads asleep, freed memory kept by glibc",
        "rounds": str(rounds),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


if __name__ == "__main__":
    typer.run(main)
