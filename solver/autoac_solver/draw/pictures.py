"""Matplotlib plots of data frames: the trade-off curve, memory over the step, and others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

INK = "#010203"
"""Placeholder colour of lines and text that `html.svg` replaces by the surrounding text's; used for nothing else."""

KIND_COLOURS = {
    "Parameter": "#607c91",
    "Buffer": "#a5873a",
    "Optstate": "#7b59b0",
    "Input": "#2a9d84",
    "Gradient": "#d36c14",
    "Activation": "#368aea",
    "Temp": "#c07a90",
}
"""In stacking order from the bottom; the hues of the report page, at a lightness that is visible on white and black."""

_PLAN, _GREEDY, _FAINT = "#368aea", "#d36c14", "#868b93"

_MOST_POSITIONS = 400
_LINES = ("overhead", "bound", "greedy_overhead")


def new_axes(width: float = 8.0, height: float = 4.2) -> Any:
    """Axes of a new pyplot figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures take matplotlib: pip install autoac[plot]") from error
    return pyplot.subplots(figsize=(width, height), layout="constrained")[1]


def _ink() -> str:
    """The text colour of matplotlib's current style: dark on light, or light on dark."""
    import matplotlib

    return matplotlib.rcParams["text.color"]


def byte_scale(most_bytes: float) -> tuple[float, str]:
    """Size and name of a unit that suits the largest number of bytes."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most_bytes >= 2 * size:
            return size, name
    return 1.0, "bytes"


def draw_curve(axes: Any, frame: pd.DataFrame, baselines: pd.DataFrame, knee: int | None, title: str) -> None:
    """Draw overhead over budget.

    Args:
        frame, baselines, knee: attributes of a `Tradeoff`.
    """
    scale, unit = byte_scale(float(frame["budget_bytes"].max()))
    budget = frame["budget_bytes"].to_numpy(float) / scale
    plan, bound, greedy = (100 * frame[name].to_numpy(float) for name in _LINES)
    # A plan is valid up to the next larger budget, a bound down to the next smaller one.
    axes.step(budget, bound, where="pre", linestyle=":", color=_FAINT, label="bound")
    axes.step(budget, plan, where="post", marker="o", markersize=4, color=_PLAN, label="plan")
    axes.step(budget, greedy, where="post", linestyle="--", linewidth=1, color=_GREEDY, label="greedy")
    if knee is not None:
        ring = {"markersize": 12, "fillstyle": "none", "color": _PLAN, "linestyle": "none"}
        axes.plot(budget[knee], plan[knee], "o", label="knee", **ring)
    peaks, overheads = (baselines[name].to_numpy(float) for name in ("peak_bytes", "overhead"))
    for index, name in enumerate(baselines["name"]):
        mark = {"marker": "s^vD<>"[index % 6], "fillstyle": "none", "color": _ink(), "linestyle": "none"}
        axes.plot(peaks[index] / scale, 100 * overheads[index], label=name, **mark)
    axes.set_xlabel(f"budget, {unit}")
    axes.set_ylabel("extra step time, %")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.25)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)


def _highest(values: np.ndarray) -> np.ndarray:
    """Positions to draw: the highest in each of at most `_MOST_POSITIONS` stretches, so peaks are kept."""
    stretches = np.array_split(np.arange(len(values)), min(len(values), _MOST_POSITIONS))
    return np.array([stretch[np.argmax(values[stretch])] for stretch in stretches], dtype=int)


def draw_memory(
    axes: Any,
    timeline: pd.DataFrame,
    budget_bytes: int,
    unplanned_bytes: np.ndarray | None = None,
    measured_bytes: np.ndarray | None = None,
    title: str = "",
) -> None:
    """Draw live bytes over the step, stacked by kind.

    Args:
        timeline: one row per position, one column per kind, as in `report.timeline_table`.
        budget_bytes: drawn as a line.
        unplanned_bytes, measured_bytes: live bytes per position with nothing recomputed, and as measured.
    """
    most = max(budget_bytes, timeline["live_bytes"].max())
    if unplanned_bytes is not None:
        most = max(most, unplanned_bytes.max())
    scale, unit = byte_scale(float(most))
    position = _highest(timeline["live_bytes"].to_numpy())
    kinds = [kind for kind in KIND_COLOURS if timeline[kind].any()]
    axes.stackplot(
        position,
        [timeline[kind].to_numpy()[position] / scale for kind in kinds],
        labels=kinds,
        colors=[KIND_COLOURS[kind] for kind in kinds],
        linewidth=0,
    )
    for line, colour, label in (
        (unplanned_bytes, _FAINT, "nothing recomputed"),
        (measured_bytes, _ink(), "measured"),
    ):
        if line is not None:
            at = _highest(line)
            axes.plot(at, line[at] / scale, color=colour, linewidth=1, label=label)
    axes.axhline(budget_bytes / scale, color=_ink(), linestyle="--", linewidth=1, label="budget")
    backward = np.flatnonzero(timeline["phase"].to_numpy() != "forward")
    if len(backward):
        axes.axvline(backward[0] - 0.5, color=_FAINT, linestyle=":", linewidth=1)
    axes.set_xlim(0, max(1, len(timeline) - 1))
    axes.set_xlabel("op of the step; forward, then backward with what is recomputed")
    axes.set_ylabel(f"live {unit}")
    axes.set_title(title, parse_math=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small", frameon=False)


def draw_bars(axes: Any, frame: pd.DataFrame, title: str, most: int = 10) -> None:
    """Draw bytes as horizontal bars, the largest on top.

    Args:
        frame: names in the first column, and a column `bytes` in descending order.
    """
    shown = frame.head(most).iloc[::-1]
    scale, unit = byte_scale(float(frame["bytes"].max()) if len(frame) else 0.0)
    axes.barh(range(len(shown)), shown["bytes"] / scale, color=_PLAN)
    axes.set_yticks(range(len(shown)), [str(name) or "-" for name in shown.iloc[:, 0]])
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.set_xlabel(unit)
    axes.set_title(title, parse_math=False)


def draw_batches(axes: Any, frame: pd.DataFrame) -> None:
    """Draw samples per second over the budget, one line per batch size; for a single budget, over the batch size.

    Args:
        frame: `BatchTradeoff.frame`.
    """
    scale, unit = byte_scale(float(frame["budget_bytes"].max()))
    if frame["budget_bytes"].nunique() == 1:
        axes.plot(frame["batch_size"], frame["samples_per_s"], marker="o", color=_PLAN)
        axes.set_xlabel("batch size")
        axes.set_title(f"within {frame['budget_bytes'].iloc[0] / scale:.4g} {unit}")
    else:
        for batch, part in frame.groupby("batch_size"):
            budget = part["budget_bytes"].to_numpy(float) / scale
            axes.step(budget, part["samples_per_s"], where="post", marker=".", label=f"batch {batch}")
        best = frame[frame["fastest"]].sort_values("budget_bytes")
        ring = {"markersize": 11, "fillstyle": "none", "color": _ink(), "linestyle": "none"}
        axes.plot(
            best["budget_bytes"].to_numpy(float) / scale, best["samples_per_s"], "o", label="fastest", **ring
        )
        axes.set_xlabel(f"budget, {unit}")
        axes.legend(fontsize="small")
    axes.set_ylabel("samples per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)
