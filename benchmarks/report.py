"""The results as Markdown tables."""

from __future__ import annotations

from autoac.compare.results import ModelResult, Results, Row
from benchmarks.checks import checks


def render(results: Results) -> str:
    """All tables, with their conditions."""
    conditions = "; ".join(f"{name} {value}" for name, value in results.conditions.items())
    parts = [
        "# Step time at a memory budget",
        f"Conditions: {conditions}.",
        "MB is 10^6 bytes. A peak is that of the whole step, parameters included, by the allocator's own account. "
        "Overhead is extra step time over that without checkpointing: the median of the samples, each over how slow "
        "the machine was by the samples just before and after (in brackets: of the least samples as they are). "
        "Predicted is time by the wall clock. In each round the configurations of a model take turns in random order. "
        "The best other strategy is the fastest one whose measured peak fits the budget and whose gradients are right.",
    ]
    return "\n\n".join([*parts, *map(_model, results.models)]) + "\n"


def _model(model: ModelResult) -> str:
    caption = (
        f"Noise: no checkpointing, measured twice as two configurations, differs by {model.difference_of_none:.1%}; "
        f"two equal configurations differ by at most {model.noise:.1%} in 95 of 100 cases. "
        f"Profiling took {model.profile_s:.1f} s, planning for all budgets {model.solve_s:.1f} s."
    )
    caption = f"{caption} {model.about_taken_again}".rstrip()
    verdicts = "\n".join(f"- {check}" for check in checks(model))
    return "\n\n".join([f"## {model.title}", _budgets(model), caption, verdicts, _strategies(model)])


def _budgets(model: ModelResult) -> str:
    lines = _header(
        [
            "budget MB",
            "best other",
            "peak MB",
            "overhead",
            "ours: peak MB",
            "overhead",
            "by wall clock",
            "predicted",
        ]
    )
    for ours in model.ours:
        if ours.error:
            lines.append(
                _line([_mb(ours.budget_bytes), "", "", "", ours.error.replace("|", "/"), "", "", ""])
            )
            continue
        other = model.best_other(ours.budget_bytes)
        cells = (
            ["none fits", "", ""]
            if other is None
            else [other.name, _mb(other.peak_bytes), _overhead(model, other)]
        )
        cells += [_mb(ours.peak_bytes), _overhead(model, ours), f"{model.wall_overhead(ours):.1%}"]
        cells += [f"{ours.predicted_overhead or 0:.1%}"]
        lines.append(_line([_mb(ours.budget_bytes), *cells]))
    return "\n".join(lines)


def _strategies(model: ModelResult) -> str:
    lines = _header(["other strategies", "peak MB", "overhead", "gradients", "buffers"])
    for row in model.rows:
        if row.kind == "ours":
            continue
        if row.error:
            lines.append(_line([row.name, "", row.error.replace("|", "/"), "", ""]))
            continue
        equal = ["equal" if same else "differ" for same in (row.gradients_equal, row.buffers_equal)]
        lines.append(_line([row.name, _mb(row.peak_bytes), _overhead(model, row), *equal]))
    return "\n".join(lines)


def _overhead(model: ModelResult, row: Row) -> str:
    return f"{model.overhead(row):.1%} ({model.least_overhead(row):.1%})"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f}"


def _header(cells: list[str]) -> list[str]:
    return [_line(cells), "|---" * len(cells) + "|"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
