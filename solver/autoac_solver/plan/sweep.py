"""Plans for many budgets in ascending order: a plan fits every larger budget, so the next search starts from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoac_solver.optimise.greedy import Greedy
from autoac_solver.plan.choices import Choice, Choices
from autoac_solver.plan.curve import Point
from autoac_solver.problem.problem import SAVE
from autoac_solver.problem.solution import Solution
from autoac_solver.records.arguments import Tell
from autoac_solver.records.errors import AutoacError, InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.format import format_bytes


def feasible_range(choices: Choices, time_limit_s: float) -> tuple[int, int]:
    """The least feasible budget, and the peak with nothing recomputed."""
    simulator = choices[0].prepared.simulator
    most = int(simulator.live_bytes(np.full(len(simulator.problem.groups), SAVE)).max())
    resident_bytes = choices.profile.resident_bytes
    try:
        choices.best(resident_bytes, time_limit_s, 1e-3)
    except InfeasibleBudgetError as error:
        return error.minimum_bytes, most
    return resident_bytes, most


def sweep(
    choices: Choices,
    budgets_bytes: Sequence[int],
    time_limit_s: float,
    gap: float,
    tell: Tell,
    keep: bool = True,
) -> tuple[tuple[Point, ...], tuple[str, ...]]:
    """One point per feasible budget, and notes on missing ones.

    Args:
        time_limit_s: per budget.
        keep: on Ctrl-C, return the points found so far.

    Raises:
        InfeasibleBudgetError, NoPlanInTimeError: there is no plan for any of the budgets.
        KeyboardInterrupt: before the first point was found, or without `keep`.
    """
    budgets_bytes = sorted(set(budgets_bytes))
    found: list[Point] = []
    notes: list[str] = []
    missing: AutoacError | None = None
    last: tuple[Choice, Solution] | None = None
    greedy: dict[tuple[int, ...], Greedy] = {}
    try:
        for index, limit in enumerate(budgets_bytes):
            tell(f"budget {index + 1} of {len(budgets_bytes)}", index / len(budgets_bytes))
            start = time.perf_counter()
            try:
                # Bounds of larger budgets hold for smaller ones, so choices of regions that won must stay in the race.
                won = last is not None and choices.has_further(last[0])
                choice, solution = choices.best(limit, time_limit_s, gap, all_choices=won)
            except (InfeasibleBudgetError, NoPlanInTimeError) as error:
                missing = error
                ruled_out = isinstance(error, InfeasibleBudgetError) and (
                    error.proven or error.bound_bytes > limit
                )
                why = "infeasible" if ruled_out else "no plan found in time"
                notes.append(f"{format_bytes(limit)}: {why}")
                continue
            if last is not None and last[1].objective_s < solution.objective_s:
                # The last plan has a finer choice of regions that was not tried again, and fits this budget, too.
                left_s = max(0.1, time_limit_s - (time.perf_counter() - start))
                choice, bound_s = last[0], solution.bound_s
                solution = choice.solve(limit, gap, left_s)
                solution = solution.bounded(bound_s, gap, choice.built.problem.step_s)
            last = choice, solution
            if choice.calls not in greedy:
                greedy[choice.calls] = Greedy(choice.prepared.simulator)
            found.append(_point(choice, limit, solution, greedy[choice.calls]))
    except KeyboardInterrupt:
        if not found or not keep:
            raise
        notes.append(f"interrupted after {len(found)} of {len(budgets_bytes)} budgets")
    if not found and missing is not None:
        raise missing
    tell("done", 1.0)
    return _with_bounds(found, gap, choices[0].built.problem.step_s), tuple(notes)


def _with_bounds(points: Sequence[Point], gap: float, step_s: float) -> tuple[Point, ...]:
    """Apply the bound of each larger budget to all smaller ones."""
    bound_s, bounded = 0.0, []
    for point in reversed(points):
        bound_s = max(bound_s, point.solution.bound_s)
        bounded.append(replace(point, solution=point.solution.bounded(bound_s, gap, step_s)))
    return tuple(reversed(bounded))


def _point(choice: Choice, limit: int, solution: Solution, greedy: Greedy) -> Point:
    decisions = greedy.plan(limit)
    timeline = None if decisions is None else choice.prepared.simulator.simulate(decisions)
    return Point(
        budget_bytes=limit,
        calls=choice.calls,
        n_regions=len(choice.built.regions),
        solution=solution,
        greedy_peak_bytes=None if timeline is None else timeline.peak_bytes,
        greedy_extra_s=None if timeline is None else timeline.extra_s,
    )
