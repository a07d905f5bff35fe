"""Solves a problem: the plan that adds the least time within a budget, and the plan with the least peak."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from autoac_solver.optimise.backends import Outcome
from autoac_solver.optimise.formulation import Formulation
from autoac_solver.optimise.greedy import Greedy
from autoac_solver.optimise.search import WHOLE, Plan, Prepared, Progress, Search, Task, worst_positions
from autoac_solver.problem.prices import priced
from autoac_solver.problem.problem import SAVE, Problem
from autoac_solver.problem.simulator import Decisions
from autoac_solver.problem.solution import CLOSED, Solution
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.format import format_bytes, format_seconds

_GREEDY_S = 5.0
"""Seconds that must be left for a greedy plan, which nobody stops once it has begun."""

_MOST_PATHS = 4
"""How often prices are taken from another path."""
_LEAST_SHARE = 0.5
"""What must be left of the time, as a share of what has passed, for another search."""


class RuledOut(Exception):
    """No plan is within the budget; what would be was not asked for."""


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
    """The plan that adds the least time to the step among those whose peak is within a budget.

    Args:
        problem: not changed. To solve it for several budgets, pass one `Prepared(problem)`: they share the work.
        budget_bytes: for the peak, resident bytes included.
        gap: how far from the least time it may be, as a fraction of the step's time.
        time_limit_s: for everything together; kept to within a second.
        solver: "highs", "cbc" or "auto".
        start: the option of each group to begin with; the solution is not worse. Ignored if they break the budget.
        progress: is called after each program solved.
        rough: leave out the integer program if linear ones have led to a plan; the gap may then be larger than asked.
        find_minimum: find out what budget would do if this one does not.

    Returns:
        The best plan found, its peak recounted by the simulator; `status` says whether the gap was closed.

    Raises:
        InfeasibleBudgetError: no plan is within the budget.
        RuledOut: the same, without `find_minimum`.
        NoPlanInTimeError: none was found in time.
    """
    task = Task(problem, time_limit_s, solver, start, progress)
    found = _LeastTime(task, budget_bytes, gap, find_minimum).solve(rough)
    return (
        _along_other_paths(task, found, budget_bytes, gap, solver)
        if task.problem.work and not rough
        else found
    )


def _along_other_paths(task: Task, found: Solution, budget_bytes: int, gap: float, solver: str) -> Solution:
    """The same search with prices of the found plan's longest path, while that helps; see `priced`."""
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
    """A plan with the least peak; among those it need not be the fastest.

    Args:
        problem, time_limit_s, solver, start, progress: as in `solve`.

    Returns:
        The plan; "optimal" means that no plan has a peak of even one byte less. It proves nothing about time, so
        `bound_s` is 0.
    """
    return _LeastPeak(Task(problem, time_limit_s, solver, start, progress)).solve()


