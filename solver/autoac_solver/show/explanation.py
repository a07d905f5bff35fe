"""Explanation of a plan: its peak and the peak's holders, its decisions and their cost, the benefit of more memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pandas as pd

from autoac_solver.build.built import Built
from autoac_solver.draw.html import shown, table
from autoac_solver.optimise.ilp import solve
from autoac_solver.plan.recorded.step import PlannedStep, step_of
from autoac_solver.records.errors import NoPlanInTimeError
from autoac_solver.records.format import format_bytes, format_seconds
from autoac_solver.records.names import holder_in_words
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import Profile
from autoac_solver.show.summary import share_of_step, summary_lines

_MOST_LINES = 8
_TIME_LIMIT_S = 10.0
"""Time limit of the search for a larger budget; it starts from this plan, so this suffices for large models."""


_WORTH_NAMING = 1e-3
"""Share of the step; smaller gains would print as "3.1% instead of 3.1%", and are within the solver's gap."""


@dataclass(frozen=True)
class Explanation:
    """The explanation of a plan as tables; `str` gives all of it as text.

    Args:
        summary: the plan in a few lines.
        peak: op, phase and module of the predicted peak.
        peak_by_kind: live memory at the peak: kind, bytes, share of the peak.
        peak_by_module: the same by kind and module: kind, module, modules, bytes. Modules whose names differ only in
            numbers share a row ("layers.*.mlp"); `modules` is their number.
        values: the values by decision, op and module class: decision, op, module_class, values, bytes, time_s,
            ms_per_MB. `time_s` is the time that recomputing them adds to the step, or would add; `ms_per_MB` is that
            time per MB.
        costs: the cost of the budget, as lines of text.
        more_memory: the benefit of a larger budget, as text.
    """

    summary: tuple[str, ...]
    peak: str
    peak_by_kind: pd.DataFrame = field(repr=False)
    peak_by_module: pd.DataFrame = field(repr=False)
    values: pd.DataFrame = field(repr=False)
    costs: tuple[str, ...]
    more_memory: str

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.summary,
                "",
                self.peak,
                *_lines(self.peak_by_kind, ["kind", "bytes", "share"]),
                "Largest there, by module:",
                *_lines(self.peak_by_module, ["kind", "module", "modules", "bytes"]),
                "",
                "Values, by what is done with them; the price is the time to recompute them for each of their MB:",
                *(line for part in _by_decision(self.values) for line in part),
                "",
                *self.costs,
                self.more_memory,
            ]
        )

    def _repr_html_(self) -> str:
        title, *lines = (line.strip() for line in self.summary)
        return shown(
            title,
            lines,
            self.peak,
            table(self.peak_by_kind),
            table(self.peak_by_module, 12),
            table(self.values),
            [*self.costs, self.more_memory],
        )


def explain(record: PlanRecord) -> str:
    """The explanation of a plan as text."""
    return str(explanation(record))


def explanation(record: PlanRecord) -> Explanation:
    """Explain a plan. Runs the solver once, for a slightly larger budget."""
    step = step_of(record)
    return Explanation(
        summary=summary_lines(record, step),
        peak=f"The peak lies at {step.peak_where}. {format_bytes(step.peak_fixed_bytes)} of it are there whatever "
        "is recomputed. Alive there:",
        peak_by_kind=_by_kind(record, step),
        peak_by_module=_by_module(step),
        values=_values(record, step),
        costs=_costs(record, step),
        more_memory=_more_memory(record, step),
    )


# -- the peak ------------------------------------------------------------------------------------------------------


def _by_kind(record: PlanRecord, step: PlannedStep) -> pd.DataFrame:
    held: dict[str, int] = {}
    for kind, _, size in step.peak_holders:
        held[kind] = held.get(kind, 0) + size
    rows = sorted(held.items(), key=lambda row: (-row[1], row[0]))
    frame = pd.DataFrame(rows, columns=["kind", "bytes"])
    frame["share"] = [f"{size / record.predicted_peak_bytes:.1%}" for _, size in rows]
    return frame


