"""What a plan is on disk: the decisions of every region, and what was predicted and proved about them."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from autoac_solver.build import Built
from autoac_solver.errors import ProfileError
from autoac_solver.files import read_json, write_json
from autoac_solver.format import format_bytes
from autoac_solver.html import escape, svg, table
from autoac_solver.limits import is_number, is_size, is_text
from autoac_solver.pauses import Pause, pauses
from autoac_solver.pictures import draw_memory, new_axes
from autoac_solver.policies import AppliedPolicy
from autoac_solver.profile import KINDS, Profile
from autoac_solver.report import (
    decisions_table,
    describe_position,
    fixed_bytes_at,
    holders_at,
    timeline_table,
)
from autoac_solver.simulator import Simulator
from autoac_solver.solution import Solution
from autoac_solver.stacking import Stacked, stacked

SCHEMA = "autoac.plan"
SCHEMA_VERSION = 7  # 6: losses over chunks of rows; 7: the profile's fifth version


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """The decisions for one call of one module.

    Args:
        fqn: the module's name in the model.
        call, calls: which of the module's calls in a step, of how many with gradients on.
        wrapped: whether anything is recomputed; if not, this call is left untouched.
        steps: for every op in order, its overload's name and whether it is recomputed.
    """

    fqn: str
    call: int
    calls: int
    wrapped: bool
    steps: tuple[tuple[str, bool], ...] = field(repr=False)

    @property
    def name(self) -> str:
        """The region's name: the module's, with the call's number if it is not the first."""
        return self.fqn if self.call == 0 else f"{self.fqn}#{self.call}"


