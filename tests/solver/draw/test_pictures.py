"""Plots show the numbers of their data frames."""

from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from autoac_solver.draw import pictures


def points(line: Any) -> list[list[float]]:
    return line.get_xydata().tolist()


@pytest.fixture
def axes() -> Any:
    return Figure().subplots()


@pytest.mark.parametrize(
    ("most", "expected"), [(2e9, (1e9, "GB")), (1.9e9, (1e6, "MB")), (2e3, (1e3, "kB")), (0, (1.0, "bytes"))]
)
def test_units_suit_the_largest_number(most: float, expected: tuple[float, str]) -> None:
    assert pictures.byte_scale(most) == expected


def test_a_curve_has_plans_bounds_the_greedy_plan_and_baselines(axes: Any) -> None:
    frame = pd.DataFrame(
        {
            "budget_bytes": [2e6, 3e6, 4e6],
            "overhead": [0.3, 0.1, 0.0],
            "bound": [0.2, 0.1, 0.0],
            "greedy_overhead": [float("nan"), 0.2, 0.0],
        }
    )
    baselines = pd.DataFrame({"name": ["full"], "peak_bytes": [2.5e6], "overhead": [0.33]})
    pictures.draw_curve(axes, frame, baselines, 1, "a $ model")
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {"bound", "plan", "greedy", "knee", "full"}
    assert points(lines["plan"]) == [[2, 30], [3, 10], [4, 0]]
    assert points(lines["knee"]) == [[3, 10]]
    assert points(lines["full"]) == [[2.5, 33]]
    assert axes.get_xlabel() == "budget, MB"


def test_bars_have_the_largest_on_top(axes: Any) -> None:
    frame = pd.DataFrame(
        {"module": [f"layer{i}" for i in range(12)], "bytes": [12e6 - i * 1e6 for i in range(12)]}
    )
    pictures.draw_bars(axes, frame, "held")
    assert [bar.get_width() for bar in axes.patches] == list(range(3, 13))
    assert axes.get_yticklabels()[-1].get_text() == "layer0"


def test_batches_are_over_the_budget_or_over_the_size_for_a_single_one(axes: Any) -> None:
    frame = pd.DataFrame(
        {
            "budget_bytes": [2e9, 2e9],
            "batch_size": [1, 2],
            "samples_per_s": [10.0, 12.0],
            "fastest": [False, True],
        }
    )
    pictures.draw_batches(axes, frame)
    assert points(axes.lines[0]) == [[1, 10], [2, 12]]
    assert axes.get_title() == "within 2 GB"
    several: Any = Figure().subplots()
    pictures.draw_batches(several, pd.concat([frame, frame.assign(budget_bytes=3e9)]))
    assert [line.get_label() for line in several.lines] == ["batch 1", "batch 2", "fastest"]
    assert points(several.lines[-1]) == [[2, 12], [3, 12]]