def _by_module(step: PlannedStep) -> pd.DataFrame:
    held: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, module, size in step.peak_holders:
        key = kind, re.sub(r"(?<![^.#])\d+(?![^.#])", "*", module)  # indices, not "norm1"
        modules, total = held.get(key, (0, 0))
        held[key] = modules + 1, total + size
    rows = [
        (kind, holder_in_words(kind, module), count, size) for (kind, module), (count, size) in held.items()
    ]
    rows.sort(key=lambda row: (-row[3], row[0], row[1]))
    return pd.DataFrame(rows, columns=["kind", "module", "modules", "bytes"])


# -- the values ----------------------------------------------------------------------------------------------------


def _values(record: PlanRecord, step: PlannedStep) -> pd.DataFrame:
    frame = step.decisions.copy()
    class_of = _module_classes(record.profile, step.built)
    region_class = {record.profile.module_name(i): c.class_name for i, c in enumerate(record.profile.spans)}
    frame["module_class"] = [
        class_of[storage] if storage in class_of else region_class.get(region, "")
        for storage, region in zip(frame["storage"], frame["region"], strict=True)
    ]
    # A group's time is split over its values in proportion to their bytes.
    in_group = frame.groupby("group")["bytes"]
    size, count = in_group.transform("sum"), in_group.transform("size")
    part = (frame["bytes"] / size.where(size > 0)).fillna(1 / count)
    frame["time_s"] = frame["time_s"] * part
    groups = frame.groupby(["decision", "op", "module_class"], sort=True)
    found = groups.agg(
        values=("bytes", "size"), bytes=("bytes", "sum"), time_s=("time_s", "sum")
    ).reset_index()
    found["ms_per_MB"] = 1e3 * found["time_s"] / (found["bytes"] / 1e6).where(found["bytes"] > 0)
    order = {"save": 0, "compiled": 1, "recompute": 2, "skip": 3}
    found["_order"] = [order[decision] for decision in found["decision"]]
    found = found.sort_values(["_order", "bytes", "op"], ascending=[True, False, True], kind="stable")
    return found.drop(columns="_order").reset_index(drop=True)


def _module_classes(profile: Profile, built: Built) -> dict[int, str]:
    """Storage of a decision group -> class of the module that makes it."""
    found = {storage: "" for storages in built.group_storages for storage in storages}
    for op in profile.tape:
        for storage in op.creates:
            if storage in found and op.module >= 0:
                found[storage] = profile.calls[op.module].class_name
    return found


# -- the price -----------------------------------------------------------------------------------------------------


def _costs(record: PlanRecord, step: PlannedStep) -> tuple[str, ...]:
    saved = record.unplanned_peak_bytes - record.predicted_peak_bytes
    if not record.predicted_extra_s:
        return ("The budget costs nothing: nothing has to be recomputed.",)
    if step.lanes is not None:
        return (
            f"The budget costs {format_seconds(record.predicted_extra_s)} a step and saves {format_bytes(saved)} of "
            f"the peak: {_per_amount(record.predicted_extra_s, saved)}.",
            "Prices of values are what they add to the end of the step: what the host does while the device is behind "
            "adds nothing.",
        )
    if step.built.points:
        return (
            f"The budget costs {format_seconds(record.predicted_extra_s)} a step, compared with all regions compiled "
            f"at their fastest points, and saves {format_bytes(saved)} of the peak: "
            f"{_per_amount(record.predicted_extra_s, saved)}.",
        )
    again = step.decisions.query("decision == 'recompute'").drop_duplicates("group")["time_s"].sum()
    return (
        f"The budget costs {format_seconds(record.predicted_extra_s)} a step and saves {format_bytes(saved)} of the "
        f"peak: {_per_amount(record.predicted_extra_s, saved)}.",
        f"{format_seconds(float(again))} of that are ops that run again; the rest is the engine's bookkeeping.",
    )


def _per_amount(seconds: float, size: int) -> str:
    """Seconds per GB, or per MB for small amounts."""
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{format_seconds(seconds * unit / size)} for each {name}" if size > 0 else "no memory saved"


