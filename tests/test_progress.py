"""What long work shows: bars, log lines, or nothing."""

from __future__ import annotations

import io
import logging
import sys
import types
from typing import Any

import pytest
from rich.console import Console

import autoac
from autoac import progress
from autoac.progress import OFF, Terminal, drawn, part, progress_shown
from tests.small_models import batch, make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is changed."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Bar:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def draw(self, text: str, share: float) -> None:
        self.said.append((text, share))

    def close(self) -> None:
        self.said.append("closed")


def test_short_work_shows_nothing_and_long_work_not_more_than_one_sees(clock: list[float]) -> None:
    bars: list[Bar] = []

    def make_bar() -> Bar:
        bars.append(Bar())
        return bars[-1]

    with drawn(make_bar) as tell:
        tell("begun", 0.0)
        clock[0] = 0.4
        tell("soon", 0.1)
    assert bars == []
    clock[0] = 0.0
    with drawn(make_bar) as tell:
        for eighth in range(12):
            clock[0] = eighth / 8
            tell("work", eighth / 12)
    [bar] = bars
    assert [round(12 * share) for _, share in bar.said[:-1]] == [4, 6, 8, 10]
    assert bar.said[-1] == "closed"


def test_a_bar_on_a_terminal() -> None:
    file = io.StringIO()
    bar = Terminal("planning", Console(file=file, force_terminal=True, width=120, markup=False))
    bar.draw("solving [bold] with 3 regions", 0.5)
    bar.close()
    assert "planning" in file.getvalue()
    assert "solving [bold] with 3 regions" in file.getvalue()


def test_a_log_has_a_line_for_each_thing_begun(
    clock: list[float], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OFF)
    with caplog.at_level(logging.INFO, logger="autoac"), progress_shown("planning", None) as tell:
        for second, (text, share) in enumerate([("a", 0.0), ("a", 0.1), ("b", 0.5), *[("b", 0.9)] * 12]):
            clock[0] = second
            tell(text, share)
    assert [record.message for record in caplog.records] == [
        "planning: a (0%)",
        "planning: b (50%)",
        "planning: b (90%)",
    ]
    assert {record.name for record in caplog.records} == {"autoac"}


def test_a_notebook_shows_a_bar_and_leaves_nothing(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    IPython = pytest.importorskip("IPython")
    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda html: shown.append(html.data))
    monkeypatch.setattr("IPython.display.display", lambda html, display_id: handle)
    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=1))
    monkeypatch.delenv(OFF)
    with progress_shown("planning", None) as tell:
        clock[0] = 1.0
        tell("<b>", 0.25)
    assert shown == ['<progress max="1" value="0.250"></progress> planning: &lt;b&gt;', ""]


def test_it_can_be_off(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level(logging.INFO, logger="autoac"):
        monkeypatch.setenv(OFF, "0")
        with progress_shown("planning", None) as tell:
            tell("a", 0.0)
        monkeypatch.delenv(OFF)
        with progress_shown("planning", False) as tell:
            tell("a", 0.0)
    assert caplog.records == []
    assert not sys.stderr.isatty()


def test_a_part_of_the_work() -> None:
    said: list[tuple[str, float]] = []
    tell = part(lambda *what: said.append(what), 0.5, 0.7)
    for share in (-1.0, 0.0, 0.5, 2.0):
        tell("x", share)
    assert [share for _, share in said] == [0.5, 0.5, pytest.approx(0.6), 0.7]


def test_a_plan_tells_a_share_that_only_grows(one_thread: None) -> None:
    said: list[tuple[str, float]] = []
    autoac.plan(make(), batch(), "1GB", progress=lambda *what: said.append(what))
    shares = [share for _, share in said]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    texts = " ".join(dict.fromkeys(text for text, _ in said))
    for text in ("warm-up step", "timed step", "recorded step", "engine costs", "regions"):
        assert text in texts
