"""Solve a problem: the plan that adds the least time within a budget, and the plan with the least peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autoac_solver.optimise.backends import SolverResult
from autoac_solver.optimise.formulation import Formulation
from autoac_solver.optimise.greedy import Greedy
from autoac_solver.optimise.search import WHOLE, Prepared, Progress, Search, Simulated, Task, worst_positions
from autoac_solver.problem.prices import priced
from autoac_solver.problem.problem import SAVE, Problem
from autoac_solver.problem.simulator import Decisions
from autoac_solver.problem.solution import CLOSED, Solution
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.format import format_bytes, format_seconds

_GREEDY_S = 5.0
"""A greedy plan starts only if this many seconds are left, because it cannot be interrupted."""

_LEAST_BUDGET_SHARE = 1 / 6
"""Largest share of the time limit for finding the least budget, once the requested one is ruled out."""
_MOST_PATHS = 4
"""Most searches with prices of another path."""
_LEAST_SHARE = 0.5
"""Another search starts only if the time left is at least this share of the time spent."""


class RuledOut(Exception):
    """No plan is within the budget, and the least budget was not requested."""


def solve(
    problem: Problem | Prepared,
    budget_bytes: int,
    *,
    gap: float = 1e-3,
    time_limit_s: float = 60.0,
    solver: str = "auto",
    start: Decisions | None = None,
    progress: Callable[[Progress], None] | None = None,
    rough: bool = False,
    find_minimum: bool = True,
) -> Solution:
    """Find the plan that adds the least time to the step with its peak within a budget.

    Args:
        problem: not changed. To solve it for several budgets, pass one `Prepared(problem)`: they share the setup.
        budget_bytes: limit of the peak, resident bytes included.
        gap: accepted distance from the least time, as a fraction of the step's time.
        time_limit_s: total time limit; kept to within a second.
        solver: "highs", "cbc" or "auto".
        start: decisions to start from, the option of each group; the solution is not worse. Ignored if its peak exceeds
            the budget.
        progress: called after each program solved.
        rough: skip the integer program if linear programs led to a plan; the gap may then be larger than requested.
        find_minimum: if the budget is infeasible, find the least budget.

    Returns:
        The best plan found, its peak recounted by the simulator; `status` says whether the gap was closed.

    Raises:
        InfeasibleBudgetError: no plan is within the budget.
        RuledOut: the same, without `find_minimum`.
        NoPlanInTimeError: no plan was found in time.
        ValueError: no plan keeps to the limits of the problem's resources, whatever the budget.
    """
    task = Task(problem, time_limit_s, solver, start, progress)
    found = _LeastTime(task, budget_bytes, gap, find_minimum).solve(rough)
    return (
        _along_other_paths(task, found, budget_bytes, gap, solver)
        if task.problem.work and not rough
        else found
    )


def _along_other_paths(task: Task, found: Solution, budget_bytes: int, gap: float, solver: str) -> Solution:
    """Repeat the search with prices of the plan's longest path while plan or bound improve; see `priced`."""
    rounds, step_s = found.rounds, task.problem.step_s
    for _ in range(_MOST_PATHS):
        if found.status == "optimal" or task.left_s() < _LEAST_SHARE * task.elapsed_s():
            break
        problem, slack_s = priced(task.problem, task.simulator.work_done(found.decisions))
        again = Task(Prepared(problem), task.left_s(), solver, found.decisions, None)
        other = _LeastTime(again, budget_bytes, gap, find_minimum=False).solve(rough=False)
        rounds += other.rounds
        bound_s = max(found.bound_s, other.bound_s - slack_s)
        is_better = other.objective_s < found.objective_s - CLOSED * step_s
        is_closer = bound_s > found.bound_s + CLOSED * step_s
        best = other if is_better else found
        found = replace(best, rounds=rounds, solve_s=task.elapsed_s()).bounded(bound_s, gap, step_s)
        if not (is_better or is_closer):
            break
    return found