@dataclass(frozen=True)
class PlanRecord:
    """A plan as data.

    Args:
        model, model_fingerprint, op_fingerprint, device, torch_version: of the profile it was made from.
        root_calls: how often the profiled step called the model itself.
        engine, engine_reason: "replay" or "sac", and why.
        budget_bytes: the limit for the peak; headroom_bytes of it were left free on purpose.
        resident_bytes: alive before the step.
        predicted_peak_bytes, unplanned_peak_bytes: of the step with the plan, and with nothing recomputed.
        predicted_extra_s, predicted_step_s: seconds that the plan adds, seconds of the step without it.
        bound_s, gap: no plan adds less than bound_s; gap is the difference as a fraction of the step. Where there are
            hints, what they count (hint_s) is part of both.
        status, solver, solve_s: "optimal" or "feasible", by what, in how many seconds.
        peak_where, peak_fixed_bytes, peak_holders: where the predicted peak lies, how much is alive there whatever is
            decided, and kind, module, bytes of what is alive there.
        regions: see `RegionPlan`.
        chunked_losses: the model's cross entropies are computed over chunks of rows, see `losses`.
        profile: what it was made from, so that a plan by itself can be explained and planned anew for other budgets.
        decision_columns, timeline_columns: the tables behind `decisions` and `memory_timeline`, by column.
        policies: the user's policies, and what became of them.
        hint_s: what the hints that are not followed count in what was minimised, seconds.
    """

    model: str
    model_fingerprint: str
    op_fingerprint: str
    device: str
    torch_version: str
    root_calls: int
    engine: str
    engine_reason: str
    budget_bytes: int
    headroom_bytes: int
    resident_bytes: int
    predicted_peak_bytes: int
    unplanned_peak_bytes: int
    predicted_extra_s: float
    predicted_step_s: float
    bound_s: float
    gap: float
    status: str
    solver: str
    solve_s: float
    peak_where: str
    peak_fixed_bytes: int
    peak_holders: tuple[tuple[str, str, int], ...] = field(repr=False)
    regions: tuple[RegionPlan, ...] = field(repr=False)
    chunked_losses: bool
    profile: Profile = field(repr=False)
    decision_columns: dict[str, list[Any]] = field(repr=False)
    timeline_columns: dict[str, list[Any]] = field(repr=False)
    policies: tuple[AppliedPolicy, ...] = ()
    hint_s: float = 0.0

    @property
    def decisions(self) -> pd.DataFrame:
        """One row a value, see `report.decisions_table`."""
        return pd.DataFrame(self.decision_columns)

    @property
    def timeline(self) -> pd.DataFrame:
        """One row a position of the step, see `report.timeline_table`."""
        return pd.DataFrame(self.timeline_columns)

    def rebuilt(self) -> tuple[Built, tuple[bool, ...]]:
        """The problem that was solved, made again from the profile, and what is recomputed, a bool per unit.

        Raises:
            ProfileError: decisions and profile do not belong together (the file was changed).
        """
        index = {(call.fqn, call.call): i for i, call in enumerate(self.profile.calls) if call.grad}
        decided = dict(zip(self.decision_columns["unit"], self.decision_columns["decision"], strict=True))
        try:
            calls = [index[region.fqn, region.call] for region in self.regions]
            policies = [applied.policy for applied in self.policies]
            built = stacked(self.profile, calls, self.engine, policies, must_match=False).built
            units = range(len(built.problem.units))
            recomputed = tuple(decided[unit] == "recompute" for unit in units)
        except KeyError as error:
            raise ProfileError(
                f"the plan has a region or a value {error} that is not in its profile. Make it again."
            ) from error
        if Simulator(built.problem).simulate(recomputed).peak_bytes != self.predicted_peak_bytes:
            raise ProfileError("the plan's decisions do not give its predicted peak. Make it again.")
        return built, recomputed

    def pauses(self, region: RegionPlan) -> tuple[Pause, ...]:
        """Where engine replay does not look while it records this region; none for engine sac."""
        if self.engine != "replay":
            return ()
        index = {(call.fqn, call.call): i for i, call in enumerate(self.profile.calls) if call.grad}
        call = index.get((region.fqn, region.call))
        if call is None:
            return ()  # no such region: a changed plan, which its model will refuse
        recorded = {position for position, (_, again) in enumerate(region.steps) if again}
        never = {other.fqn for other in self.regions}
        return pauses(self.profile, call, recorded, never)

    def plot_memory(self, axes: Any = None, measured: Any = None) -> Any:
        """Draw the live bytes over the step: by kind, with nothing recomputed, the budget, and as measured.

        Args:
            axes: where to; None makes a new figure.
            measured: live bytes at each position of the timeline, from `Plan.measure_memory`; None for none.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed (`pip install autoac[plot]`).
            ValueError: `measured` has not as many entries as the timeline.
        """
        timeline = self.timeline
        measured_bytes = None if measured is None else np.asarray(measured, dtype=float)
        if measured_bytes is not None and measured_bytes.shape != (len(timeline),):
            raise ValueError(
                f"measured has shape {measured_bytes.shape}; it must have one entry for each of the {len(timeline)} "
                "rows of memory_timeline(), as what measure_memory() returns has."
            )
        axes = new_axes() if axes is None else axes
        built, recomputed = self.rebuilt()
        nothing = Simulator(built.problem).live_bytes([False] * len(recomputed))
        title = f"{self.model} on {self.device}, engine {self.engine}"
        draw_memory(axes, timeline, self.budget_bytes, nothing, measured_bytes, title)
        return axes

    def __str__(self) -> str:
        share = self.predicted_extra_s / self.predicted_step_s if self.predicted_step_s else 0.0
        return (
            f"Plan({self.model}, engine={self.engine!r}, budget={format_bytes(self.budget_bytes)}, "
            f"predicted peak={format_bytes(self.predicted_peak_bytes)}, predicted overhead={share:.1%}, {self.status})"
        )

    def _repr_html_(self) -> str:
        frame = self.decisions.groupby("decision", sort=False)["bytes"].agg(["size", "sum"]).reset_index()
        frame.columns = ["decision", "values", "bytes"]
        where = f"The peak lies at {self.peak_where}."
        return f"<p><b>{escape(str(self))}</b></p>{svg(self.plot_memory)}<p>{escape(where)}</p>{table(frame)}"

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no folder to write it in.
            IsADirectoryError: there is a folder of that name.
        """
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        programs: dict[tuple[tuple[str, bool], ...], int] = {}
        data["regions"] = [
            {
                "fqn": r.fqn,
                "call": r.call,
                "calls": r.calls,
                "wrapped": r.wrapped,
                "steps": programs.setdefault(r.steps, len(programs)),
            }
            for r in self.regions
        ]
        data["programs"] = list(programs)
        data["policies"] = [applied.as_data() for applied in self.policies]
        data["profile"] = self.profile.as_data()
        write_json(path, SCHEMA, SCHEMA_VERSION, data)

    @classmethod
    def load(cls, path: str | Path) -> PlanRecord:
        """Read a plan.

        Raises:
            ProfileError: the file is damaged, of another kind, or from a newer version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            data = {"policies": [], "hint_s": 0.0, **data}  # plans without policies need not name them
            values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
            programs = [_steps(steps) for steps in data["programs"]]
            values["regions"] = tuple(
                RegionPlan(
                    fqn=_is(r["fqn"], is_text),
                    call=_is(r["call"], is_size),
                    calls=_is(r["calls"], is_size),
                    wrapped=_is(r["wrapped"], _is_bool),
                    steps=programs[_is(r["steps"], is_size)],
                )
                for r in values["regions"]
            )
            values["profile"] = Profile.from_data(values["profile"])
            values["policies"] = tuple(map(AppliedPolicy.from_data, values["policies"]))
            values["peak_holders"] = tuple(
                (_is(kind, _is_kind), _is(module, is_text), _is(size, is_size))
                for kind, module, size in values["peak_holders"]
            )
            for f in dataclasses.fields(cls):
                if f.type in _CHECKS:
                    _is(values[f.name], _CHECKS[f.type])
            _is(values["engine"], ("replay", "sac").__contains__)
            _is(values["status"], ("optimal", "feasible").__contains__)
            _check_columns(values["decision_columns"], _DECISION_COLUMNS)
            _check_columns(values["timeline_columns"], _TIMELINE_COLUMNS)
            record = cls(**values)
            _check_regions(record)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ProfileError(f"{path} is not a valid plan: {error!r:.200}. Make it again.") from error
        return record


