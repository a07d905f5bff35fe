"""Renders the page: text by Python, data as JSON, style and script inlined from `assets`.

Everything that comes from a model (above all module names) is treated as text: Jinja2 escapes it in the markup, and in
the JSON no sequence of characters can close the script element. The page's content security policy allows only the
inlined style and script, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autoac_solver.plan.curve import Tradeoff
from autoac_solver.plan.planning import plan_budgets
from autoac_solver.records.arguments import Tell
from autoac_solver.records.disk.files import check_writable, write_text
from autoac_solver.records.format import format_bytes, format_seconds
from autoac_solver.records.plan import PlanRecord
from autoac_solver.show.explanation import explain
from autoac_solver.show.page.content import page_content
from autoac_solver.show.refusals import modules_that_are_refused
from autoac_solver.show.summary import about_times, needless, notes, share_of_step

POINTS = 20
"""Number of budgets on the curve, if no curve is given."""

_MODES = {"real": "run and recorded", "fake": "recorded from shapes alone, without running it"}
_TIMES = {"table": "from a device's cost table", "interpolated": "interpolated in a cost table"}

SCRIPTS = (
    "dom",
    "format",
    "data",
    "scale",
    "curve",
    "timeline",
    "readout",
    "regions",
    "table",
    "use",
    "main",
)
"""The script's files in the order of concatenation."""


def write_report(
    record: PlanRecord,
    path: str | Path,
    *,
    curve: Tradeoff | None = None,
    points: int = POINTS,
    progress: Tell | None = None,
) -> None:
    """Write a plan as a page: one self-contained HTML file that needs no network.

    The write is atomic.

    Args:
        record: the plan to show.
        path: the file to write; an existing one is replaced.
        curve: plans for other budgets, made from the same profile; None makes them, which takes a while.
        points: number of budgets to plan for if no curve is given; 0 shows the plan alone.
        progress: called with a text and the share done.

    Raises:
        ValueError: the curve was made from another profile or for another engine.
        ProfileError: a plan's programs do not belong to its profile.
        FileNotFoundError, IsADirectoryError: no file can be written at this path; raised before the page is made.
    """
    check_writable(path)
    write_text(path, render_report(record, curve=curve, points=points, progress=progress))


def render_report(
    record: PlanRecord,
    *,
    curve: Tradeoff | None = None,
    points: int = POINTS,
    progress: Tell | None = None,
) -> str:
    """The HTML that `write_report` writes."""
    from_the_least = curve is None and points > 0
    if from_the_least:
        policies = tuple(applied.policy for applied in record.policies)
        curve = plan_budgets(
            record.profile, points=points, engine=record.engine, policies=policies, progress=progress
        )
    plans = _with_chosen(record, () if curve is None else curve.plans)
    content = page_content(plans, next(i for i, plan in enumerate(plans) if plan is record))
    content |= {"from_the_least": from_the_least, **_others(curve)}
    style, script = _asset("style.css"), _script()
    return _TEMPLATES.get_template("page.html").render(
        policy=Markup(_policy(style, script)),
        title=f"{record.model}: plan for {format_bytes(record.budget_bytes)}",
        style=Markup(style),
        model=record.model,
        times=about_times(record.profile),
        made_for=f"{_device(record)}, engine {record.engine}, torch {record.torch_version}",
        sample=record.profile.sample,
        figures=_figures(record),
        stops=len(plans) - 1,
        chosen=content["chosen"],
        curve_rows=_curve_rows(plans, record),
        by_hand_rows=_by_hand_rows(content["by_hand"]),
        explanation=explain(record),
        refused=modules_that_are_refused(record),
        made_with=_made_with(record),
        data=Markup(embedded_json(content)),
        script=Markup(script),
    )


def embedded_json(data: Any) -> str:
    """JSON that is safe inside a script element: nothing in it closes the element or ends a line of script."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _writable(value: Any) -> Any:
    """Text that is valid UTF-8: a lone surrogate becomes a question mark."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return value.encode("utf-8", "replace").decode("utf-8")
    return value


