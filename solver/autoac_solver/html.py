"""Pieces of HTML that show well in a notebook: tables and inline pictures. Whatever comes from a model is escaped."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import Any

import pandas as pd

__all__ = ["escape", "svg", "table"]

MOST_ROWS = 30


def table(frame: pd.DataFrame, most_rows: int = MOST_ROWS) -> str:
    """A table of a frame, bytes as MB, seconds as ms and shares as per cent; names and texts escaped.

    The unit of a column is told by its name: `*_bytes` or `bytes`, `*_s`, `overhead`, `bound` or `*_overhead`.
    """
    shown = frame.head(most_rows)
    text = pd.DataFrame({_heading(str(name)): _column(str(name), shown[name]) for name in shown.columns})
    more = f"<p>and {len(frame) - most_rows} more rows</p>" if len(frame) > most_rows else ""
    return text.to_html(index=False, border=0, justify="right") + more


def svg(draw: Callable[[Any], Any]) -> str:
    """An inline picture; "" without matplotlib.

    Args:
        draw: is given axes to draw on. pyplot and its state are not touched.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    # Paths instead of text look the same everywhere; the same picture has the same ids, so that stored ones compare.
    with matplotlib.rc_context({"svg.hashsalt": "autoac", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    # A tenth of a point is all that one sees; six digits would be most of a stored notebook.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\d\.\d)\d+", r"\1", path[0]), text)
    return text[text.index("<svg") :]


def _heading(name: str) -> str:
    for ending, unit in (("_bytes", "MB"), ("_s", "ms")):
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')}, {unit}"
    if name == "bytes":
        return "MB"
    return f"{name.replace('_', ' ')}, %" if _is_share(name) else name.replace("_", " ")


def _column(name: str, values: pd.Series) -> list[str]:
    scale, digits = 1.0, 0
    if name == "bytes" or name.endswith("_bytes"):
        scale, digits = 1e-6, 2
    elif name.endswith("_s"):
        scale, digits = 1e3, 3
    elif _is_share(name):
        scale, digits = 100.0, 2
    else:
        return [str(value) for value in values]
    return ["-" if value != value else f"{value * scale:.{digits}f}" for value in values.astype(float)]


def _is_share(name: str) -> bool:
    return name in ("overhead", "bound") or name.endswith("_overhead")
