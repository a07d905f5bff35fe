"""Solves a problem: the plan that adds the least time within a budget, and the plan with the least peak."""

from __future__ import annotations

from collections.abc import Callable

from autoac_solver.problem import Problem
from autoac_solver.search import LeastPeak, LeastTime, Progress, Task
from autoac_solver.simulator import Decisions
from autoac_solver.solution import Solution


def solve(
    problem: Problem,
    budget_bytes: int,
    *,
    gap: float = 1e-3,
    time_limit_s: float = 60.0,
    solver: str = "auto",
    start: Decisions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The plan that adds the least time to the step among those whose peak is within a budget.

    Args:
        problem: not changed.
        budget_bytes: for the peak, resident bytes included.
        gap: how far from the least time it may be, as a fraction of the step's time.
        time_limit_s: for everything together; kept to within a second.
        solver: "highs", "cbc" or "auto".
        start: decisions to begin with, a bool per unit; the solution is not worse. Ignored if they break the budget.
        progress: is called after each program solved.

    Returns:
        The best plan found, its peak recounted by the simulator; `status` says whether the gap was closed.

    Raises:
        InfeasibleBudgetError: no plan is within the budget.
        NoPlanInTimeError: none was found in time.
    """
    return LeastTime(Task(problem, time_limit_s, solver, start, progress), budget_bytes, gap).solve()


def minimum_peak(
    problem: Problem,
    *,
    time_limit_s: float = 60.0,
    solver: str = "auto",
    start: Decisions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """A plan with the least peak; among those it need not be the fastest.

    Args:
        problem, time_limit_s, solver, start, progress: as in `solve`.

    Returns:
        The plan; "optimal" means that no plan has a peak of even one byte less. It proves nothing about time, so
        `bound_s` is 0.
    """
    return LeastPeak(Task(problem, time_limit_s, solver, start, progress)).solve()
