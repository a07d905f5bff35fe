"""A comparison as a picture: extra step time against peak."""

from __future__ import annotations

import io
from pathlib import Path

from autoac.compare.results import ModelResult, Row
from autoac_solver.files import write_bytes


def draw(result: ModelResult, path: Path) -> None:
    """Write the picture, in the format that the file's name tells.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (`pip install autoac[plot]`).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    others = sorted((r for r in result.rows if r.kind != "ours" and not r.error), key=lambda r: r.peak_bytes)
    ours = sorted((r for r in result.ours if not r.error), key=lambda r: r.peak_bytes)
    axes.plot(*_points(result, ours), marker="o", color="black", label="ours")
    predicted = [100 * (row.predicted_overhead or 0.0) for row in ours]
    axes.plot([row.peak_bytes / 1e6 for row in ours], predicted, ":", color="black", label="ours, predicted")
    for number, row in enumerate(others):
        marker = "sDv^P*Xhd<>p"[number % 12]
        axes.plot(*_points(result, [row]), marker=marker, linestyle="", label=row.name)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set(xlabel="measured peak, MB", ylabel="extra step time, %", title=result.title)
    axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=150)
    write_bytes(path, content.getvalue())


def _points(result: ModelResult, rows: list[Row]) -> tuple[list[float], list[float]]:
    return [row.peak_bytes / 1e6 for row in rows], [100 * result.overhead(row) for row in rows]
