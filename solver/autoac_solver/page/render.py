"""Puts the page together: the words by Python, the data as JSON, style and script inlined from `assets`.

Whatever comes from a model (module names above all) is text in here: escaped in the markup, and in the JSON, which no
sequence of characters can end early. The page's policy lets nothing run or load but the inlined style and script, by
their hash.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import pandas as pd

from autoac_solver.curve import Tradeoff
from autoac_solver.explanation import explain
from autoac_solver.files import check_writable, write_text
from autoac_solver.format import format_bytes, format_seconds
from autoac_solver.page.content import page_content
from autoac_solver.plan_record import PlanRecord
from autoac_solver.planning import plan_budgets

POINTS = 20
"""Budgets on the curve, if none is given."""

_MODES = {"real": "run and recorded", "fake": "recorded from shapes alone, without running it"}
_TIMES = {"table": "from a device's cost table", "interpolated": "interpolated in a cost table"}

SCRIPTS = ("dom", "format", "data", "scale", "curve", "timeline", "readout", "regions", "table", "main")
"""The script's files in the order in which they are joined."""


def write_report(
    record: PlanRecord,
    path: str | Path,
    *,
    curve: Tradeoff | None = None,
    points: int = POINTS,
    progress: Callable[[str, float], None] | None = None,
) -> None:
    """Write a plan as a page: one HTML file that needs nothing else and no network.

    The file appears whole or not at all.

    Args:
        record: what the page is about.
        path: of the file; one that is there is replaced.
        curve: plans for other budgets, made from the same profile; None makes them, which takes a while.
        points: how many budgets to make plans for if there is no curve; 0 shows the plan alone.
        progress: called with a text and the share done.

    Raises:
        ValueError: the curve was made from another profile or for another engine.
        ProfileError: a plan's tables do not belong to its profile.
        FileNotFoundError, IsADirectoryError: no file can be at this path; before the page is made.
    """
    check_writable(path)
    write_text(path, render_report(record, curve=curve, points=points, progress=progress))


def render_report(
    record: PlanRecord,
    *,
    curve: Tradeoff | None = None,
    points: int = POINTS,
    progress: Callable[[str, float], None] | None = None,
) -> str:
    """The page that `write_report` writes, as text."""
    from_the_least = curve is None and points > 0
    if from_the_least:
        policies = tuple(applied.policy for applied in record.policies)
        curve = plan_budgets(
            record.profile, points=points, engine=record.engine, policies=policies, progress=progress
        )
    plans = _with_chosen(record, curve.plans if curve else ())
    content = page_content(plans, next(i for i, plan in enumerate(plans) if plan is record))
    content |= {"from_the_least": from_the_least, **_others(curve)}
    style, script = _asset("style.css"), _script()
    parts = {
        "policy": _policy(style, script),
        "title": _text(f"{record.model}: plan for {format_bytes(record.budget_bytes)}"),
        "style": style,
        "model": _text(record.model),
        "made_for": _text(f"{_device(record)}, engine {record.engine}, torch {record.torch_version}"),
        "figures": _figures(record),
        "stops": str(len(plans) - 1),
        "chosen": str(content["chosen"]),
        "curve_rows": _curve_rows(plans, record),
        "other_rows": _other_rows(content["by_hand"]),
        "explanation": _text(explain(record)),
        "made_with": _made_with(record),
        "data": embedded_json(content),
        "script": script,
    }
    # in one pass, so that nothing in a part is taken for a placeholder
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def embedded_json(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element or a line of script."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _text(text: str) -> str:
    """Text for the markup; half a surrogate pair, which no file can hold, becomes a question mark."""
    return html.escape(text).encode("utf-8", "replace").decode("utf-8")


def _with_chosen(record: PlanRecord, others: Sequence[Any]) -> list[PlanRecord]:
    """The curve's plans, which are records or have one, and the chosen one, by budget."""
    plans = [getattr(plan, "record", plan) for plan in others]
    for plan in plans:
        if plan.engine != record.engine:
            raise ValueError(
                f"the plan is for engine {record.engine!r}, the curve for {plan.engine!r}: make the curve with "
                f"engine={record.engine!r}, or leave it out."
            )
        if plan.profile is not record.profile and plan.profile != record.profile:
            raise ValueError(
                "the curve was made from another profile than the plan: make it from plan.profile, or leave it out."
            )
    plans = [plan for plan in plans if plan.budget_bytes != record.budget_bytes]
    return sorted([*plans, record], key=lambda plan: plan.budget_bytes)


def _others(curve: Tradeoff | None) -> dict[str, Any]:
    """What the curve knows besides its plans, if it does: checkpointing by hand, greedy choices, the knee's budget."""
    by_hand, greedy = getattr(curve, "baselines", None), getattr(curve, "frame", pd.DataFrame())
    knee = getattr(curve, "knee", None)
    if "greedy_overhead" in greedy:
        greedy = greedy[["budget_bytes", "greedy_overhead"]].dropna()
    else:
        greedy = pd.DataFrame({"budget_bytes": [], "greedy_overhead": []})
    return {
        "by_hand": [] if by_hand is None else by_hand[["name", "peak_bytes", "overhead"]].to_dict("records"),
        "greedy": greedy.to_numpy().tolist(),
        "knee_bytes": None if curve is None or knee is None else int(curve.frame["budget_bytes"].iloc[knee]),
    }


def _asset(name: str) -> str:
    return (resources.files("autoac_solver.page") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    files = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{files}}})();'


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded, sent or run but what is inlined."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _figures(record: PlanRecord) -> str:
    """The numbers that the page opens with."""
    step_s, extra_s = record.predicted_step_s, record.predicted_extra_s
    overhead = extra_s / step_s if step_s else 0.0
    headroom = f", {format_bytes(record.headroom_bytes)} of it headroom" if record.headroom_bytes else ""
    share = record.predicted_peak_bytes / max(1, record.unplanned_peak_bytes)
    figures = [
        ("Budget", *_two_ways(record.budget_bytes), f"{record.budget_bytes:,} bytes{headroom}"),
        (
            "Predicted peak",
            *_two_ways(record.predicted_peak_bytes),
            f"{share:.0%} of the {_two_ways(record.unplanned_peak_bytes)[0]} that it takes with nothing recomputed",
        ),
        (
            "Extra time",
            f"{overhead:.1%}",
            "",
            f"{format_seconds(extra_s)} on top of a step of {format_seconds(step_s)}",
        ),
        ("Proved", record.status, "", _proof(record)),
    ]
    return "\n".join(
        f"<div><dt>{name}</dt><dd><strong>{_text(value)}</strong>"
        + (f" <span>{_text(other)}</span>" if other else "")
        + f"<small>{_text(note)}</small></dd></div>"
        for name, value, other, note in figures
    )


