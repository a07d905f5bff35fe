"""Pieces of HTML that show well in a notebook: tables and inline pictures.

Jinja2 puts them together and escapes whatever comes from a model; `Markup` is what is HTML already.
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
    """A record as HTML.

    Args:
        title: a line.
        parts: tables and pictures as they are; of text a paragraph, of several texts one with a line for each.
    """
    return _SHOWN.render(title=title, parts=parts)


def table(frame: pd.DataFrame, most_rows: int = MOST_ROWS) -> Markup:
    """A table of a frame, bytes as MB, seconds as ms and shares as per cent; names and texts escaped.

    The unit of a column is told by its name: `*_bytes` or `bytes`, `*_s`, `overhead`, `bound` or `*_overhead`.
    """
    shown = frame.head(most_rows)
    text = pd.DataFrame({_heading(str(name)): _column(str(name), shown[name]) for name in shown.columns})
    more = f"<p>and {len(frame) - most_rows} more rows</p>" if len(frame) > most_rows else ""
    return Markup(text.to_html(index=False, border=0, justify="right", escape=True) + more)


def svg(draw: Callable[[Any], Any]) -> Markup:
    """An inline picture on no ground, with lines and words in the colour of the text around it, light or dark.

    Without matplotlib it is a hint.

    Args:
        draw: is given axes to draw on. pyplot and its state are not touched.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return Markup("<p>Pictures take matplotlib: <code>pip install 'autoac[plot]'</code>.</p>")
    # Paths instead of text look the same everywhere; the same picture has the same ids, so that stored ones compare.
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
    # A tenth of a point is all that one sees; six digits would be most of a stored notebook.
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
