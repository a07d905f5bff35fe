"""The fastest batch size within a budget: plans for each batch size and budget, compared in samples per second."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from autoac_solver.draw.html import shown, svg, table
from autoac_solver.draw.pictures import draw_batches, new_axes
from autoac_solver.plan.baselines import baselines
from autoac_solver.plan.curve import Lazy, Tradeoff
from autoac_solver.plan.planning import choices_of, limits, resolve_engine
from autoac_solver.plan.sweep import sweep
from autoac_solver.records.arguments import (
    Tell,
    as_patterns,
    check_batch_sizes,
    check_effort,
    several_budgets,
)
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError, ProfilingError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import Profile

COLUMNS = [
    *("batch_size", "budget_bytes", "peak_bytes", "overhead", "step_s", "samples_per_s", "status"),
    "fastest",
]

_LARGEST_BATCH = 2**30
_ANY_TOTAL_BYTES = 2**40
"""Placeholder for the device's memory when only the format of a budget is checked."""


@dataclass(frozen=True)
class BatchTradeoff:
    """Plans for several batch sizes and budgets.

    Args:
        curves: batch size -> its curve over the budgets, ascending; only batch sizes that fit any budget.
        budgets_bytes: the requested budgets, ascending.
        too_large: batch sizes that fit none of the budgets.
    """

    curves: Mapping[int, Tradeoff] = field(repr=False)
    budgets_bytes: tuple[int, ...]
    too_large: tuple[int, ...]

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """One row per feasible pair of batch size and budget.

        batch_size; budget_bytes; peak_bytes and overhead of the plan; step_s: seconds of the planned step;
        samples_per_s; status; fastest: no other batch size is faster within this budget.
        """
        rows = []
        for batch, curve in self.curves.items():
            for point in curve.points:
                solution = point.solution
                step_s = curve.step_s + solution.extra_s
                overhead = solution.extra_s / curve.step_s
                rows.append(
                    (
                        batch,
                        point.budget_bytes,
                        solution.peak_bytes,
                        overhead,
                        step_s,
                        batch / step_s,
                        solution.status,
                    )
                )
        frame = pd.DataFrame(rows, columns=COLUMNS[:-1])
        best = frame.groupby("budget_bytes")["samples_per_s"].idxmax()
        frame["fastest"] = frame.index.isin(best)
        return frame

    @functools.cached_property
    def plans(self) -> Sequence[Any]:
        """The plan of each row of `frame`, made on first access."""
        places = [(curve, row) for curve in self.curves.values() for row in range(len(curve.points))]
        return Lazy(len(places), lambda index: places[index][0].plans[places[index][1]])

    def largest_batch(self, budget: int | str | None = None) -> int:
        """The largest batch size that fits a budget.

        Args:
            budget: one of the requested budgets; None is the largest.
        """
        rows = self._rows(budget)
        return int(rows["batch_size"].max())

    def fastest(self, budget: int | str | None = None) -> pd.Series:
        """The row of the batch size with the most samples per second within a budget."""
        rows = self._rows(budget)
        return rows.iloc[int(rows["samples_per_s"].argmax())]

    def plan(self, budget: int | str | None = None) -> Any:
        """The plan of `fastest`."""
        return self.plans[int(str(self.fastest(budget).name))]

    def plot(self, axes: Any = None) -> Any:
        """Draw samples per second over the budget, one line per batch size; for a single budget, over the batch size.

        Args:
            axes: axes to draw on; None makes a new figure.

        Raises:
            ImportError: matplotlib is not installed (`pip install autoac[plot]`).
        """
        axes = new_axes() if axes is None else axes
        draw_batches(axes, self.frame)
        return axes

    def _rows(self, budget: int | str | None) -> pd.DataFrame:
        curve = next(iter(self.curves.values()))
        limit = (
            self.budgets_bytes[-1]
            if budget is None
            else limits(budget, 0, curve.profile.device_bytes or None)[0]
        )
        rows = self.frame[self.frame["budget_bytes"] == limit]
        if rows.empty:
            known = ", ".join(format_bytes(size) for size in sorted(set(self.frame["budget_bytes"])))
            raise ValueError(
                f"nothing was planned for a budget of {format_bytes(limit)}; there are plans for {known}."
            )
        return rows

    def __str__(self) -> str:
        lines = [f"{'budget':>24}  batch  {'predicted peak':>24}  overhead  samples/s"]
        for row in self.frame.sort_values(["budget_bytes", "batch_size"]).itertuples(index=False):
            lines.append(
                f"{format_bytes(int(str(row.budget_bytes))):>24}  {row.batch_size:>5}  "
                f"{format_bytes(int(str(row.peak_bytes))):>24}  {row.overhead:>7.1%}  {row.samples_per_s:>9.4g}"
                f"{'  <- fastest' if row.fastest else ''}"
            )
        if self.too_large:
            lines.append(f"Too large for every budget: {', '.join(map(str, self.too_large))}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        best = self.fastest()
        return (
            f"BatchTradeoff(batch sizes {', '.join(map(str, self.curves))}; at {format_bytes(self.budgets_bytes[-1])} "
            f"the fastest is {best['batch_size']} with {best['samples_per_s']:.4g} samples/s)"
        )

    def _repr_html_(self) -> str:
        return shown(repr(self), svg(self.plot), table(self.frame))


def plan_batches(
    profiles: Mapping[int, Profile] | Callable[[int], Profile],
    budgets: int | str | Iterable[int | str],
    batch_sizes: Iterable[int] | None = None,
    *,
    engine: str = "auto",
    regions: str | Iterable[str] | None = None,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Tell | None = None,
) -> BatchTradeoff:
    """Make plans for several batch sizes and compare their speed.

    Args:
        profiles: a mapping from batch size to profile, or a function that makes a profile.
        budgets: one or more budgets.
        batch_sizes: batch sizes to plan for. None: all keys of a mapping; with a function, search for the largest batch
            that fits the largest budget, by doubling from 1 until none fits, then bisection.
        engine, regions, time_limit_s, gap, progress: as for `autoac.tradeoff`.

    Raises:
        InfeasibleBudgetError: the smallest batch does not fit the largest budget.
        ValueError: an argument is invalid, raised before any profile is made; or a profile has no times.
    """
    engine, reason = resolve_engine(engine)
    check_effort(time_limit_s, gap)
    wanted = several_budgets(budgets)
    for budget in wanted:
        limits(budget, 0, _ANY_TOTAL_BYTES)
    regions = None if regions is None else as_patterns(regions)
    profile_of = profiles.__getitem__ if isinstance(profiles, Mapping) else profiles
    if batch_sizes is None and isinstance(profiles, Mapping):
        batch_sizes = list(profiles)
    sizes = None if batch_sizes is None else check_batch_sizes(batch_sizes, profiles)
    search = _Search(
        profile_of, wanted, engine, reason, regions, time_limit_s, gap, progress or (lambda *_: None)
    )
    if sizes is None:
        search.find_largest()
    else:
        for index, batch in enumerate(sizes):
            search.fits(batch, index / len(sizes))
    return search.result()


@dataclass
class _Search:
    """State of the search over batch sizes; fields without a default are as for `plan_batches`."""

    profile_of: Callable[[int], Profile]
    budgets: list[int | str]
    engine: str
    reason: str
    regions: list[str] | None
    time_limit_s: float
    gap: float
    tell: Tell
    curves: dict[int, Tradeoff] = field(default_factory=dict)
    budgets_bytes: tuple[int, ...] = ()
    missing: dict[int, InfeasibleBudgetError | NoPlanInTimeError] = field(default_factory=dict)

    def fits(self, batch: int, done: float) -> bool:
        """Plan for a batch size; return whether it fits the largest budget."""
        self.tell(f"batch size {batch}", done)
        profile = self.profile_of(batch)
        if not profile.step_s > 0:
            raise ValueError(
                f"the profile for batch size {batch} has no times, so there are no samples per second to compare."
            )
        self.budgets_bytes = tuple(
            sorted({limits(budget, 0, profile.device_bytes or None)[0] for budget in self.budgets})
        )
        choices = choices_of(profile, self.regions, self.engine)
        try:
            # A partial sweep does not show whether the batch fits, so Ctrl-C ends the whole search.
            points, notes = sweep(
                choices, self.budgets_bytes, self.time_limit_s, self.gap, lambda *_: None, keep=False
            )
        except (InfeasibleBudgetError, NoPlanInTimeError) as error:
            self.missing[batch] = error
            return False
        self.curves[batch] = Tradeoff(profile, self.engine, self.reason, points, baselines(profile), notes)
        return points[-1].budget_bytes == self.budgets_bytes[-1]

    def find_largest(self) -> None:
        """Find the largest batch: double from 1 until it does not fit, then bisect."""
        fitting, batch = 0, 1
        while self.fits(batch, 0.0):
            fitting, batch = batch, 2 * batch
            if batch > _LARGEST_BATCH:
                raise ProfilingError(
                    f"batch size {fitting} still fits: the profiles do not grow with the batch. Check that make(batch) "
                    "uses its argument, or name the batch_sizes."
                )
        while batch - fitting > 1:
            middle = (fitting + batch) // 2
            fitting, batch = (middle, batch) if self.fits(middle, 0.5) else (fitting, middle)

    def result(self) -> BatchTradeoff:
        if not self.curves:
            raise self.missing[min(self.missing)]
        curves = dict(sorted(self.curves.items()))
        return BatchTradeoff(curves, self.budgets_bytes, tuple(sorted(self.missing)))
