"""HTML fragments for notebooks: tables and inline plots.

Jinja2 renders them and escapes all text that comes from a model; `Markup` marks text that is HTML already.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from autoac_solver.draw.pictures import INK

MOST_ROWS = 30

ENVIRONMENT = Environment(autoescape=True, undefined=StrictUndefined)

_SHOWN = ENVIRONMENT.from_string(
    """<p><b>{{ title }}</b></p>
{%- for part in parts if part %}
{%- if part is escaped %}{{ part }}
{%- elif part is string %}<p>{{ part }}</p>
{%- else %}<p>{% for line in part %}{{ line }}{% if not loop.last %}<br>{% endif %}{% endfor %}</p>
{%- endif %}
{%- endfor %}"""
)


def shown(title: str, *parts: str | Sequence[str]) -> str:
    """Render a title and parts as HTML.

    Args:
        title: one line.
        parts: `Markup` is inserted as it is; a string becomes a paragraph, several strings one paragraph of lines.
    """
    return _SHOWN.render(title=title, parts=parts)


def table(frame: pd.DataFrame, most_rows: int = MOST_ROWS) -> Markup:
    """A data frame as an HTML table, with bytes in MB, seconds in ms and shares in per cent; names and texts escaped.

    A column's name determines its unit: `*_bytes` or `bytes`, `*_s`, `overhead`, `bound` or `*_overhead`.
    """
    shown = frame.head(most_rows)
    text = pd.DataFrame({_heading(str(name)): _column(str(name), shown[name]) for name in shown.columns})
    more = f"<p>and {len(frame) - most_rows} more rows</p>" if len(frame) > most_rows else ""
    return Markup(text.to_html(index=False, border=0, justify="right", escape=True) + more)


def svg(draw: Callable[[Any], Any]) -> Markup:
    """An inline SVG plot with a transparent background, in the colour of the surrounding text.

    Without matplotlib it is a hint to install it.

    Args:
        draw: called with the axes to draw on. pyplot and its state are not touched.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return Markup("<p>Pictures take matplotlib: <code>pip install 'autoac[plot]'</code>.</p>")
    # Text as paths looks the same everywhere. A fixed hash salt makes equal plots byte-identical.
    ink = dict.fromkeys(_INKED, INK)
    with matplotlib.rc_context(
        {"svg.hashsalt": "autoac", "svg.fonttype": "path", "legend.framealpha": 0, **ink}
    ):
        figure = Figure(figsize=(7, 3.6), layout="constrained", facecolor="none")
        axes = figure.subplots()
        axes.set_facecolor("none")
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    # A tenth of a point is the visible precision; six digits would dominate the size of a stored notebook.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\d\.\d)\d+", r"\1", path[0]), text)
    return Markup(text[text.index("<svg") :].replace(INK, "currentColor"))


_INKED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")


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
