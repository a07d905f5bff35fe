"""HTML fragments for notebooks: units, escaping, and pictures that are the same each time."""

import builtins
from typing import Any

import pandas as pd
import pytest
from markupsafe import Markup

from autoac_solver.draw import html, pictures


def test_a_columns_name_tells_its_unit() -> None:
    frame = pd.DataFrame(
        {"op": ["aten.mm"], "peak_bytes": [2_500_000], "time_s": [0.0125], "greedy_overhead": [0.0375]}
    )
    text = html.table(frame)
    for heading in ("op", "peak, MB", "time, ms", "greedy overhead, %"):
        assert f"<th>{heading}</th>" in text
    for value in ("aten.mm", "2.50", "12.500", "3.75"):
        assert f"<td>{value}</td>" in text


def test_what_is_unknown_is_a_dash_and_long_tables_say_how_many_rows_they_leave_out() -> None:
    text = html.table(pd.DataFrame({"bytes": [float("nan"), 1e6, 2e6]}), most_rows=2)
    assert text.count("<td>") == 2
    assert "<td>-</td>" in text
    assert text.endswith("<p>and 1 more rows</p>")


def test_texts_are_escaped_and_markup_is_not() -> None:
    text = html.shown("<b>", "<i>", ["a<", "b"], Markup("<hr>"), "")
    assert text.split("\n")[0].startswith("<p><b>&lt;b&gt;</b></p>")
    assert "<p>&lt;i&gt;</p>" in text
    assert "<p>a&lt;<br>b</p>" in text
    assert text.endswith("<hr>")
    assert "&lt;" in html.table(pd.DataFrame({"<op>": ["<img>"]}))


def test_a_picture_is_the_same_each_time_in_the_texts_colour() -> None:
    frame = pd.DataFrame({"module": ["$a", ""], "bytes": [3e6, 1e6]})
    first, second = (html.svg(lambda axes: pictures.draw_bars(axes, frame, "held")) for _ in range(2))
    assert first == second
    assert first.startswith("<svg")
    assert "currentColor" in first
    assert pictures.INK not in first


def test_without_matplotlib_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install 'autoac[plot]'" in html.svg(lambda axes: None)
    with pytest.raises(ImportError, match=r"pip install autoac\[plot\]"):
        pictures.new_axes()
