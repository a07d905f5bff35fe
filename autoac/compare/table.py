"""A comparison as a table for the terminal, and as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from autoac.check.verify import COMPILED_TOLERANCE
from autoac.compare.results import ModelResult, Row
from autoac_solver.records.engines import compiles


def render(result: ModelResult, conditions: Mapping[str, str], blocks: Sequence[str]) -> Group:
    """Each strategy with our plan at the same peak beside it, then our plans at the user's budgets."""
    table = Table(title=result.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy")
    for heading in ("peak", "step", "extra", "gradients", "ours: peak", "extra", "predicted", "gradients"):
        table.add_column(heading, justify="right")
    others = [row for row in result.rows if row.kind != "ours" and not row.error]
    shown: set[str] = set()
    for row in others:
        beside = result.ours_at(row.peak_bytes) if row.kind == "other" else None
        shown |= {beside.name} if beside else set()
        table.add_row(row.name, *_measured(result, row), *_ours(result, beside))
    for row in result.ours:
        if row.name not in shown and not row.error:
            table.add_row(row.name, "", "", "", "", *_ours(result, row))
    return Group(table, *_notes(result, conditions, blocks))


def document(result: ModelResult, conditions: Mapping[str, str], blocks: Sequence[str]) -> dict[str, Any]:
    """All results as plain data, with figures derived from the samples."""
    return {
        "model": result.name,
        "title": result.title,
        "engine": result.engine,
        "blocks": list(blocks),
        "conditions": dict(conditions),
        "resident_bytes": result.resident_bytes,
        "noise": result.noise if _timed(result) else None,
        "strategies": [
            asdict(row)
            | {
                "step_s": None if row.error else row.step_s,
                "overhead": None if row.error else result.overhead(row),
            }
            for row in result.rows
        ],
    }


def _timed(result: ModelResult) -> list[Row]:
    return [row for row in result.rows if not row.error]


def _measured(result: ModelResult, row: Row) -> list[str]:
    extra = "" if row in result.base else f"{result.overhead(row):+.1%}"
    return [_mb(row.peak_bytes), f"{row.step_s * 1e3:.1f} ms", extra, _equal(row)]


def _ours(result: ModelResult, row: Row | None) -> list[str]:
    if row is None or row.error:
        return ["", "", "", ""]
    over = " OVER BUDGET" if row.peak_bytes > row.budget_bytes else ""
    predicted = f"{row.predicted_overhead or 0:+.1%}"
    return [_mb(row.peak_bytes) + over, f"{result.overhead(row):+.1%}", predicted, _equal(row)]


def _equal(row: Row) -> str:
    if not row.gradients_equal:
        return "DIFFER"
    return "equal" if row.buffers_equal else "equal, buffers differ"


def _notes(result: ModelResult, conditions: Mapping[str, str], blocks: Sequence[str]) -> list[str]:
    lines = [f"{row.name}: {row.error}" for row in result.rows if row.error]
    if _timed(result):
        base = result.base[0].name
        lines.append(
            f"extra: step time over that of {base!r}, median of the rounds. Two equal strategies differ by up to "
            f"{result.noise:.1%} in 95 of 100 cases: smaller differences mean nothing."
        )
        lines += filter(None, [result.about_taken_again])
    if compiles(result.engine):
        lines.append(
            f"gradients of compiled code: equal within {COMPILED_TOLERANCE:g} to those of torch.compile at budget 1."
        )
    if blocks:
        lines.append(f"blocks: {blocks[0]} ... {blocks[-1]} ({len(blocks)})")
    lines.append("; ".join(f"{name} {value}" for name, value in conditions.items()))
    return lines


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"
