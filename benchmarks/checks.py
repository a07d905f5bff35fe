"""Expectations of the plans, checked against the measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from autoac.compare.results import ModelResult, Row

FULL = "full, each block"
POINTS = 0.02
"""How far a predicted overhead may be from the measured one."""
STEP, AGAIN = 0.15, 0.10
"""How far a predicted step time may be from the measured one, and two profiles' predictions from each other."""
LEAST = 0.002
"""Overheads that are no further apart than this are the same."""


@dataclass(frozen=True)
class Check:
    """One expectation: its text, whether it holds, and the numbers."""

    text: str
    passed: bool
    numbers: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self.text}: {self.numbers}"


def checks(model: ModelResult) -> list[Check]:
    """All expectations of one model; if a plan did not run, only the one that every plan runs."""
    failed = [f"{row.name}: {row.error}" for row in model.ours if row.error]
    if failed:
        return [Check("every plan runs", False, "; ".join(failed))]
    return [
        _right(model),
        _never_slower(model),
        _against_full(model),
        _half_on_average(model),
        _predicted(model),
        _step_time(model),
        _again(model),
    ]


def contested(model: ModelResult) -> list[tuple[Row, Row]]:
    """Our row and the best other's at each budget that some other strategy fits."""
    pairs = [(ours, model.best_other(ours.budget_bytes)) for ours in model.ours]
    return [(ours, other) for ours, other in pairs if other is not None]


def _right(model: ModelResult) -> Check:
    wrong = [row.name for row in model.ours if not row.counts]
    over = [row.name for row in model.ours if row.peak_bytes > row.budget_bytes]
    off = max(abs(row.peak_bytes / (row.predicted_peak_bytes or 1) - 1) for row in model.ours)
    numbers = f"{len(model.ours) - len(set(wrong + over))} of {len(model.ours)}; peak predicted to {off:.3%}"
    if wrong or over:
        numbers += f"; gradients differ: {wrong or 'none'}; over budget: {over or 'none'}"
    return Check(
        "gradients equal to the bit and measured peak within the budget", not wrong and not over, numbers
    )


def _never_slower(model: ModelResult) -> Check:
    pairs = contested(model)
    worst, where = max(
        (model.overhead(ours) - model.best_overhead(other), ours.name) for ours, other in pairs
    )
    numbers = f"largest difference {_points(worst)} ({where}), noise {model.noise:.1%}; {len(pairs)} budgets compared"
    return Check(
        "never slower than the best other strategy that fits, beyond noise", worst <= model.noise, numbers
    )


def _against_full(model: ModelResult) -> Check:
    ours = model.ours[0]
    text = "at the least budget not slower than full checkpointing of each block, beyond noise"
    full = next((row for row in model.rows if row.name == FULL), None)
    if full is None or full.error:
        return Check(text, False, "full checkpointing did not run")
    difference = model.overhead(ours) - model.overhead(full)
    numbers = (
        f"{model.overhead(ours):+.1%} at {_mb(ours.peak_bytes)} against {model.overhead(full):+.1%} at "
        f"{_mb(full.peak_bytes)}, noise {model.noise:.1%}"
    )
    return Check(text, difference <= model.noise, numbers)


def _half_on_average(model: ModelResult) -> Check:
    pairs = contested(model)
    ours = statistics.fmean(model.overhead(row) for row, _ in pairs)
    other = statistics.fmean(model.best_overhead(row) for _, row in pairs)
    numbers = f"{ours:.1%} against {other:.1%} over {len(pairs)} of {len(model.ours)} budgets"
    if len(pairs) < len(model.ours):
        numbers += " (no other strategy fits the rest)"
    return Check("on average at most half of the best others' overhead", ours <= other / 2, numbers)


def _predicted(model: ModelResult) -> Check:
    errors = [(model.wall_overhead(row) - (row.predicted_overhead or 0.0), row.name) for row in model.ours]
    worst, where = max(errors, key=lambda error: abs(error[0]))
    numbers = (
        f"measured less predicted at most {_points(worst)} ({where}), on average "
        f"{_points(statistics.fmean(error for error, _ in errors))}; rank correlation {model.rank_correlation:.2f}"
    )
    return Check(
        "predicted overhead within two points of the measured one, by the wall clock",
        abs(worst) <= POINTS,
        numbers,
    )


def _step_time(model: ModelResult) -> Check:
    measured_s = statistics.median(second for row in model.of_kind("none") for second in row.wall_s)
    off = model.predicted_step_s / measured_s - 1
    numbers = f"{model.predicted_step_s * 1e3:.0f} ms against {measured_s * 1e3:.0f} ms: {off:+.1%}"
    return Check(f"predicted step time within {STEP:.0%} of the measured one", abs(off) <= STEP, numbers)


def _again(model: ModelResult) -> Check:
    first = [row.predicted_overhead or 0.0 for row in model.ours]
    pairs = list(zip(first, model.predicted_again, strict=True))
    near = [abs(one - other) <= max(AGAIN * max(one, other), LEAST) for one, other in pairs]
    numbers = ", ".join(f"{one:.1%} and {other:.1%}" for one, other in pairs)
    text = f"two profiles' plans predict overheads within {AGAIN:.0%} of each other, or {_points(LEAST)}"
    return Check(text, all(near), numbers)


def _points(fraction: float) -> str:
    return f"{fraction * 100:+.1f} points"


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.0f} MB"
