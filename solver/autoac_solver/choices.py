"""The choices of regions to plan with, each built once and solved for as many budgets as one likes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from autoac_solver.build import build
from autoac_solver.errors import InfeasibleBudgetError, ProfilingError
from autoac_solver.ilp import solve
from autoac_solver.profile import Profile
from autoac_solver.report import describe_position, holders_at, suggestions
from autoac_solver.search import Prepared
from autoac_solver.solution import Solution

_MANY_UNITS = 1000


class Choice:
    """One choice of regions, and what is known about it so far.

    Args:
        profile: what is planned for.
        calls: the module calls that are regions.
        engine: "replay" or "sac".
    """

    def __init__(self, profile: Profile, calls: Sequence[int], engine: str) -> None:
        self.calls = tuple(calls)
        self.built = build(profile, calls, engine)
        self.prepared = Prepared(self.built.problem)
        self._start: tuple[bool, ...] | None = None
        self._infeasible: InfeasibleBudgetError | None = None

    def solve(self, limit: int, gap: float, time_limit_s: float) -> Solution:
        """The best plan within a limit, not slower than the last one found if that is within the limit.

        Raises:
            InfeasibleBudgetError: there is none.
        """
        known = self._infeasible
        if known is not None and known.proven and limit < known.minimum_bytes:
            raise InfeasibleBudgetError(
                limit, known.minimum_bytes, True, known.recomputed, known.peak_position
            )
        try:
            solution = solve(self.prepared, limit, gap=gap, time_limit_s=time_limit_s, start=self._start)
        except InfeasibleBudgetError as error:
            self._infeasible, self._start = error, error.recomputed
            raise
        self._start = solution.recomputed
        return solution


class Choices:
    """The choices of regions of a profile, from coarse to fine; each is built when it is first looked at.

    Args:
        profile, engine: as for `Choice`.
        calls: the module calls of each choice.
    """

    def __init__(self, profile: Profile, calls: Sequence[Sequence[int]], engine: str) -> None:
        self.profile = profile
        self.engine = engine
        self._calls = calls
        self._made: list[Choice] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> Choice:
        while len(self._made) <= index:
            self._made.append(Choice(self.profile, self._calls[len(self._made)], self.engine))
        return self._made[index]

    def best(
        self,
        limit: int,
        time_limit_s: float,
        gap: float,
        tell: Callable[[str, float], None] = lambda *_: None,
    ) -> tuple[Choice, Solution]:
        """The fastest plan within a limit: from coarse to fine, as long as finer choices help.

        Coarse regions are nearly always the faster ones, so in large models the first choice that fits is taken.

        Raises:
            InfeasibleBudgetError: for the choice with the least possible peak.
        """
        deadline = time.perf_counter() + time_limit_s
        best: tuple[Choice, Solution] | None = None
        infeasible: tuple[Choice, InfeasibleBudgetError] | None = None
        for index in range(len(self)):
            tell(f"solving with {len(self._calls[index])} regions", index / len(self))
            choice = self[index]
            try:
                solution = choice.solve(limit, gap, max(0.1, deadline - time.perf_counter()))
            except InfeasibleBudgetError as error:
                if infeasible is None or error.minimum_bytes < infeasible[1].minimum_bytes:
                    infeasible = choice, error
                continue
            if best is not None and solution.extra_s >= best[1].extra_s:
                break
            best = choice, solution
            problem = choice.built.problem
            if solution.extra_s <= gap * problem.step_s or len(problem.units) > _MANY_UNITS:
                break
        if best is not None:
            return best
        if infeasible is None:
            raise ProfilingError(
                "no module of the profiled step has anything to recompute, so there is nothing to plan."
            )
        raise self._described(*infeasible)

    def _described(self, choice: Choice, error: InfeasibleBudgetError) -> InfeasibleBudgetError:
        """The error, with what holds the peak and what would lower it."""
        profile, built = self.profile, choice.built
        error.where = describe_position(profile, built, error.peak_position)
        error.holders = holders_at(profile, built, error.recomputed, error.peak_position)[:10]
        error.suggestions = suggestions(error.holders, finer_regions=len(self) == 1)
        return error
