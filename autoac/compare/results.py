"""Results of a comparison, as records and as JSON, and figures derived from them.

Overhead is a configuration's step time over that of no checkpointing, minus one (if no checkpointing does not run, over
that of the first that does). A machine's speed varies from second to second (clocks, neighbours) by more than the
differences of interest. So every sample is first divided by the machine's slowness: the mean of the samples just before
and just after it, each in units of its own configuration's typical sample. A configuration's step time is the median of
these ratios. The table also shows the least of the plain samples, a single lucky one.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from autoac.compare.measure import Bench, Configuration
from autoac.compare.quiet import MOST_STOLEN
from autoac_solver.records.disk.files import read_json, write_json
from autoac_solver.records.disk.schema import checked, document, fields_of
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import Profile

SCHEMA, SCHEMA_VERSION = "autoac.benchmark", 3
PASSES = 20
"""Iterations that separate typical samples from the machine's slowness; overheads converge long before."""


@dataclass(frozen=True)
class Row:
    """A configuration and its measurements; see `Strategy` and `Configuration` for the fields."""

    name: str
    kind: str
    budget_bytes: int
    predicted_peak_bytes: int | None
    predicted_overhead: float | None
    peak_bytes: int
    gradients_equal: bool
    buffers_equal: bool
    seconds: list[float]
    wall_s: list[float]
    turns: list[int]
    error: str

    @classmethod
    def of(cls, configuration: Configuration) -> Row:
        strategy = configuration.strategy
        return cls(
            name=strategy.name,
            kind=strategy.kind,
            budget_bytes=strategy.budget_bytes,
            predicted_peak_bytes=strategy.predicted_peak_bytes,
            predicted_overhead=strategy.predicted_overhead,
            peak_bytes=configuration.peak_bytes,
            gradients_equal=configuration.gradients_equal,
            buffers_equal=configuration.buffers_equal,
            seconds=configuration.seconds,
            wall_s=configuration.wall_s,
            turns=configuration.turns,
            error=configuration.error,
        )

    @property
    def step_s(self) -> float:
        """Median of the plain samples."""
        return statistics.median(self.seconds)

    @property
    def is_wrong(self) -> bool:
        """Whether a promise is broken: other gradients or buffers, a peak over its budget, or a plan that fails."""
        if self.error:
            return self.kind == "ours" and self.predicted_peak_bytes is not None
        over = 0 < self.budget_bytes < self.peak_bytes
        return over or not (self.gradients_equal and self.buffers_equal)

    @property
    def counts(self) -> bool:
        """Whether it ran and its gradients are right."""
        return not self.error and self.gradients_equal


