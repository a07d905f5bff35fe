"""The table of `benchmarks.compiled`; measuring takes the compiler minutes."""

import math
import statistics
from pathlib import Path
from typing import Any

from autoac.compare.compiled import CHECKPOINTED, TORCHS_BUDGET
from autoac.compare.results import ModelResult, Results, Row
from benchmarks.compiled import OURS, REPLAY, TORCHS_WHOLE, table

ROOT = Path(__file__).resolve().parents[2]


def row(name: str, peak_bytes: int, seconds: float, turn: int, **given: Any) -> Row:
    kind = "none" if name.startswith("none") else "ours" if name.startswith(OURS) else "other"
    values = {
        "name": name,
        "kind": kind,
        "budget_bytes": 0,
        "predicted_peak_bytes": None,
        "predicted_overhead": None,
        "peak_bytes": peak_bytes,
        "gradients_equal": True,
        "buffers_equal": True,
        "seconds": [seconds] * 3,
        "wall_s": [seconds] * 3,
        "turns": [turn, turn + 20, turn + 40],
        "error": "",
    }
    return Row(**{**values, **given})


def test_the_fastest_of_torchs_budgets_that_fits_stands_in_the_table():
    rows = [
        row("none", 50_000_000, 2.0, 0),
        row("none again", 50_000_000, 2.0, 1),
        row(f"{TORCHS_BUDGET}1", 45_000_000, 1.7, 2),
        row(f"{TORCHS_BUDGET}0.5", 39_000_000, 2.0, 3),
        row(f"{TORCHS_BUDGET}0", 25_000_000, 2.4, 4, gradients_equal=False),
        row(f"{TORCHS_WHOLE}0.5", 38_000_000, 1.9, 5),
        row(CHECKPOINTED, 20_000_000, 2.6, 6),
        row(f"{REPLAY}1", 0, 1.0, 7, error="no plan fits"),
        row(f"{REPLAY}2", 40_000_000, 2.1, 8),
        row(f"{OURS}1", 19_900_000, 2.2, 9, predicted_peak_bytes=19_800_000),
        row(f"{OURS}2", 38_100_000, 1.8, 10, predicted_peak_bytes=38_000_000),
    ]
    model = ModelResult("gpt", "GPT", "compile", [20_000_000, 40_000_000], 0, 0.0, 0.0, 1.0, rows)
    lines = table(model).splitlines()
    assert lines[2:4] == [
        "| 20.0 | 19.9 (19.8) | 10.0 % | none |  | none |  | 20.0 | 30.0 % |",
        "| 40.0 | 38.1 (38.0) | -10.0 % | 38.0 (0.5, whole) | -5.0 % | 40.0 | 5.0 % | 20.0 | 30.0 % |",
    ]
    assert lines[5] == (
        "Two equal configurations differ by up to 0.0 points in 95 of 100 cases. Other gradients than those of blocks "
        "compiled without a budget, beyond 1e-6 relative: torch.compile, at 1 budgets."
    )


def test_the_page_shows_what_was_measured():
    section = (ROOT / "docs" / "measured.md").read_text().split("## Compiled models")[1].split("\n## ")[0]
    results = Results.load(ROOT / "benchmarks" / "results" / "compiled" / "compiled.json")
    readme = (ROOT / "README.md").read_text()
    faster: dict[
        str, dict[int, float]
    ] = {}  # by model: by budget, points less than the best of what else compiles
    for model in results.models:
        assert model.title in section
        assert table(model) in section
        plans, by_hand = model.ours, next(row for row in model.rows if row.name == CHECKPOINTED)
        assert all(not plan.is_wrong for plan in plans)
        assert all(plan.peak_bytes == plan.predicted_peak_bytes for plan in plans)
        found = {
            p.budget_bytes: (best, model.overhead(p)) for p in plans if (best := other(model, p)) is not None
        }
        faster[model.name] = {budget: 100 * (theirs - ours) for budget, (theirs, ours) in found.items()}
        means = (statistics.fmean(side) for side in zip(*found.values(), strict=True))
        cells = [f"{100 * mean:.1f} %" for mean in means]
        for row in (by_hand, plans[0]):
            cells.append(f"{100 * model.overhead(row):.1f} % at {row.peak_bytes / 1e6:.0f} MB")
        assert f"| {' | '.join(cells)} |" in readme
        noise = 100 * model.noise
        replayed = {
            row.name.removeprefix(REPLAY): model.overhead(row) for row in model.rows if is_replayed(row)
        }
        for number, plan in enumerate(plans, 1):
            assert 100 * (model.overhead(plan) - replayed.get(str(number), math.inf)) < noise
        assert min(faster[model.name].values()) > -noise
    t5 = next(model for model in results.models if model.name == "t5")
    default = next(row for row in t5.rows if row.name == f"{TORCHS_BUDGET}1")
    assert f"its blocks take {100 * t5.overhead(default):.1f} % extra time" in section
    most = {name: f"{max(points.values()):.1f}" for name, points in faster.items()}
    assert f"up to {most['gpt']} (GPT), {most['vit']} (ViT) and {most['t5']} (T5) points less time" in section
    noise = max(model.noise for model in results.models)
    assert f"(compiled: {100 * noise:.1f})" in readme


def is_replayed(row: Row) -> bool:
    return row.name.startswith(REPLAY) and not row.error


def other(model: ModelResult, plan: Row) -> float | None:
    """The least extra time of what else compiles and fits a plan's budget; None if nothing does."""
    rows = [row for row in model.of_kind("other") if not row.error and not row.name.startswith(REPLAY)]
    return min((model.overhead(row) for row in rows if row.peak_bytes <= plan.budget_bytes), default=None)