_TEMPLATES = Environment(
    loader=PackageLoader("autoac_solver.show.page", "assets"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_writable,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _with_chosen(record: PlanRecord, others: Sequence[Any]) -> list[PlanRecord]:
    """The curve's plans (records, or objects with a `record`) and the chosen plan, sorted by budget."""
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
    """The curve's other data, if any: manual strategies, greedy plans, the knee's budget."""
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
    return (resources.files("autoac_solver.show.page") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    files = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{files}}})();'


def _policy(style: str, script: str) -> str:
    """The content security policy: nothing may be loaded, sent or run except inlined style and script."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


class _Figure(NamedTuple):
    """A headline number of the page: name, value, value in another unit, and a note."""

    name: str
    value: str
    other: str
    note: str


def _figures(record: PlanRecord) -> list[_Figure]:
    step_s, extra_s = record.predicted_step_s, record.predicted_extra_s
    headroom = f", {format_bytes(record.headroom_bytes)} of it headroom" if record.headroom_bytes else ""
    needed = "; no checkpointing is needed" if needless(record) else ""
    of = " of reserved memory" if record.budget_of == "reserved" else ""
    share = record.predicted_peak_bytes / max(1, record.unplanned_peak_bytes)
    unplanned = _two_ways(record.unplanned_peak_bytes)[0]
    return [
        _Figure(
            "Budget",
            *_two_ways(record.budget_bytes),
            f"{record.budget_bytes:,} bytes{of}{headroom}{needed}",
        ),
        _Figure(
            "Predicted peak",
            *_two_ways(record.predicted_peak_bytes),
            f"{share:.0%} of the {unplanned} that it takes with nothing recomputed",
        ),
        *_reserved_figure(record),
        _Figure(
            "Extra time",
            f"{share_of_step(extra_s, record):.1%}",
            about_times(record.profile),
            f"{format_seconds(extra_s)} on top of a step of {format_seconds(step_s)}",
        ),
        _Figure("Proved", record.status, "", _proof(record)),
    ]


def _reserved_figure(record: PlanRecord) -> list[_Figure]:
    """Memory reserved by CUDA's caching allocator, if predicted."""
    size = record.predicted_reserved_bytes
    if size is None:
        return []
    note = f"{size:,} bytes: CUDA's caching allocator, simulated"
    return [
        _Figure(
            "Predicted reserved",
            *_two_ways(size),
            note + (f" with {record.allocator}" if record.allocator else ""),
        )
    ]


def _proof(record: PlanRecord) -> str:
    more = f" by more than {record.gap:.2%} of the step" if record.gap >= 0.00005 else ""
    return f"no plan within the budget is faster{more}"


def _two_ways(n_bytes: int) -> tuple[str, str]:
    """Bytes in powers of 1000, and in powers of 1024 ("" if the same)."""
    decimal, _, binary = format_bytes(n_bytes).partition(" = ")
    return decimal, binary


def _curve_rows(plans: Sequence[PlanRecord], record: PlanRecord) -> list[tuple[str, ...]]:
    return [
        (
            f"{format_bytes(plan.budget_bytes)}{' (this plan)' if plan is record else ''}",
            format_bytes(plan.predicted_peak_bytes),
            f"{share_of_step(plan.predicted_extra_s, plan):.2%}",
            f"{share_of_step(plan.bound_s, plan):.2%}",
            plan.status,
            f"{sum(region.wrapped for region in plan.regions)} of {len(plan.regions)}",
        )
        for plan in plans
    ]


def _by_hand_rows(by_hand: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [(row["name"], format_bytes(int(row["peak_bytes"])), f"{row['overhead']:.2%}") for row in by_hand]


def _made_with(record: PlanRecord) -> list[tuple[str, str]]:
    profile, now = record.profile, datetime.now(UTC)
    times = Counter(op.time_from for op in profile.tape)
    memory = f", {format_bytes(profile.device_bytes)} of memory" if profile.device_bytes else ""
    return [
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
        *(("Note", note) for note in notes(record)),
    ]


def _device(record: PlanRecord) -> str:
    """The device's name if known, and its type."""
    name = record.profile.device_name
    return f"{name} ({record.device})" if name else record.device


def _autoac_version() -> str:
    try:
        return metadata.version("autoac")
    except metadata.PackageNotFoundError:
        return "not installed as a package"
