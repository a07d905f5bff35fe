"""The trade-off curve: predicted overhead over the budget, as a table, a plot and a file."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, overload

import msgspec
import numpy as np
import pandas as pd
from msgspec import Meta

from autoac_solver.build.engines import engine_model
from autoac_solver.build.stacking import Stacked, stacked
from autoac_solver.draw.html import shown, svg, table
from autoac_solver.draw.pictures import draw_curve, new_axes
from autoac_solver.plan.baselines import COLUMNS as BASELINE_COLUMNS
from autoac_solver.plan.recorded.made import make_record
from autoac_solver.problem.simulator import Simulator
from autoac_solver.problem.solution import Solution
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.limits import Number, Size, Text
from autoac_solver.records.disk.schema import checked, document, fields_of
from autoac_solver.records.engines import check_engine
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.policies import POLICY, Policy
from autoac_solver.records.profile import PROFILE, Profile
from autoac_solver.records.units import parse_bytes, parse_overhead

SCHEMA = "autoac.tradeoff"
SCHEMA_VERSION = 14  # always the version of the profile in it

COLUMNS = [
    *("budget_bytes", "peak_bytes", "extra_s", "overhead", "bound", "status", "regions"),
    *("greedy_peak_bytes", "greedy_overhead"),
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """One budget, and the plan found for it.

    Args:
        budget_bytes: limit of the peak.
        calls: the module calls that the plan's regions were chosen from.
        n_regions: number of calls that are regions.
        solution: the decisions and their bound.
        greedy_peak_bytes, greedy_extra_s: of the greedy plan for these regions; None if it exceeds the budget.
    """

    budget_bytes: int
    calls: tuple[int, ...]
    n_regions: int
    solution: Solution
    greedy_peak_bytes: int | None = None
    greedy_extra_s: float | None = None


@dataclass(frozen=True)
class Tradeoff:
    """Plans over a range of budgets.

    Args:
        profile: the profile that was planned for.
        engine, engine_reason: the engine's name, and why it was chosen.
        points: one per budget, ascending.
        baselines: manual strategies, one row each: name, blocks, peak_bytes, extra_s, overhead; see `baselines`.
        notes: missing budgets, and why.
        policies: the user's policies, which all plans follow. With hints, bounds are of time plus hint penalties.

    A larger budget never has a slower plan, because the plan of a smaller budget fits it, too.
    """

    profile: Profile = field(repr=False)
    engine: str
    engine_reason: str
    points: tuple[Point, ...] = field(repr=False)
    baselines: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()
    policies: tuple[Policy, ...] = ()

    @property
    def model(self) -> str:
        """Class name of the model."""
        return self.profile.model

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step."""
        return self.profile.resident_bytes

    @property
    def step_s(self) -> float:
        """Predicted seconds of the step with nothing recomputed."""
        if engine_model(self.engine).compiles and self.points:
            return self._stack(self.points[0].calls).built.problem.step_s
        return self.profile.step_s

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """One row per budget, ascending.

        budget_bytes; peak_bytes, extra_s and overhead (extra time / step time) of its plan; bound: no plan has a
        lower overhead within the budget; status; number of regions; greedy_peak_bytes and greedy_overhead: of the
        greedy plan for the same regions, NaN if it exceeds the budget.
        """
        step_s = self.step_s or 1.0
        rows = [
            (
                *(p.budget_bytes, p.solution.peak_bytes, p.solution.extra_s, p.solution.extra_s / step_s),
                *(p.solution.bound_s / step_s, p.solution.status, p.n_regions),
                np.nan if p.greedy_peak_bytes is None else p.greedy_peak_bytes,
                np.nan if p.greedy_extra_s is None else p.greedy_extra_s / step_s,
            )
            for p in self.points
        ]
        return pd.DataFrame(rows, columns=COLUMNS)

    @functools.cached_property
    def plans(self) -> Sequence[Any]:
        """The plan of each row, made on first access."""
        return Lazy(len(self.points), self.record)

    def __len__(self) -> int:
        """Number of budgets."""
        return len(self.points)

    def __getitem__(self, row: int) -> Any:
        """The plan of a row, as in `plans`."""
        return self.plans[row]

    def plan(self, budget: int | str | None = None, *, max_overhead: float | str | None = None) -> Any:
        """Select a plan of this curve by budget or by overhead; nothing is solved.

        Args:
            budget: as for `autoac.plan`: selects the fastest plan whose peak fits.
            max_overhead: instead of a budget, "5%" or 0.05: selects the plan with the least peak within this overhead.

        Raises:
            ValueError: neither or both are given, or are invalid; or no plan of the curve qualifies.
        """
        if (budget is None) == (max_overhead is None):
            raise ValueError("give one of budget and max_overhead.")
        if budget is not None:
            limit = parse_bytes(budget, self.profile.device_bytes or None)
            rows = [row for row, point in enumerate(self.points) if point.solution.peak_bytes <= limit]
            if not rows:
                least = format_bytes(self.points[0].solution.peak_bytes)
                raise ValueError(
                    f"no plan of this curve fits {format_bytes(limit)}: its least peak is {least}. "
                    "autoac.solve(curve.profile, budget) looks for one."
                )
            return self.plans[rows[-1]]
        most = parse_overhead(max_overhead)  # type: ignore[arg-type]
        fast = np.flatnonzero(self.frame["overhead"].to_numpy() <= most)
        if not len(fast):
            least = float(self.frame["overhead"].iloc[-1])
            raise ValueError(
                f"no plan of this curve has an overhead of {most:.1%} or less; the least is {least:.1%}."
            )
        return self.plans[int(fast[0])]

    @property
    def opening_row(self) -> int:
        """The row shown first: the knee, else row 0."""
        return self.knee or 0

    def record(self, row: int) -> PlanRecord:
        """The record of a row's plan."""
        point = self.points[row]
        stack = self._stack(point.calls)
        return make_record(self.profile, stack, point.solution, point.budget_bytes, 0, self.engine_reason)

    def _stack(self, calls: tuple[int, ...]) -> Stacked:
        if calls not in self._stacks:
            self._stacks[calls] = stacked(self.profile, calls, self.engine, self.policies)
        return self._stacks[calls]

    @functools.cached_property
    def _stacks(self) -> dict[tuple[int, ...], Stacked]:
        """Cache: choice of regions -> its problem."""
        return {}

    @property
    def knee(self) -> int | None:
        """The row after which more memory buys little, by `knee_of`; None if the curve has none."""
        return knee_of(self.frame["budget_bytes"].to_numpy(float), self.frame["overhead"].to_numpy(float))

    def plot(self, axes: Any = None) -> Any:
        """Draw overhead over budget: plans, bound, greedy, manual strategies, and the knee.

        Args:
            axes: axes to draw on; None makes a new figure.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed (`pip install autoac[plot]`).
        """
        axes = new_axes() if axes is None else axes
        title = f"{self.model} on {self.profile.device}, engine {self.engine}"
        draw_curve(axes, self.frame, self.baselines, self.knee, title)
        return axes

    def save(self, path: str | Path) -> None:
        """Write the curve, its plans and their profile as JSON. The write is atomic.

        Raises:
            FileNotFoundError: the parent folder does not exist.
            IsADirectoryError: `path` is a folder.
        """
        points = [dataclasses.asdict(point) for point in self.points]
        for point in points:
            options = point["solution"]["decisions"]
            point["solution"]["decisions"] = "".join(map(str, options))
        data = {
            "engine": self.engine,
            "engine_reason": self.engine_reason,
            "notes": self.notes,
            "policies": [policy.as_data() for policy in self.policies],
            "points": points,
            "baselines": {str(name): self.baselines[name].tolist() for name in BASELINE_COLUMNS},
            "profile": self.profile.as_data(),
        }
        write_json(path, SCHEMA, SCHEMA_VERSION, data, _CURVE)

    @classmethod
    def load(cls, path: str | Path) -> Tradeoff:
        """Read a curve and verify its plans with the simulator.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            values = fields_of(checked({"policies": [], **data}, _CURVE))
            values["profile"] = Profile.of(values["profile"])
            values["points"] = tuple(map(_point, values["points"]))
            values["baselines"] = pd.DataFrame(fields_of(values["baselines"]), columns=BASELINE_COLUMNS)
            values["policies"] = tuple(map(Policy.of, values["policies"]))
            curve = cls(**values)
            check_engine(curve.engine)
            _recount(curve)
        except ValueError as error:
            raise ProfileError(f"{path} is not a valid curve: {error!s:.300}. Make it again.") from error
        return curve

    def __str__(self) -> str:
        lines = [f"{'budget':>24}  {'predicted peak':>24}  overhead  bound  greedy"]
        columns = ("budget_bytes", "peak_bytes", "overhead", "bound", "greedy_overhead")
        rows = zip(*(self.frame[name] for name in columns), strict=True)
        for row, (budget, peak, overhead, bound, greedy) in enumerate(rows):
            by_greedy = "     -" if greedy != greedy else f"{greedy:>6.1%}"
            lines.append(
                f"{format_bytes(int(budget)):>24}  {format_bytes(int(peak)):>24}  {overhead:>7.1%}  {bound:>5.1%}  "
                f"{by_greedy}{'  <- knee' if row == self.knee else ''}"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        least, most = (format_bytes(self.points[i].budget_bytes) for i in (0, -1))
        notes = f", {'; '.join(self.notes)}" if self.notes else ""
        budgets = f"{len(self.points)} budgets from {least} to {most}"
        return f"Tradeoff({self.model}, engine={self.engine!r}, {budgets}{notes})"

    def _repr_html_(self) -> str:
        frame = self.frame.drop(columns=["extra_s", "greedy_peak_bytes"])
        frame.insert(0, "", ["knee" if row == self.knee else "" for row in range(len(frame))])
        by_hand = "By hand, with torch's own checkpoint:"
        return shown(repr(self), svg(self.plot), *self.notes, table(frame), by_hand, table(self.baselines))


class Lazy(Sequence[T], Generic[T]):
    """A sequence whose items are made on first access.

    Args:
        length: number of items.
        make: makes the item of an index.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = functools.lru_cache(maxsize=None)(make)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self._make(i) for i in range(self._length)[index])
        return self._make(range(self._length)[index])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, range(self._length))