@dataclass(frozen=True)
class ModelResult:
    """All configurations of one model.

    Args:
        budgets: budgets of our plans, bytes.
        resident_bytes: alive before the step.
        profile_s, solve_s: seconds to profile once, and to plan for all budgets.
        predicted_step_s: the profile's step time with nothing recomputed.
        predicted_again: overheads that plans for the same budgets predict from a second profile; empty if none was
            taken.
        taken_again: samples that were thrown away, see `Bench.time`.
    """

    name: str
    title: str
    engine: str
    budgets: list[int]
    resident_bytes: int
    profile_s: float
    solve_s: float
    predicted_step_s: float
    rows: list[Row]
    predicted_again: list[float] = field(default_factory=list)
    taken_again: int = 0

    @classmethod
    def of(cls, bench: Bench, found: Sequence[Configuration], profile: Profile, **others: Any) -> ModelResult:
        """The result of a model's configurations, after they were timed.

        Args:
            found: measured on `bench`.
            profile: that plans were made from.
            others: the other fields.
        """
        return cls(
            name=bench.workload.name,
            title=bench.workload.title,
            resident_bytes=bench.resident_bytes,
            predicted_step_s=profile.step_s,
            rows=[Row.of(configuration) for configuration in found],
            taken_again=bench.taken_again,
            **others,
        )

    def of_kind(self, kind: str) -> list[Row]:
        """The rows of one kind: "none", "other" or "ours"."""
        return [row for row in self.rows if row.kind == kind]

    @property
    def ours(self) -> list[Row]:
        """Our rows, one a budget."""
        return self.of_kind("ours")

    @cached_property
    def steady(self) -> dict[str, list[float]]:
        """The samples of each configuration without the machine's drift, by name; without unit, for comparison only."""
        return _without_drift({row.name: (row.turns, row.seconds) for row in self.rows if not row.error})

    @cached_property
    def wall_steady(self) -> dict[str, list[float]]:
        """The same in wall-clock time."""
        return _without_drift({row.name: (row.turns, row.wall_s) for row in self.rows if not row.error})

    @cached_property
    def base(self) -> list[Row]:
        """The rows that overheads refer to: no checkpointing; if that does not run, the first that does."""
        able = [row for row in self.rows if not row.error]
        return [row for row in able if row.kind == "none"] or able[:1]

    def overhead(self, row: Row) -> float:
        """Extra step time over that of `base`."""
        return self._over_base(row, self.steady)

    def wall_overhead(self, row: Row) -> float:
        """The same in wall-clock time, which is what a plan predicts.

        On CPU the engine's bookkeeping keeps one thread busy: CPU time counts it once, and an op once for each thread.
        """
        return self._over_base(row, self.wall_steady)

    def _over_base(self, row: Row, steady: dict[str, list[float]]) -> float:
        base = statistics.fmean(statistics.median(steady[none.name]) for none in self.base)
        return statistics.median(steady[row.name]) / base - 1

    def least_overhead(self, row: Row) -> float:
        """The same from the least plain samples."""
        base = statistics.fmean(min(none.seconds) for none in self.base)
        return min(row.seconds) / base - 1

    def ours_at(self, budget_bytes: int) -> Row | None:
        """Our row for a budget, None if there is no plan for it."""
        return next((row for row in self.ours if row.budget_bytes == budget_bytes), None)

    def best_other(self, budget_bytes: int) -> Row | None:
        """The fastest strategy that fits the budget and is not ours; None if there is none."""
        fitting = [
            row for row in self.rows if row.kind != "ours" and row.counts and row.peak_bytes <= budget_bytes
        ]
        plain = [row for row in fitting if row.kind == "none"]
        return plain[0] if plain else min(fitting, key=self.overhead, default=None)

    def best_overhead(self, row: Row) -> float:
        """Overhead of a row from `best_other`: 0, by definition, for no checkpointing."""
        return 0.0 if row.kind == "none" else self.overhead(row)

    @property
    def difference_of_none(self) -> float:
        """Difference between two measurements of no checkpointing (A/A), as a fraction."""
        medians = [statistics.median(self.steady[row.name]) for row in self.of_kind("none") if not row.error]
        return abs(medians[0] / medians[1] - 1) if len(medians) == 2 else 0.0

    @property
    def noise(self) -> float:
        """Difference that two equal configurations do not exceed in 95 of 100 cases, as a fraction.

        2,000 resamples of two disjoint groups of n samples each, where n is the largest sample count of a strategy.
        Samples are without drift, of all configurations with at least n, each divided by its configuration's median.
        Not less than A/A itself, which is only one case.
        """
        compared = [len(self.steady[row.name]) for row in self.rows if not row.error and row.kind != "none"]
        rounds = max(compared or [len(self.steady[self.base[0].name])])
        samples = [own for own in self.steady.values() if len(own) >= rounds]
        pool = [sample / statistics.median(own) for own in samples for sample in own]
        rounds = min(rounds, len(pool) // 2)
        shuffled = random.Random(0)
        differences = []
        for _ in range(2000):
            groups = shuffled.sample(pool, 2 * rounds)
            differences.append(
                abs(statistics.median(groups[:rounds]) / statistics.median(groups[rounds:]) - 1)
            )
        return max(sorted(differences)[int(0.95 * len(differences))], self.difference_of_none)

    @property
    def about_taken_again(self) -> str:
        """A sentence on the samples that were thrown away, "" if there are none."""
        if not self.taken_again:
            return ""
        return (
            f"{self.taken_again} samples were taken again, as the machine's host had given more than {MOST_STOLEN:.0%} "
            "of their CPU time to others."
        )

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of predicted and measured overhead (in wall-clock time) over our plans."""
        predicted = pd.Series([row.predicted_overhead for row in self.ours], dtype=float)
        measured = pd.Series([self.wall_overhead(row) for row in self.ours])
        return float(predicted.rank().corr(measured.rank()))


def _without_drift(samples: dict[str, tuple[list[int], list[float]]]) -> dict[str, list[float]]:
    """Samples divided by the machine's slowness while they were taken.

    A sample over its configuration's typical one measures the machine's slowness; each sample is divided by the mean
    slowness of its two neighbours in time. The typical sample is the median of the samples without drift, so this is
    iterated.

    Args:
        samples: by configuration: the turns in which they were taken, seconds.
    """
    taken = sorted((turn, name, s) for name, own in samples.items() for turn, s in zip(*own, strict=True))
    typical = {name: statistics.median(seconds) for name, (_, seconds) in samples.items()}
    steady: dict[str, list[float]] = {}
    for _ in range(PASSES):
        slowness = [s / typical[name] for _, name, s in taken]
        steady = {name: [] for name in samples}
        for index, (_, name, s) in enumerate(taken):
            beside = slowness[max(index - 1, 0) : index] + slowness[index + 1 : index + 2] or [1.0]
            steady[name].append(s / statistics.fmean(beside))
        typical = {name: statistics.median(own) for name, own in steady.items()}
    return steady


@dataclass(frozen=True)
class Results:
    """A whole run.

    Args:
        conditions: hardware, versions and settings, for the caption.
    """

    conditions: dict[str, str]
    models: list[ModelResult]

    def save(self, path: Path) -> None:
        """Write JSON; the file appears whole or not at all."""
        write_json(path, SCHEMA, SCHEMA_VERSION, asdict(self), _RESULTS)

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            values = fields_of(checked(data, _RESULTS))
        except ValueError as error:
            raise ProfileError(f"{path} is no valid comparison: {error!s:.300}. Make it again.") from error
        return cls(values["conditions"], [_model(found) for found in values["models"]])


_RESULTS = document(Results, models=list[document(ModelResult, rows=list[document(Row)])])


def _model(found: Any) -> ModelResult:
    values = fields_of(found)
    return ModelResult(**{**values, "rows": [Row(**fields_of(row)) for row in values["rows"]]})
