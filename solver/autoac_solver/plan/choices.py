"""The choices of regions to plan with; each is built once and solved for any number of budgets."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from autoac_solver.build.stacking import stacked
from autoac_solver.optimise.ilp import RuledOut, solve
from autoac_solver.optimise.search import Prepared
from autoac_solver.plan.partitions import partitions
from autoac_solver.plan.recorded.report import (
    about_caches,
    about_flat_containers,
    about_old_gradients,
    about_torchs_loss,
    describe_position,
    holders_at,
    suggestions,
)
from autoac_solver.problem.problem import SAVE
from autoac_solver.problem.simulator import simulate
from autoac_solver.problem.solution import Solution
from autoac_solver.records.arguments import Tell
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError, PolicyError, ProfilingError
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile

FURTHER_ABOVE = 0.1
"""Further choices are tried if the best plan adds this share of the step or more."""


class Choice:
    """One choice of regions, with results of earlier searches.

    Args:
        profile: the profile to plan for.
        calls: the module calls that are regions.
        engine: the engine's name.
        policies: the user's policies.
    """

    def __init__(
        self, profile: Profile, calls: Sequence[int], engine: str, policies: Sequence[Policy] = ()
    ) -> None:
        self.calls = tuple(calls)
        self.stack = stacked(profile, calls, engine, policies)
        self.built = self.stack.built
        self.prepared = Prepared(self.built.problem)
        self._start: tuple[int, ...] | None = None
        self._infeasible: InfeasibleBudgetError | None = None
        self._ruled_out = -1  # The largest limit known to be infeasible.

    def solve(
        self, limit: int, gap: float, time_limit_s: float, rough: bool = False, find_minimum: bool = True
    ) -> Solution:
        """Find the best plan within a limit; not slower than the previous plan if that is within the limit.

        Args:
            rough, find_minimum: see `ilp.solve`.

        Raises:
            InfeasibleBudgetError, RuledOut: no plan is within the limit.
        """
        known = self._infeasible
        if known is not None and known.proven and limit < known.minimum_bytes:
            raise InfeasibleBudgetError(
                limit, known.minimum_bytes, True, known.decisions, known.peak_position
            )
        if limit <= self._ruled_out and not find_minimum:
            raise RuledOut
        try:
            solution = solve(
                self.prepared,
                limit,
                gap=gap,
                time_limit_s=time_limit_s,
                start=self._start,
                rough=rough,
                find_minimum=find_minimum,
            )
        except InfeasibleBudgetError as error:
            self._infeasible, self._start = error, error.decisions
            raise
        except RuledOut:
            self._ruled_out = limit
            raise
        self._start = solution.decisions
        return self._without_needless_chunks(solution, limit)

    def _without_needless_chunks(self, solution: Solution, limit: int) -> Solution:
        """The solution with the loss computed as a whole, if chunks are free and the limit does not ask for them."""
        loss, decisions = self.built.loss, list(solution.decisions)
        if loss < 0 or decisions[loss] == SAVE:
            return solution
        group = self.built.problem.groups[loss]
        saved, chunked = group.options[SAVE], group.options[decisions[loss]]
        if chunked.time_s > 0.0 or saved.hint_s != chunked.hint_s or not group.permits(SAVE):
            return solution
        decisions[loss] = SAVE
        found = simulate(self.built.problem, decisions)
        if found.peak_bytes > limit or found.extra_s > solution.extra_s:
            return solution
        return replace(solution, decisions=tuple(decisions), peak_bytes=found.peak_bytes)


class Choices:
    """The choices of regions of a profile, from coarse to fine, built on first access.

    Args:
        profile, engine: as for `Choice`.
        calls: the regions of each choice: module calls or parts, indices of `Profile.spans`.
        further: of choices that are tried only if no plan with those before adds less than `FURTHER_ABOVE`.
        policies: the user's policies; choices under which they cannot be followed are dropped when built.
    """

    def __init__(
        self,
        profile: Profile,
        calls: Sequence[Sequence[int]],
        engine: str,
        policies: Sequence[Policy] = (),
        further: Sequence[Sequence[int]] = (),
    ) -> None:
        self.profile = profile
        self.engine = engine
        self.policies = tuple(policies)
        self._all_calls, self._further = calls, further
        self._calls = [*calls, *further]
        self._n_first = len(calls)  # Without further ones.
        self._refused: PolicyError | None = None  # Why the first choice was dropped.
        self._made: list[Choice] = []
        self._longest_s = 0.0  # Longest time to build one of them.

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: int) -> Choice:
        while len(self._made) <= index:
            self._build()
        return self._made[index]

    @property
    def built(self) -> tuple[Choice, ...]:
        """The choices built so far."""
        return tuple(self._made)

    def _build(self) -> None:
        """Build the next choice, or drop it if the policies cannot be followed under it.

        Raises:
            PolicyError: every choice was dropped; the error of the coarsest.
        """
        start, index = time.perf_counter(), len(self._made)
        try:
            self._made.append(Choice(self.profile, self._calls[index], self.engine, self.policies))
        except PolicyError as error:
            self._refused = self._refused or error
            del self._calls[index]
            self._n_first -= index < self._n_first
            if not self._calls:
                raise self._refused from None
        self._longest_s = max(self._longest_s, time.perf_counter() - start)

    def best(
        self,
        limit: int,
        time_limit_s: float,
        gap: float,
        tell: Tell = lambda *_: None,
        *,
        all_choices: bool = False,
    ) -> tuple[Choice, Solution]:
        """Find the fastest plan within a limit.

        First the choices are solved roughly, from coarse to fine, until one adds no time (within the gap). Then they
        are solved to the gap, except those whose bound already rules out a faster plan. If time suffices, more memory
        never gives a plan that is slower by more than the gap, as long as the same choices are tried.

        The bound and the status of the solution hold over the choices that were tried.

        Once there is a plan, a further choice gets half of the remaining time, because solving to the gap takes time,
        too. Further choices are skipped if building them, which cannot be interrupted, would take all of it.

        Args:
            limit: bytes.
            all_choices: try the further ones in any case.

        Raises:
            InfeasibleBudgetError: no plan fits; describes the choice with the least possible peak.
            NoPlanInTimeError: no plan was found, and at least one choice was not ruled out.
            PolicyError: the policies cannot be followed under any choice; raised before any solving.
        """
        deadline = time.perf_counter() + time_limit_s

        def left_s() -> float:
            return max(0.1, deadline - time.perf_counter())

        def is_late(needed_s: float = 0.0) -> bool:
            return time.perf_counter() + needed_s > deadline

        index = 0
        rough: list[tuple[Choice, Solution]] = []
        infeasible: tuple[Choice, InfeasibleBudgetError] | None = None
        proven = True
        least_bytes: list[int] = []  # of each choice that was ruled out: no plan of it has a lower peak
        late: NoPlanInTimeError | None = None
        while index < len(self):
            if index == self._n_first and not all_choices and self._suffices(rough):
                break
            if index and is_late(self._building_s(index) * (2 if rough else 1)):
                break
            tell(f"solving with {len(self._calls[index])} regions", index / len(self) / 2)
            if index == len(self._made):
                self._build()
                continue
            choice = self._made[index]
            index += 1
            floor_bytes = choice.prepared.memory.floor_bytes
            if infeasible is not None and floor_bytes >= max(infeasible[1].minimum_bytes, limit + 1):
                least_bytes.append(floor_bytes)
                continue
            try:
                seconds = left_s() / 2 if rough else left_s()
                solution = choice.solve(limit, gap, seconds, rough=True, find_minimum=not rough)
            except RuledOut:
                continue
            except InfeasibleBudgetError as error:
                proven &= error.proven
                least_bytes.append(error.bound_bytes)
                if infeasible is None or error.minimum_bytes < infeasible[1].minimum_bytes:
                    infeasible = choice, error
                continue
            except NoPlanInTimeError as error:
                late = late or error
                continue
            rough.append((choice, solution))
            if solution.objective_s <= gap * choice.built.problem.step_s:
                break
        best: tuple[Choice, Solution] | None = None
        # Choices that were not solved have no bound. Those that add more than the gap are solved, unless time is up.
        bound_s = 0.0 if late is not None or index < min(self._n_first, len(self)) else math.inf
        for done, (choice, solution) in enumerate(sorted(rough, key=lambda found: found[1].objective_s)):
            gap_s = gap * choice.built.problem.step_s
            if best is not None and solution.bound_s >= best[1].objective_s - gap_s:
                bound_s = min(bound_s, solution.bound_s)
                continue
            if solution.status != "optimal" and not is_late():
                tell(f"solving with {len(choice.calls)} regions", (1 + done / len(rough)) / 2)
                solution = choice.solve(limit, gap, left_s())
            bound_s = min(bound_s, solution.bound_s)
            if best is None or solution.objective_s < best[1].objective_s:
                best = choice, solution
        if best is not None:
            choice, solution = best
            return choice, solution.bounded(bound_s, gap, choice.built.problem.step_s)
        if late is not None:
            raise late
        if infeasible is None:
            raise ProfilingError(
                "no module of the profiled step has anything to recompute, so there is nothing to plan."
            )
        error = self._described(infeasible[0], copy.copy(infeasible[1]), left_s())
        error.proven = proven and index == len(self)
        error.bound_bytes = min(least_bytes) if index == len(self) else 0
        raise error

    @staticmethod
    def _suffices(rough: Sequence[tuple[Choice, Solution]]) -> bool:
        """Whether further choices are not worth their time."""
        return any(s.objective_s < FURTHER_ABOVE * choice.built.problem.step_s for choice, s in rough)

    def has_further(self, choice: Choice) -> bool:
        """Whether a choice of this object is one of the further ones."""
        return self._made.index(choice) >= self._n_first

    def _building_s(self, index: int) -> float:
        """Estimated seconds to build a choice, from those built so far; 0 if it is built."""
        return 0.0 if index < len(self._made) else self._longest_s

    def _described(
        self, choice: Choice, error: InfeasibleBudgetError, time_limit_s: float
    ) -> InfeasibleBudgetError:
        """Add to the error: holders of the peak, suggestions to lower it, and the effect of the policies."""
        profile, built = self.profile, choice.built
        error.where = describe_position(profile, built, error.peak_position)
        error.holders = holders_at(profile, built, error.decisions, error.peak_position)[:10]
        named = len(self._all_calls) == 1 and list(self._all_calls) != partitions(profile, self.engine)
        error.suggestions = suggestions(error.holders, named, error.where, is_compiled=bool(built.points))
        abouts = (
            about_old_gradients(profile, built, error.peak_position),
            about_caches(profile, self.engine),
            about_torchs_loss(profile, error.where),
            "" if self._further else about_flat_containers(profile),
        )
        error.suggestions = (*filter(None, abouts), *error.suggestions)
        error.policies = tuple(str(policy) for policy in self.policies if policy.is_must)
        if error.policies:
            error.minimum_without_policies_bytes = self._least_without_policies(time_limit_s)
        return error

    def _least_without_policies(self, time_limit_s: float) -> int:
        """The least feasible budget without policies; 0 if it was not found in time."""
        if time_limit_s < 2 * self._longest_s:
            return 0
        free = Choices(self.profile, self._all_calls, self.engine, further=self._further)
        try:
            return free.best(self.profile.resident_bytes, time_limit_s, 1.0)[1].peak_bytes
        except InfeasibleBudgetError as error:
            return error.minimum_bytes if error.proven else 0
        except NoPlanInTimeError:
            return 0
