"""Pictures of frames, by matplotlib: the trade-off curve, and memory over the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

KIND_COLOURS = {
    "Parameter": "#4c566a",
    "Buffer": "#7b8494",
    "Optstate": "#8d7b9c",
    "Input": "#b8a9c4",
    "Gradient": "#b5651d",
    "Activation": "#3b7dd8",
    "Temp": "#e3b23c",
}
"""From bottom to top; told apart by people who see no red or green as well."""


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


def byte_scale(most_bytes: float) -> tuple[float, str]:
    """Bytes in a unit that suits the largest number, and its name."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if most_bytes >= 2 * size:
            return size, name
    return 1.0, "bytes"


def draw_curve(axes: Any, frame: pd.DataFrame, baselines: pd.DataFrame, knee: int | None, title: str) -> None:
    """Overhead against budget.

    Args:
        frame, baselines, knee: of a `Tradeoff`.
    """
    scale, unit = byte_scale(float(frame["budget_bytes"].max()))
    budget = frame["budget_bytes"] / scale
    axes.step(budget, 100 * frame["bound"], where="post", linestyle=":", color="grey", label="bound")
    axes.step(
        budget, 100 * frame["greedy_overhead"], where="post", color="#b5651d", alpha=0.8, label="greedy"
    )
    axes.step(
        budget, 100 * frame["overhead"], where="post", marker="o", markersize=4, color="#3b7dd8", label="plan"
    )
    if knee is not None:
        x, y = budget.iloc[knee], 100 * frame["overhead"].iloc[knee]
        axes.plot([x], [y], "o", markersize=12, fillstyle="none", color="#3b7dd8", label="knee")
    for index, row in enumerate(baselines.itertuples(index=False)):
        axes.plot(
            [row.peak_bytes / scale],
            [100 * row.overhead],
            "s^vD<>"[index % 6],
            color="black",
            fillstyle="none",
            linestyle="none",
            label=str(row.name),
        )
    axes.set_xlabel(f"budget, {unit}")
    axes.set_ylabel("extra step time, %")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.25)
    for text in axes.legend(fontsize="small").get_texts():
        text.set_parse_math(False)


def draw_memory(
    axes: Any,
    timeline: pd.DataFrame,
    budget_bytes: int,
    unplanned_bytes: np.ndarray | None = None,
    measured_bytes: np.ndarray | None = None,
    title: str = "",
) -> None:
    """Live bytes over the step, stacked by kind.

    Args:
        timeline: one row a position, a column for each kind, as in `report.timeline_table`.
        budget_bytes: drawn as a line.
        unplanned_bytes, measured_bytes: live bytes at each position with nothing recomputed, and as measured.
    """
    most = max(budget_bytes, timeline["live_bytes"].max())
    if unplanned_bytes is not None:
        most = max(most, unplanned_bytes.max())
    scale, unit = byte_scale(float(most))
    position = np.arange(len(timeline))
    kinds = [kind for kind in KIND_COLOURS if timeline[kind].any()]
    axes.stackplot(
        position,
        [timeline[kind] / scale for kind in kinds],
        labels=kinds,
        colors=[KIND_COLOURS[kind] for kind in kinds],
        linewidth=0,
        step="mid",
    )
    if unplanned_bytes is not None:
        axes.plot(position, unplanned_bytes / scale, color="grey", linewidth=1, label="nothing recomputed")
    if measured_bytes is not None:
        axes.plot(position, measured_bytes / scale, color="black", linewidth=1, label="measured")
    axes.axhline(budget_bytes / scale, color="#c0392b", linestyle="--", linewidth=1, label="budget")
    backward = np.flatnonzero(timeline["phase"].to_numpy() != "forward")
    if len(backward):
        axes.axvline(backward[0] - 0.5, color="grey", linestyle=":", linewidth=1)
    axes.set_xlim(0, max(1, len(timeline) - 1))
    axes.set_xlabel("op of the step; forward, then backward with what is recomputed")
    axes.set_ylabel(f"live {unit}")
    axes.set_title(title, parse_math=False)
    axes.legend(loc="upper left", fontsize="small", ncols=2)