def minimum_peak(
    problem: Problem | Prepared,
    *,
    time_limit_s: float = 60.0,
    solver: str = "auto",
    start: Decisions | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find a plan with the least peak; it need not be the fastest of those.

    Args:
        problem, time_limit_s, solver, start, progress: as in `solve`.

    Returns:
        The plan; "optimal" means that no plan has a lower peak, not by a single byte. Nothing is proved about time, so
        `bound_s` is 0.

    Raises:
        ValueError: no plan keeps to the limits of the problem's resources.
        NoPlanInTimeError: no plan was found in time.
    """
    return _LeastPeak(Task(problem, time_limit_s, solver, start, progress)).solve()


class _LeastTime(Search):
    """Search for the plan that adds the least time within a budget.

    Args:
        task: the problem, solver and clock.
        budget_bytes, gap, find_minimum: as in `solve`.
    """

    def __init__(self, task: Task, budget_bytes: int, gap: float, find_minimum: bool) -> None:
        super().__init__(task)
        self._is_minimum_asked = find_minimum
        self._budget_bytes = budget_bytes
        self._gap_s = gap * task.problem.step_s

    def is_better(self, plan: Simulated) -> bool:
        if plan.timeline.peak_bytes > self._budget_bytes:
            return False
        return self.best is None or plan.timeline.objective_s < self.best.timeline.objective_s

    def learn(self, formulation: Formulation, outcome: SolverResult) -> None:
        if formulation.minimise_time and not formulation.is_split and np.isfinite(outcome.bound):
            self.bound_s = max(self.bound_s, formulation.seconds(outcome.bound))

    def solve(self, rough: bool) -> Solution:
        """See the function `solve`."""
        plans = [self.consider(decisions) for decisions in self.task.simple_plans()]
        if self.task.memory.floor_bytes > self._budget_bytes:
            self._rule_out()
        elif not self._closed() and self.task.in_time():
            formulation = self.task.formulate(self._budget_bytes)
            formulation.add_rows(self.task.prepared.positions)
            for plan in plans:
                if plan is not None:
                    formulation.add_rows(worst_positions(plan.timeline.live_bytes, self._budget_bytes))
            self._solve(formulation, rough)
            self.task.prepared.positions = formulation.positions
        return self._solution()

    def _solve(self, formulation: Formulation, rough: bool) -> None:
        """Solve the relaxation, plans near it, its two halves, and the integer program if a gap remains."""
        outcome = self.relax(formulation)
        if outcome.values is not None:
            self._thin_out(formulation.decisions(outcome.values))
        result = outcome.status
        if result != "infeasible" and self.best is None:
            result = self._reach(formulation)
        if outcome.values is not None and self.best is not None and not self._closed():
            self._split(formulation, formulation.decisions(outcome.values))
        if result != "infeasible" and not self._closed() and not (rough and self.best is not None):
            result = self.find(formulation, "plan", self._gap_s * formulation.cost_per_s)
        if result == "infeasible" and self.best is None:
            self._rule_out()

    def _reach(self, formulation: Formulation) -> str:
        """Find any plan within the budget, however slow, then save more values in it.

        Roundings of relaxations that minimise time recompute too little. Roundings of those that minimise the peak
        usually reach the budget within a few linear programs. If they do not, finding any plan takes fewer rounds than
        finding the fastest one.

        Returns:
            As `find`.
        """
        if not self.task.in_time():
            return "stopped"
        lowest = self.task.formulate(None)
        lowest.add_rows(self.near_peak())
        self.relax(lowest)
        formulation.add_rows(lowest.positions)
        if self.best is None:
            if not self.task.in_time():
                return "stopped"
            reaching = self.task.formulate(self._budget_bytes, minimise_time=False)
            reaching.add_rows(formulation.positions)
            result = self.find(reaching, "reach")
            formulation.add_rows(reaching.positions)
            if self.best is None:
                return result
        if self.task.left_s() > _GREEDY_S:
            faster = Greedy(self.task.simulator).plan(self._budget_bytes, self.best.decisions)
            assert faster is not None, "it starts within the budget"
            self.consider(faster)
        return "found"

    def _split(self, formulation: Formulation, values: np.ndarray) -> None:
        """If the relaxation wraps 12.5 of many equal regions, solve it with at most 12 of them, and with at least 13.

        Every plan lies in one of the halves, so the smaller of the two bounds holds for all plans. In each half,
        wrapping is paid a whole number of times. Solvers branch on single regions, which improves no bound while an
        equal region can take its place.
        """
        wrapped = self.task.variables.regions(values)
        regions = self._equal_regions_in_part(wrapped)
        if regions is None:
            return
        count, bounds_s = wrapped[regions].sum(), []
        for least, most in ((0, math.floor(count)), (math.ceil(count), len(regions))):
            with formulation.split(regions, least, most):
                outcome = self.relax(formulation)
            if outcome.status == "stopped":
                return  # One half's bound does not hold for the other half.
            bounds_s.append(formulation.seconds(outcome.bound))  # Infinite if this half is infeasible.
            if outcome.values is not None and not self._is_enough(bounds_s[-1]):
                self._thin_out(formulation.decisions(outcome.values))
        # A plan is known, so two infeasible halves can only be a rounding error.
        if math.isfinite(min(bounds_s)):
            self.bound_s = max(self.bound_s, min(bounds_s))
        self.tell("relaxation", formulation)

    def _equal_regions_in_part(self, wrapped: np.ndarray) -> list[int] | None:
        """The regions that `_split` counts: of equal wrapping cost, and with a fractional number of them wrapped.

        Among several such sets, the one whose distance from a whole number costs most; None if there is none. The bound
        is valid for any set, so costs are compared to three digits only.
        """
        wrap_s = np.array([float(f"{region.wrap_s:.3g}") for region in self.task.problem.regions])
        found, most_s = None, 0.0
        for cost_s in np.unique(wrap_s):
            group = np.flatnonzero(wrap_s == cost_s)
            count = wrapped[group].sum()
            difference = abs(count - round(count))
            if difference > WHOLE and difference * cost_s > most_s:
                found, most_s = group.tolist(), difference * cost_s
        return found

    def _thin_out(self, values: np.ndarray) -> None:
        """Recompute every group that the relaxation recomputes at all, then save groups again, whole regions first.

        With equal layers the relaxation recomputes a fraction in each and pays a fraction of each wrapping. A plan
        recomputes more in a few of them; roundings do not find such plans.
        """
        variables = self.task.variables
        not_saved = variables.not_saved(values)
        fitting = self._fits(variables.rounded(values, not_saved > WHOLE)) or self.best
        for groups in self._partly_saved(not_saved, variables.regions(values)):
            if fitting is None or self._closed() or not self.task.in_time():
                return
            thinner = fitting.decisions.copy()
            thinner[groups] = SAVE
            fitting = self._fits(thinner) or fitting

    def _partly_saved(self, not_saved: np.ndarray, regions: np.ndarray) -> Iterator[np.ndarray]:
        """The groups of each fractional region, then each fractional group, by increasing relaxation value."""
        groups = self.task.problem.groups
        region_of = np.array([group.region for group in groups])
        for region in np.argsort(regions, kind="stable"):
            if WHOLE < regions[region] < 1 - WHOLE:
                yield np.flatnonzero(region_of == region)
        time_s = np.array([max(option.time_s for option in group.options) for group in groups])
        for group in np.lexsort((-time_s, np.round(not_saved, 2))):
            if WHOLE < not_saved[group] < 1 - WHOLE:
                yield np.array([group])

    def _fits(self, decisions: np.ndarray) -> Simulated | None:
        """The plan if the decisions are permitted and within the budget, else None."""
        plan = self.consider(decisions)
        return plan if plan is not None and plan.timeline.peak_bytes <= self._budget_bytes else None

    def _rule_out(self) -> None:
        """Find the least budget after the budget was found infeasible.

        Raises:
            RuledOut: it is not asked for.
            InfeasibleBudgetError: unless the plan of the least peak is within the budget.
        """
        if not self._is_minimum_asked:
            raise RuledOut
        search = _LeastPeak(self.task)
        search.bound_bytes = max(search.bound_bytes, self._budget_bytes + 1)
        if self.lowest is not None:
            search.consider(self.lowest.decisions)
        self.task.shorten(_LEAST_BUDGET_SHARE)
        least = search.solve()
        assert search.lowest is not None
        # A plan within the budget exists only if the solver made a rounding error; then it is the result.
        if self.consider(search.lowest.decisions) is None or self.best is None:
            raise InfeasibleBudgetError(
                budget_bytes=self._budget_bytes,
                minimum_bytes=least.peak_bytes,
                proven=least.status == "optimal",
                decisions=least.decisions,
                peak_position=search.lowest.timeline.peak_position,
                bound_bytes=search.bound_bytes,
            )

    def _closed(self) -> bool:
        """Whether the best plan is proved to be within the requested gap."""
        return self._is_enough(self.bound_s)

    def _is_enough(self, bound_s: float) -> bool:
        """Whether a lower bound proves the best plan to be within the requested gap."""
        if self.best is None:
            return False
        return self.best.timeline.objective_s - bound_s <= self._gap_s + CLOSED * self.task.problem.step_s

    def _solution(self) -> Solution:
        if self.best is None:
            lowest = self.lowest
            seen = f"; the least peak seen is {format_bytes(lowest.timeline.peak_bytes)}" if lowest else ""
            raise NoPlanInTimeError(
                f"No plan within {format_bytes(self._budget_bytes)} was found in "
                f"{format_seconds(self.task.elapsed_s())}, and none was ruled out{seen}. "
                "Give more time (time_limit_s) or a larger budget."
            )
        return self.task.solution(self.best, proven=self._closed(), bound_s=self.bound_s)


class _LeastPeak(Search):
    """Search for a plan with the least peak.

    Args:
        task: the problem, solver and clock.

    Attributes:
        bound_bytes: no plan has a lower peak.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.bound_bytes = task.memory.floor_bytes

    def is_better(self, plan: Simulated) -> bool:
        return self.best is None or plan.timeline.peak_bytes < self.best.timeline.peak_bytes

    def learn(self, formulation: Formulation, outcome: SolverResult) -> None:
        if formulation.minimise_peak and np.isfinite(outcome.bound):
            self.bound_bytes = max(self.bound_bytes, formulation.least_peak_bytes(outcome.bound))

    def solve(self) -> Solution:
        """See the function `minimum_peak`."""
        for decisions in self.task.simple_plans():
            self.consider(decisions)
        if self.best is not None and self.best.timeline.peak_bytes == self.bound_bytes:
            return self.task.solution(self.best, proven=True, bound_s=0.0)
        if not self.task.in_time() and self.best is not None:
            return self.task.solution(self.best, proven=False, bound_s=0.0)
        formulation = self.task.formulate(None)
        formulation.add_rows(self.near_peak())
        outcome = self.relax(formulation)
        if (
            self.best is None
        ):  # Requirements of groups of several options, or limits, can rule out all simple plans.
            self._find_any(formulation)
        floor_bytes = 0 if outcome.values is None else int(formulation.limit_bytes(outcome.values))
        proven = self._close_in(formulation.positions, floor_bytes)
        return self.task.solution(self._plan(), proven=proven, bound_s=0.0)

    def _find_any(self, formulation: Formulation) -> None:
        """Find a first plan.

        Raises:
            ValueError: no decisions keep to the limits of the problem's resources.
            NoPlanInTimeError: none was found in time.
        """
        result = self.find(formulation, "least peak")
        if result == "infeasible":
            resources = self.task.problem.resources
            limits = [f"{format_bytes(resource.limit_bytes)} of {resource.name}" for resource in resources]
            rules = " and ".join(limits) or "all that the options require"
            raise ValueError(f"no decisions keep to {rules}, whatever the budget.")
        if self.best is None:
            raise NoPlanInTimeError(
                "No plan was found in time, and none was ruled out. Give more time (time_limit_s)."
            )

    def _plan(self) -> Simulated:
        """The best plan; `_find_any` has found one, at the latest."""
        assert self.best is not None
        return self.best

    def _close_in(self, positions: set[int], floor_bytes: int) -> bool:
        """Bisect between the best peak and a floor, and prove that one byte below the best peak is infeasible.

        Minimising the peak would take a single program, but solvers handle a peak in the objective much worse than a
        budget: they often refute a budget of one byte less without any search.

        Args:
            positions: where memory rows are added first.
            floor_bytes: estimate below the least peak; no proof depends on it.

        Returns:
            Whether the best plan was proved to have the least peak in time.
        """
        aim_bytes = self._plan().timeline.peak_bytes - 1
        while self.task.in_time():
            below = self.task.formulate(aim_bytes, minimise_time=False)
            below.add_rows(positions | {self._plan().timeline.peak_position})
            result = self.find(below, "least peak")
            one_less = self._plan().timeline.peak_bytes - 1
            if result == "infeasible":
                self.bound_bytes = max(self.bound_bytes, aim_bytes + 1)
            if result == "stopped" or (result == "infeasible" and aim_bytes == one_less):
                return result == "infeasible"
            if result == "infeasible":
                floor_bytes, aim_bytes = aim_bytes + 1, one_less
            else:
                aim_bytes = min(one_less, (floor_bytes + one_less) // 2)
            positions = below.positions
        return False
