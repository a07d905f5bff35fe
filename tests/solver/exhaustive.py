"""The ILP held against exhaustive search that the simulator judges."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import pytest

from autoac_solver import (
    InfeasibleBudgetError,
    Problem,
    Simulator,
    minimum_peak,
    simulate,
    solve,
    violations,
)
from tests.solver import reference
from tests.solver.reference import Choice

Budgets = Callable[[Sequence[Choice], int], Iterable[int]]
"""Budgets to try, from all permitted decisions and the least peak of any."""

ROUNDING = 1e-7
"""Of the step: what a plan at gap 0 may be from the bound that the solver gives, in floating numbers."""


def assert_agrees_with_exhaustive_search(problem: Problem, budgets: Budgets, solver: str) -> int:
    """The least peak, and the least extra time at some budgets; returns at how many."""
    simulator = Simulator(problem)
    choices = reference.all_choices(problem, lambda decisions: simulator.simulate(decisions).peak_bytes)
    if not choices and problem.resources:
        with pytest.raises(ValueError, match="no decisions keep to"):
            minimum_peak(problem, solver=solver)
        with pytest.raises(ValueError, match="no decisions keep to"):
            solve(problem, 10**12, solver=solver)
        return 0
    minimum_bytes = min(choice.peak_bytes for choice in choices)
    least = minimum_peak(problem, solver=solver)
    assert (least.status, least.peak_bytes) == ("optimal", minimum_bytes)
    assert simulate(problem, least.decisions).peak_bytes == minimum_bytes
    assert not violations(problem, least.decisions)
    tried = 0
    for budget_bytes in budgets(choices, minimum_bytes):
        tried += 1
        feasible = [choice.extra_s for choice in choices if choice.peak_bytes <= budget_bytes]
        if not feasible:
            with pytest.raises(InfeasibleBudgetError) as caught:
                solve(problem, budget_bytes, gap=0, solver=solver)
            assert (caught.value.minimum_bytes, caught.value.proven) == (minimum_bytes, True)
            continue
        solution = solve(problem, budget_bytes, gap=0, solver=solver)
        assert solution.status == "optimal" or solution.gap <= ROUNDING
        assert solution.extra_s == pytest.approx(min(feasible), rel=1e-9, abs=1e-12)
        assert solution.bound_s <= min(feasible) * (1 + 1e-9)
        assert simulate(problem, solution.decisions).peak_bytes == solution.peak_bytes <= budget_bytes
        assert not violations(problem, solution.decisions)
    return tried


def budgets_around(rng: random.Random) -> Budgets:
    """The least possible, one byte less, the middle, and one byte less than something possible."""

    def budgets(choices: Sequence[Choice], minimum_bytes: int) -> Iterable[int]:
        peaks = sorted({choice.peak_bytes for choice in choices})
        return sorted({minimum_bytes, minimum_bytes - 1, peaks[len(peaks) // 2], rng.choice(peaks) - 1})

    return budgets
