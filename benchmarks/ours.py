"""Budgets from the least feasible peak to that without checkpointing, and our plan for each."""

from __future__ import annotations

from collections.abc import Sequence

import autoac
from autoac_solver.errors import InfeasibleBudgetError
from autoac_solver.profile import Profile
from benchmarks.models import Workload
from benchmarks.strategies import Strategy


def profiled(workload: Workload) -> Profile:
    """One profile, from which all plans are made."""
    return autoac.profile(workload.model, workload.sample, loss=workload.loss)


def least_budget_bytes(profile: Profile, engine: str) -> int:
    """The least peak of any plan."""
    try:
        return autoac.solve(profile, 1, engine=engine).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        return error.minimum_bytes


def budgets_between(least_bytes: int, most_bytes: int, count: int) -> list[int]:
    """`count` budgets at equal distances, both ends included."""
    return [least_bytes + (most_bytes - least_bytes) * i // max(1, count - 1) for i in range(count)]


def planned(profile: Profile, budgets: Sequence[int], engine: str) -> list[Strategy]:
    """Our plan for each budget."""
    strategies = []
    for number, budget in enumerate(budgets, 1):
        plan = autoac.solve(profile, budget, engine=engine)
        strategies.append(
            Strategy(
                name=f"ours, budget {number}",
                kind="ours",
                install=plan.apply,
                budget_bytes=budget,
                predicted_peak_bytes=plan.predicted_peak_bytes,
                predicted_overhead=plan.predicted_overhead,
            )
        )
    return strategies