class _LeastTime(Search):
    """The plan that adds the least time within a budget.

    Args:
        task: the problem and the means.
        budget_bytes, gap, find_minimum: as in `solve`.
    """

    def __init__(self, task: Task, budget_bytes: int, gap: float, find_minimum: bool) -> None:
        super().__init__(task)
        self._is_minimum_asked = find_minimum
        self._budget_bytes = budget_bytes
        self._gap_s = gap * task.problem.step_s

    def is_better(self, plan: Plan) -> bool:
        if plan.timeline.peak_bytes > self._budget_bytes:
            return False
        return self.best is None or plan.timeline.objective_s < self.best.timeline.objective_s

    def learn(self, formulation: Formulation, outcome: Outcome) -> None:
        if formulation.minimise_time and not formulation.is_split and np.isfinite(outcome.bound):
            self.bound_s = max(self.bound_s, formulation.seconds(outcome.bound))

    def solve(self, rough: bool) -> Solution:
        """See the function `solve`."""
        plans = [self.consider(decisions) for decisions in self.task.simple_plans()]
        if not self._closed() and self.task.in_time():
            formulation = self.task.formulate(self._budget_bytes)
            formulation.add_rows(self.task.prepared.positions)
            for plan in plans:
                if plan is not None:
                    formulation.add_rows(worst_positions(plan.timeline.live_bytes, self._budget_bytes))
            self._solve(formulation, rough)
            self.task.prepared.positions = formulation.positions
        return self._solution()

    def _solve(self, formulation: Formulation, rough: bool) -> None:
        """The relaxation, what is near it, its two halves, and the integer program if that leaves a gap."""
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
            if not self._is_minimum_asked:
                raise RuledOut
            self._find_minimum()

    def _reach(self, formulation: Formulation) -> str:
        """Look for any plan within the budget, however slow, and keep more in it.

        Roundings on the way to the least peak get there within a few linear programs where those on the way to the
        least time do not, for they recompute too little; if they do not either, any plan takes fewer rounds than the
        fastest one.

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
        """Where the relaxation wraps 12.5 of many equal regions: relax at most 12 of them, and at least 13.

        Every plan lies in one of the halves, so what is out of reach in both is out of reach; and in each, wrapping is
        paid a whole number of times. Solvers branch on single regions, which says nothing while there is another one
        like it.
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
                return  # the bound of one half alone holds for no more than that
            bounds_s.append(formulation.seconds(outcome.bound))  # infinite if there is nothing in this half
            if outcome.values is not None and not self._is_enough(bounds_s[-1]):
                self._thin_out(formulation.decisions(outcome.values))
        # The best plan is in one of them: that there is nothing in both can only be a rounding error.
        if math.isfinite(min(bounds_s)):
            self.bound_s = max(self.bound_s, min(bounds_s))
        self.tell("relaxation", formulation)

    def _equal_regions_in_part(self, wrapped: np.ndarray) -> list[int] | None:
        """The regions to count in `_split`: equally costly to wrap, and together not wrapped a whole number of times.

        Of several such groups the one where the difference to a whole number costs most, None if there is none. Any
        group would do for the bound, so costs need not be equal to the last digit.
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
        """Save nothing that the relaxation does not save wholly, then take back what can be, regions first.

        Equal layers make it recompute a little in each, and pay a little of each wrapping, where a plan recomputes more
        in some; roundings do not find those.
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
        """The groups of each fractional region, then each fractional group; first what the relaxation wants least."""
        groups = self.task.problem.groups
        region_of = np.array([group.region for group in groups])
        for region in np.argsort(regions, kind="stable"):
            if WHOLE < regions[region] < 1 - WHOLE:
                yield np.flatnonzero(region_of == region)
        time_s = np.array([max(option.time_s for option in group.options) for group in groups])
        for group in np.lexsort((-time_s, np.round(not_saved, 2))):
            if WHOLE < not_saved[group] < 1 - WHOLE:
                yield np.array([group])

    def _fits(self, decisions: np.ndarray) -> Plan | None:
        """The plan of decisions if they are permitted and within the budget."""
        plan = self.consider(decisions)
        return plan if plan is not None and plan.timeline.peak_bytes <= self._budget_bytes else None

    def _find_minimum(self) -> None:
        """No plan fits, says the solver: find out what would."""
        search = _LeastPeak(self.task)
        if self.lowest is not None:
            search.consider(self.lowest.decisions)
        least = search.solve()
        assert search.lowest is not None
        # Only if the solver was wrong by a rounding error is there a plan after all; then it is as good as any.
        if self.consider(search.lowest.decisions) is None or self.best is None:
            raise InfeasibleBudgetError(
                budget_bytes=self._budget_bytes,
                minimum_bytes=least.peak_bytes,
                proven=least.status == "optimal",
                decisions=least.decisions,
                peak_position=search.lowest.timeline.peak_position,
            )

    def _closed(self) -> bool:
        """Whether the best plan is proved to be within the gap."""
        return self._is_enough(self.bound_s)

    def _is_enough(self, bound_s: float) -> bool:
        """Whether no plan that takes at least so long is faster than the best one by more than the gap."""
        if self.best is None:
            return False
        return self.best.timeline.objective_s - bound_s <= self._gap_s + CLOSED * self.task.problem.step_s

    def _solution(self) -> Solution:
        if self.best is None:
            assert self.lowest is not None
            least = format_bytes(self.lowest.timeline.peak_bytes)
            raise NoPlanInTimeError(
                f"No plan within {format_bytes(self._budget_bytes)} was found in "
                f"{format_seconds(self.task.elapsed_s())}, and none was ruled out; the least peak seen is {least}. "
                "Give more time (time_limit_s) or a larger budget."
            )
        return self.task.solution(self.best, proven=self._closed(), bound_s=self.bound_s)


class _LeastPeak(Search):
    """A plan with the least peak.

    Args:
        task: the problem and the means.
    """

    def is_better(self, plan: Plan) -> bool:
        return self.best is None or plan.timeline.peak_bytes < self.best.timeline.peak_bytes

    def solve(self) -> Solution:
        """See the function `minimum_peak`."""
        for decisions in self.task.simple_plans():
            self.consider(decisions)
        if not self.task.in_time():
            return self.task.solution(self._plan(), proven=False, bound_s=0.0)
        formulation = self.task.formulate(None)
        formulation.add_rows(self.near_peak())
        outcome = self.relax(formulation)
        if self.best is None:  # groups of several options may require of each other what no simple plan has
            self.find(formulation, "least peak")
        floor_bytes = 0 if outcome.values is None else int(formulation.limit_bytes(outcome.values))
        proven = self._close_in(formulation.positions, floor_bytes)
        return self.task.solution(self._plan(), proven=proven, bound_s=0.0)

    def _plan(self) -> Plan:
        """The best plan; recomputing nothing that need not be is always one."""
        assert self.best is not None
        return self.best

    def _close_in(self, positions: set[int], floor_bytes: int) -> bool:
        """Look for a plan of one byte less; while there is one, look half-way down, and for one byte less again.

        The peak as an objective would do in one go, but solvers see far less in it than in a budget: that there is no
        plan within one byte less often takes them no search at all.

        Args:
            positions: to begin with rows at.
            floor_bytes: the least peak is hardly below; an estimate, proofs do not rest on it.

        Returns:
            Whether the best plan was proved to be that in time.
        """
        aim_bytes = self._plan().timeline.peak_bytes - 1
        while self.task.in_time():
            below = self.task.formulate(aim_bytes, minimise_time=False)
            below.add_rows(positions | {self._plan().timeline.peak_position})
            result = self.find(below, "least peak")
            one_less = self._plan().timeline.peak_bytes - 1
            if result == "stopped" or (result == "infeasible" and aim_bytes == one_less):
                return result == "infeasible"
            if result == "infeasible":
                floor_bytes, aim_bytes = aim_bytes + 1, one_less
            else:
                aim_bytes = min(one_less, (floor_bytes + one_less) // 2)
            positions = below.positions
        return False