def _more_memory(record: PlanRecord, step: PlannedStep) -> str:
    """The benefit of one more GB, or of a tenth more for budgets below 10 GB, with the same regions."""
    if not record.predicted_extra_s:
        return "More memory would buy nothing."
    more = 10**9 if record.budget_bytes >= 10**10 else max(1, record.budget_bytes // 10)
    # A budget of reserved memory has no such limit.
    is_reserved = record.budget_of == "reserved"
    limit = more + (
        record.predicted_peak_bytes if is_reserved else record.budget_bytes - record.headroom_bytes
    )
    of = " of allocated memory" if is_reserved else ""
    try:
        solution = solve(step.built.problem, limit, time_limit_s=_TIME_LIMIT_S, start=step.options)
    except NoPlanInTimeError:  # Only if the plan's own decisions exceed its budget, as in an edited file.
        return f"What {format_bytes(more)} more would buy was not found in {_TIME_LIMIT_S:.0f} s."
    bought_s = record.predicted_extra_s - solution.extra_s
    if share_of_step(bought_s, record) < _WORTH_NAMING:
        # Policies may demand recomputation at any budget.
        needed = 0 if record.policies else record.unplanned_peak_bytes - (limit - more)
        enough = f"; with {format_bytes(needed)} more nothing has to be recomputed" if needed > more else ""
        return f"{format_bytes(more)} more{of} would buy next to nothing{enough}."
    least = "" if solution.status == "optimal" else "at least "
    after, before = (share_of_step(s, record) for s in (solution.extra_s, record.predicted_extra_s))
    return (
        f"{format_bytes(more)} more{of} would buy {least}{format_seconds(bought_s)} a step: an overhead of {after:.1%} "
        f"instead of {before:.1%}, {_per_amount(bought_s, more)}."
    )


# -- words ---------------------------------------------------------------------------------------------------------


def _by_decision(values: pd.DataFrame) -> list[list[str]]:
    """Per decision a headline and its largest rows."""
    parts = []
    for decision in ("save", "compiled", "recompute", "skip"):
        part = values[values["decision"] == decision]
        if decision == "compiled" and part.empty:
            continue
        time_s = float(part["time_s"].sum())
        cost = f", {format_seconds(time_s)} to run again" if decision == "recompute" else ""
        cost = f", {format_seconds(time_s)} more than fastest" if decision == "compiled" else cost
        count, size = int(part["values"].sum()), int(part["bytes"].sum())
        head = f"  {decision:<10} {count:>6} values, {format_bytes(size)}{cost}"
        shown = part.assign(price=[_price(value) for value in part["ms_per_MB"]])
        columns = ["op", "module_class", "values", "bytes", "time_s", "price"]
        parts.append([head, *("  " + line for line in _lines(shown, columns))])
    return parts


def _price(ms_per_mb: float) -> str:
    return f"{ms_per_mb:.3g} ms/MB" if ms_per_mb == ms_per_mb else "-"


def _lines(frame: pd.DataFrame, columns: list[str]) -> list[str]:
    """The first rows as aligned text, with readable bytes and seconds, and a line with the total of the others."""
    rows = [[_cell(name, row[name]) for name in columns] for _, row in frame.head(_MOST_LINES).iterrows()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(columns))]
    right = [name in ("bytes", "time_s", "values", "modules", "share", "price") for name in columns]
    lines = []
    for row in rows:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    if len(frame) > _MOST_LINES:
        rest = int(frame["bytes"].iloc[_MOST_LINES:].sum())
        lines.append(f"  and {len(frame) - _MOST_LINES} more, {format_bytes(rest)}")
    return lines


def _cell(name: str, value: object) -> str:
    if name == "bytes":
        return format_bytes(int(str(value))).split(" = ")[0]
    if name == "time_s":
        return format_seconds(float(str(value)))
    if name == "modules":
        return f"x {value}" if value != 1 else ""
    return str(value)
