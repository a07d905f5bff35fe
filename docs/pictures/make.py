"""Make this folder's pictures from what is recorded in the repository: `python docs/pictures/make.py [folder]`.

The first three are of one plan, made from `profiles/gpt-8-blocks-cpu.json`; the others are measured, from
`benchmarks/results`.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from autoac.compare.results import Results
from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.profile import Profile
from autoac_solver.show.memory import plot_memory

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BUDGET = "150MB"
COLOURS = {"save": "#3b7dd8", "recompute": "#b5651d", "skip": "#c9cdd4"}


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, the same bytes each time."""
    content = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "autoac"}):
        figure.savefig(content, format="svg", metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in content.getvalue().splitlines()) + "\n")


def picture(draw: Callable[..., None], path: Path, *given: Any, height: float = 4.0) -> None:
    """Draw on new axes, and save."""
    figure = Figure(figsize=(9, height), layout="constrained")
    draw(figure.subplots(), *given)
    save(figure, path)


def is_run(timeline: pd.DataFrame, values: pd.DataFrame) -> pd.Series:
    """For each position, whether its op runs: of those to run again, the ones whose value is recomputed."""
    keys = ["op", "module", "nth"]
    again = timeline[timeline["phase"] == "recompute"]
    again = again.assign(nth=again.groupby(["op", "module"]).cumcount(), position=again.index)
    chosen = values.assign(nth=values.groupby(["op", "module"]).cumcount())
    chosen = chosen[chosen["decision"] == "recompute"]
    run = timeline["phase"] != "recompute"
    run[again.merge(chosen[keys], on=keys)["position"]] = True
    return run


def draw_regions(axes: Any, plan: Any) -> None:
    """When each region runs: forward, what is run again, and backward."""
    step = step_of(plan)
    timeline = step.timeline
    regions = [region.name for region in plan.regions]
    colours = {"forward": "#7b8494", "recompute": COLOURS["recompute"], "backward": "#c9cdd4"}
    modules, run = timeline["module"], is_run(timeline, step.decisions)
    for row, name in enumerate(regions):
        inside = (modules == name) | modules.str.startswith(f"{name}.")
        for phase, colour in colours.items():
            at = np.flatnonzero(inside & (timeline["phase"] == phase) & run)
            label = {"recompute": "run again"}.get(phase, phase) if row == 0 else None
            axes.barh([row] * len(at), 1, left=at, color=colour, label=label)
    names = [r.name if r.wrapped else f"{r.name} (untouched)" for r in plan.regions]
    axes.set_yticks(range(len(regions)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, len(timeline))
    axes.set_xlabel("op of the step")
    axes.set_title(f"GPT of 8 blocks, budget {BUDGET}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize="small")


def draw_decisions(axes: Any, values: pd.DataFrame) -> None:
    """Bytes by the op that makes the value, and what is done with them."""
    values = values.assign(op=values["op"].str.split(".").str[1])
    sums = values.pivot_table("bytes", "op", "decision", "sum", fill_value=0) / 1e6
    sums = sums.loc[sums.sum(axis=1).sort_values().index]
    left = np.zeros(len(sums))
    for decision, colour in COLOURS.items():
        axes.barh(sums.index, sums[decision], left=left, color=colour, label=decision)
        left += sums[decision].to_numpy()
    axes.set_xlabel("MB that forward computes")
    axes.set_title(f"GPT of 8 blocks, budget {BUDGET}")
    axes.legend(frameon=False)


def draw_predictions(axes: Any, results: Any) -> None:
    """Extra step time: predicted against measured, each plan a point."""
    for model, marker in zip(results.models, "osD", strict=True):
        predicted = [100 * row.predicted_overhead for row in model.ours]
        measured = [100 * model.wall_overhead(row) for row in model.ours]
        axes.plot(predicted, measured, marker, fillstyle="none", label=model.title.split(",")[0])
    most = axes.get_xlim()[1]
    axes.plot([0, most], [0, most], color="grey", linewidth=0.8)
    axes.fill_between([0, most], [-2, most - 2], [2, most + 2], color="grey", alpha=0.12, label="two points")
    axes.set(xlabel="predicted extra step time, %", ylabel="measured, %")
    axes.legend(frameon=False)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    plan = plan_profile(Profile.load(ROOT / "profiles" / "gpt-8-blocks-cpu.json"), BUDGET)
    figure = Figure(figsize=(9, 4), layout="constrained")
    plot_memory(plan, figure.subplots())
    save(figure, folder / "budget.svg")
    picture(draw_regions, folder / "region.svg", plan)
    picture(draw_decisions, folder / "decision.svg", step_of(plan).decisions)

    results = Results.load(RESULTS / "compare.json")
    picture(draw_predictions, folder / "prediction.svg", results, height=4.5)
    shutil.copyfile(RESULTS / "gpt.svg", folder / "measured.svg")
    for model in Results.load(RESULTS / "compiled" / "compiled.json").models:
        shutil.copyfile(RESULTS / "compiled" / f"{model.name}.svg", folder / f"compiled-{model.name}.svg")


if __name__ == "__main__":
    main()
