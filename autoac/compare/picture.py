"""Plot of a comparison: extra step time against peak."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path

from autoac.compare.results import ModelResult, Row
from autoac_solver.records.disk.files import write_bytes


def draw(result: ModelResult, path: Path) -> None:
    """Write the plot, in the format of the file's suffix.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (`pip install autoac[plot]`).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    families: dict[str, list[Row]] = {}
    for row in sorted((r for r in result.rows if not r.error), key=lambda r: r.peak_bytes):
        families.setdefault("ours" if row.kind == "ours" else _family(row.name), []).append(row)
    ours = families.pop("ours", [])
    axes.plot(*_points(result, ours), marker="o", color="black", linewidth=2, zorder=3, label="ours")
    predicted = [100 * (row.predicted_overhead or 0.0) for row in ours]
    axes.plot([row.peak_bytes / 1e6 for row in ours], predicted, ":", color="black", label="ours, predicted")
    for (name, rows), marker in zip(sorted(families.items()), itertools.cycle("sDv^PX*hd<>p"), strict=False):
        axes.plot(*_points(result, rows), marker=marker, linestyle="-", linewidth=0.5, label=name)
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set(xlabel="measured peak, MB", ylabel="extra step time, %")
    axes.set_title(result.title, parse_math=False)  # it has a class's name and a file's
    axes.legend(fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=150)
    write_bytes(path, content.getvalue())


def _family(name: str) -> str:
    """Strategies that differ in one number share a line: "full, every 2. block" is "full"."""
    return re.sub(r" again$|, ((each|every \d+\.) block|(budget )?[0-9.]+ ?[A-Za-z]*)$", "", name)


def _points(result: ModelResult, rows: list[Row]) -> tuple[list[float], list[float]]:
    return [row.peak_bytes / 1e6 for row in rows], [100 * result.overhead(row) for row in rows]