def _proof(record: PlanRecord) -> str:
    more = f" by more than {record.gap:.2%} of the step" if record.gap >= 0.00005 else ""
    return f"no plan within the budget is faster{more}"


def _two_ways(n_bytes: int) -> tuple[str, str]:
    """In powers of 1000, and in powers of 1024 where that is another number."""
    decimal, _, binary = format_bytes(n_bytes).partition(" = ")
    return decimal, binary


def _curve_rows(plans: Sequence[PlanRecord], record: PlanRecord) -> str:
    rows = []
    for plan in plans:
        step_s = plan.predicted_step_s or 1.0
        cells = (
            f"{format_bytes(plan.budget_bytes)}{' (this plan)' if plan is record else ''}",
            format_bytes(plan.predicted_peak_bytes),
            f"{plan.predicted_extra_s / step_s:.2%}",
            f"{plan.bound_s / step_s:.2%}",
            plan.status,
            f"{sum(region.wrapped for region in plan.regions)} of {len(plan.regions)}",
        )
        head, *rest = (_text(cell) for cell in cells)
        rows.append(f'<tr><th scope="row">{head}</th>' + "".join(f"<td>{c}</td>" for c in rest) + "</tr>")
    return "\n".join(rows)


def _other_rows(by_hand: Sequence[dict[str, Any]]) -> str:
    rows = []
    for row in by_hand:
        head = f'<th scope="row">by hand: {_text(row["name"])}</th>'
        peak, overhead = format_bytes(int(row["peak_bytes"])), f"{row['overhead']:.2%}"
        rows.append(f"<tr>{head}<td>{peak}</td><td>{overhead}</td><td></td><td></td><td></td></tr>")
    return "\n".join(rows)


def _made_with(record: PlanRecord) -> str:
    profile, now = record.profile, datetime.now(UTC)
    times = Counter(op.time_from for op in profile.tape)
    memory = f", {format_bytes(profile.device_bytes)} of memory" if profile.device_bytes else ""
    rows = [
        ("Model", record.model),
        ("Model's fingerprint", record.model_fingerprint),
        ("Ops' fingerprint", record.op_fingerprint),
        ("Step", f"{_MODES.get(profile.mode, profile.mode)}; {len(profile.tape):,} ops"),
        ("Times of ops", ", ".join(f"{n:,} {_TIMES.get(how, how)}" for how, n in times.most_common())),
        ("Device", f"{_device(record)}{memory}"),
        ("torch", record.torch_version),
        ("autoac", _autoac_version()),
        ("Engine", f"{record.engine} ({record.engine_reason})"),
        ("Solver", f"{record.solver}, {format_seconds(record.solve_s)}"),
        ("Page written", f"{now:%Y-%m-%d %H:%M} UTC"),
        *(("Note", note) for note in profile.notes),
    ]
    return "\n".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in rows)


def _device(record: PlanRecord) -> str:
    """Its name where that is known, and its type."""
    name = record.profile.device_name
    return f"{name} ({record.device})" if name else record.device


def _autoac_version() -> str:
    try:
        return metadata.version("autoac")
    except metadata.PackageNotFoundError:
        return "not installed as a package"