def make_record(
    profile: Profile, stack: Stacked, solution: Solution, budget_bytes: int, headroom_bytes: int, reason: str
) -> PlanRecord:
    """The plan's record: decisions by region, what was predicted and proved, and the tables to look at."""
    built, recomputed = stack.built, solution.recomputed
    simulator = Simulator(built.problem)
    timeline = simulator.simulate(recomputed)
    nothing = simulator.simulate([False] * len(recomputed))
    again_in = {unit.region for unit, again in zip(built.problem.units, recomputed, strict=True) if again}
    calls_of = Counter(call.fqn for call in profile.calls if call.grad)
    regions = tuple(
        RegionPlan(
            fqn=profile.calls[tape.call].fqn,
            call=profile.calls[tape.call].call,
            calls=calls_of[profile.calls[tape.call].fqn],
            wrapped=index in again_in,
            steps=built.steps(profile, index, recomputed),
        )
        for index, tape in enumerate(built.regions)
    )
    return PlanRecord(
        model=profile.model,
        model_fingerprint=profile.model_fingerprint,
        op_fingerprint=profile.op_fingerprint,
        device=profile.device,
        torch_version=profile.torch_version,
        root_calls=sum(call.fqn == "" and call.grad for call in profile.calls),
        engine=built.engine,
        engine_reason=reason,
        budget_bytes=budget_bytes,
        headroom_bytes=headroom_bytes,
        resident_bytes=profile.resident_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        unplanned_peak_bytes=nothing.peak_bytes,
        predicted_extra_s=timeline.extra_s,
        predicted_step_s=profile.step_s,
        bound_s=solution.bound_s,
        gap=solution.gap,
        status=solution.status,
        solver=solution.solver,
        solve_s=solution.solve_s,
        peak_where=describe_position(profile, built, timeline.peak_position),
        peak_fixed_bytes=fixed_bytes_at(built, timeline.peak_position),
        peak_holders=holders_at(profile, built, recomputed, timeline.peak_position),
        regions=regions,
        chunked_losses=built.loss >= 0 and bool(recomputed[built.loss]),
        profile=profile,
        decision_columns=_columns(decisions_table(profile, built, recomputed)),
        timeline_columns=_columns(timeline_table(profile, built, recomputed)),
        policies=stack.applied(recomputed),
        hint_s=solution.hint_s,
    )


def _columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): frame[name].tolist() for name in frame.columns}


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_kind(value: Any) -> bool:
    return value in KINDS


_CHECKS: dict[Any, Callable[[Any], bool]] = {
    "str": is_text,
    "int": is_size,
    "float": is_number,
    "bool": _is_bool,
}

_DECISION_COLUMNS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("region", "module", "op"), is_text),
    "decision": ("save", "recompute", "skip").__contains__,
    "must_save": _is_bool,
    "time_s": is_number,
    **dict.fromkeys(("bytes", "unit", "storage"), is_size),
}
_TIMELINE_COLUMNS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("op", "module"), is_text),
    "phase": ("forward", "backward", "recompute").__contains__,
    **dict.fromkeys(("live_bytes", *KINDS), is_size),
}


def _steps(steps: list[Any]) -> tuple[tuple[str, bool], ...]:
    return tuple((_is(name, is_text), _is(again, _is_bool)) for name, again in steps)


def _is(value: Any, check: Callable[[Any], bool]) -> Any:
    if not check(value):
        raise ValueError(f"{value!r:.80} is out of place")
    return value


def _check_columns(columns: Any, checks: dict[str, Callable[[Any], bool]]) -> None:
    """A table in columns has just these, of one length."""
    if not isinstance(columns, dict) or columns.keys() != checks.keys():
        raise ValueError(f"the columns of a table are {list(columns)!r:.80}, not {list(checks)}")
    for name, check in checks.items():
        if not isinstance(columns[name], list) or not all(map(check, columns[name])):
            raise ValueError(f"column {name!r} of a table holds something else")
    if len({len(column) for column in columns.values()}) > 1:
        raise ValueError("the columns of a table are of different lengths")


def _check_regions(record: PlanRecord) -> None:
    """Each region is a call of the profile, with the ops that ran there, and none is given twice or inside another."""
    calls = {(call.fqn, call.call): call for call in record.profile.calls if call.grad}
    number_of_calls = Counter(fqn for fqn, _ in calls)
    ticks = [op.tick for op in record.profile.tape]
    end = 0
    for region in record.regions:
        call = calls.get((region.fqn, region.call))
        if call is None or region.calls != number_of_calls[region.fqn]:
            raise ValueError(f"region {region.name!r} is no call of the profiled step")
        if call.start < end:
            raise ValueError(f"region {region.name!r} is given twice, out of order or inside another one")
        end = call.end
        ops = record.profile.tape[bisect_left(ticks, call.start) : bisect_left(ticks, call.end)]
        if [name for name, _ in region.steps] != [op.name for op in ops]:
            raise ValueError(f"region {region.name!r} has other ops than the profiled step")
        # Under sac, ops that early stop spares are called recomputed wherever they are.
        if record.engine == "replay" and not region.wrapped and any(again for _, again in region.steps):
            raise ValueError(f"region {region.name!r} recomputes something, but is not wrapped")