def knee_of(x: np.ndarray, y: np.ndarray) -> int | None:
    """The knee of a falling convex curve: the point furthest below the straight line between its ends.

    This is the offline form of Kneedle without smoothing or sensitivity: both axes are scaled to 0..1, and the first
    maximum of the difference curve is taken. Source: Satopaa, Albrecht, Irwin, Raghavan,
    "Finding a 'Kneedle' in a Haystack: Detecting Knee Points in System Behavior", ICDCS Workshops 2011.

    Args:
        x, y: the points, x ascending, shape (points,).

    Returns:
        The index of the knee; None if there are fewer than three points, or none lies below the line.
    """
    if len(x) < 3 or x[-1] <= x[0] or y[0] <= y[-1]:
        return None
    below = 1 - (x - x[0]) / (x[-1] - x[0]) - (y - y[-1]) / (y[0] - y[-1])
    best = int(np.argmax(below))
    return best if below[best] > 1e-9 else None


_DIGITS = Annotated[str, Meta(pattern=r"\A[0-9]*\Z")]
"""File format of decisions: one digit per group, its option."""
_BASELINES = msgspec.defstruct(
    "Baselines",
    [
        ("name", list[Text]),
        ("blocks", list[Size]),
        ("peak_bytes", list[Size]),
        *((name, list[Number]) for name in ("extra_s", "overhead")),
    ],
    forbid_unknown_fields=True,
)
_CURVE = document(
    Tradeoff,
    profile=PROFILE,
    points=list[document(Point, solution=document(Solution, decisions=_DIGITS))],
    baselines=_BASELINES,
    policies=list[POLICY],
)


def _point(found: msgspec.Struct) -> Point:
    values = fields_of(found)
    solution = fields_of(values["solution"])
    solution["decisions"] = tuple(map(int, solution["decisions"]))
    return Point(**{**values, "solution": Solution(**solution)})


def _recount(curve: Tradeoff) -> None:
    """Check every plan's decisions, peak and times against the simulator.

    Raises:
        ValueError: a plan does not belong to the profile.
    """
    simulators: dict[tuple[int, ...], Simulator] = {}
    for point in curve.points:
        if not all(0 <= call < len(curve.profile.spans) for call in point.calls):
            raise ValueError("a region is no call or part of the profile")
        if point.calls not in simulators:
            simulators[point.calls] = Simulator(
                stacked(curve.profile, point.calls, curve.engine, curve.policies).built.problem
            )
        simulator, solution = simulators[point.calls], point.solution
        if simulator.violations(solution.decisions):
            raise ValueError("a plan has decisions that the profile's groups do not permit")
        timeline = simulator.simulate(solution.decisions)
        if timeline.peak_bytes != solution.peak_bytes or not (
            np.isclose(timeline.extra_s, solution.extra_s) and np.isclose(timeline.hint_s, solution.hint_s)
        ):
            raise ValueError("a plan's peak or time is not what the profile says")
        if not point.budget_bytes >= solution.peak_bytes or not 0 <= solution.bound_s <= solution.objective_s:
            raise ValueError("a plan's budget or bound is out of range")
