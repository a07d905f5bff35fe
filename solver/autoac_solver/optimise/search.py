"""The search for plans: programs with few memory rows, solved and extended until the simulator agrees.

NOTE [ Rows on demand ]
A planned step has a position for each op, and a memory row for each would make the program too large for a solver in
seconds: Checkmate (Jain et al., MLSys 2020) has a row for each pair of a stage and an op. Few positions are ever tight,
so rows are added where a solution exceeds the budget, as cutting planes are (Dantzig, Fulkerson and Johnson, 1954).

Two searches share the same rounds. A program starts with memory rows at the positions where simple plans exceed the
budget. First its linear relaxation is solved, with rows added where the fractional solution exceeds the budget, until
it exceeds it nowhere. Then the integer program is solved and the simulator recounts the solution; where that exceeds
the budget, rows are added and the program is solved again. A program with a subset of the rows is a relaxation, so its
bound holds for the problem, and any plan that the simulator accepts is feasible.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoac_solver.optimise.algebra import Algebra, Variables
from autoac_solver.optimise.apart import run_apart
from autoac_solver.optimise.backends import INFEASIBLE, STOPPED, Job, SolverResult, choose_backend
from autoac_solver.optimise.formulation import Formulation
from autoac_solver.optimise.memory import MemoryModel
from autoac_solver.problem.problem import Problem
from autoac_solver.problem.simulator import Decisions, Simulator, Timeline
from autoac_solver.problem.solution import Solution
from autoac_solver.problem.validate import validate

_ROWS_A_ROUND = 128
"""Approximate number of memory rows added per round, spread over the positions."""
_ROUNDS_OF_TOPS = 4
"""After this many relaxations rows are added on slopes, too: where each op of a long loop holds a little less than the
one before it, every round would only move the highest position on by one."""
_ROWS_ON_SLOPES = 16
"""Number of memory rows then added per round, spread over all positions above the limit."""
_ROUNDINGS = 12
"""Number of thresholds at which a fractional solution is rounded."""
_NEAR_PEAK = 0.95
"""When minimising the peak, positions above this share of the peak (without resident bytes) get a memory row."""
WHOLE = 1e-3
"""Fractional decisions this close to 0 or 1 count as integers."""


Phase = Literal["relaxation", "reach", "plan", "least peak"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a search.

    Args:
        phase: the kind of program being solved.
        round: integer programs solved so far.
        rows: memory rows in the last program.
        extra_s: seconds added by the best plan so far, None while there is none.
        bound_s: no plan within the budget adds less.
        least_peak_bytes: the least peak of any plan seen, within the budget or not, None while there is none.
        elapsed_s: seconds since the start.
    """

    phase: Phase
    round: int
    rows: int
    extra_s: float | None
    bound_s: float
    least_peak_bytes: int | None
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class Simulated:
    """Decisions, the option of each group, and their simulated timeline."""

    decisions: np.ndarray
    timeline: Timeline


class Prepared:
    """A problem with everything that solving derives from it, shared by several budgets.

    Args:
        problem: not changed.

    Attributes:
        positions: where the last search needed memory rows; the next one starts with these.
    """

    def __init__(self, problem: Problem) -> None:
        validate(problem)
        self.problem = problem
        self.algebra = Algebra(problem)
        self.memory = MemoryModel(problem, self.algebra)
        self.simulator = Simulator(problem)
        self.positions: set[int] = set()


class Task:
    """State that searches share: the prepared problem, the solver, the clock, and the plans to start from.

    Args:
        problem, time_limit_s, solver, start, progress: as in `ilp.solve`.
    """

    def __init__(
        self,
        problem: Problem | Prepared,
        time_limit_s: float,
        solver: str,
        start: Decisions | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.began = time.monotonic()
        self.deadline = self.began + time_limit_s
        self.backend = choose_backend(solver)
        self.prepared = problem if isinstance(problem, Prepared) else Prepared(problem)
        self.problem = self.prepared.problem
        self.algebra, self.memory = self.prepared.algebra, self.prepared.memory
        self.simulator = self.prepared.simulator
        if start is not None and len(start) != len(self.problem.groups):
            raise ValueError(
                f"start has {len(start)} decisions, the problem {len(self.problem.groups)} groups"
            )
        self.progress = progress
        self.rounds = 0
        self.start = start

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def shorten(self, share: float) -> None:
        """Leave at most a share of the whole time limit from now on."""
        self.deadline = min(self.deadline, time.monotonic() + share * (self.deadline - self.began))

    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    def simple_plans(self) -> Iterator[np.ndarray]:
        """Plans to start from: save as much as permitted, save as little as permitted, and the caller's start."""
        possible = [self.algebra.possible(group) for group in range(len(self.problem.groups))]
        yield np.array([options[0] for options in possible], dtype=np.int8)
        yield np.array([options[-1] for options in possible], dtype=np.int8)
        if self.start is not None:
            yield np.array(self.start, dtype=np.int8)

    def formulate(self, budget_bytes: int | None, *, minimise_time: bool = True) -> Formulation:
        return Formulation(self.problem, self.algebra, self.memory, budget_bytes, minimise_time=minimise_time)

    def solution(self, plan: Simulated, *, proven: bool, bound_s: float) -> Solution:
        """The solution made of a plan and its bound."""
        objective_s, step_s = plan.timeline.objective_s, self.problem.step_s
        # A bound from a program solved to tolerances may lie a rounding error above the plan.
        bound_s = min(bound_s, objective_s)
        return Solution(
            decisions=tuple(plan.decisions.tolist()),
            status="optimal" if proven else "feasible",
            peak_bytes=plan.timeline.peak_bytes,
            extra_s=plan.timeline.extra_s,
            bound_s=bound_s,
            gap=(objective_s - bound_s) / step_s if step_s > 0 else 0.0,
            solver=self.backend.name,
            rounds=self.rounds,
            solve_s=self.elapsed_s(),
            hint_s=plan.timeline.hint_s,
        )

    @property
    def variables(self) -> Variables:
        """The variables of groups and regions."""
        return self.algebra.variables


class Search:
    """The rounds that both searches share.

    Attributes:
        best: the best plan so far, by the objective of the search.
        lowest: the plan with the least peak so far.
        bound_s: no plan within the budget adds fewer seconds, hints included.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.best: Simulated | None = None
        self.lowest: Simulated | None = None
        self.bound_s = 0.0

    def is_better(self, plan: Simulated) -> bool:
        """Whether a plan should replace `best`."""
        raise NotImplementedError

    def learn(self, formulation: Formulation, outcome: SolverResult) -> None:
        """Update the bounds from a solver's outcome."""

    def consider(self, decisions: np.ndarray) -> Simulated | None:
        """Simulate decisions and update `best` and `lowest`; None if they break a rule."""
        if self.task.simulator.violations(decisions):
            return None
        plan = Simulated(decisions, self.task.simulator.simulate(decisions))
        if self.lowest is None or plan.timeline.peak_bytes < self.lowest.timeline.peak_bytes:
            self.lowest = plan
        if self.is_better(plan):
            self.best = plan
        return plan

    def near_peak(self) -> list[int]:
        """The positions at which the lowest plan is near its peak."""
        if self.lowest is None:
            return []
        timeline, resident_bytes = self.lowest.timeline, self.task.problem.resident_bytes
        limit = resident_bytes + _NEAR_PEAK * (timeline.peak_bytes - resident_bytes)
        return worst_positions(timeline.live_bytes, limit)

    def relax(self, formulation: Formulation) -> SolverResult:
        """Add rows until the relaxation is within the budget everywhere; consider its roundings on the way."""
        memory = self.task.memory
        rounds = 0
        while True:
            outcome = self._run(formulation, "relaxation")
            if outcome.values is None:
                return outcome
            values = formulation.decisions(outcome.values)
            for rounded in self._roundings(values):
                self.consider(rounded)
            live_bytes = memory.live_bytes(memory.evaluate(values))
            limit_bytes = formulation.limit_bytes(outcome.values)
            if not formulation.add_rows(worst_positions(live_bytes, limit_bytes)):
                return outcome
            rounds += 1
            if rounds >= _ROUNDS_OF_TOPS:
                formulation.add_rows(spread_positions(live_bytes, limit_bytes))

    def find(
        self, formulation: Formulation, phase: Phase, gap: float = 0.0
    ) -> Literal["found", "infeasible", "stopped"]:
        """Add rows until the integer program's solution is within the budget.

        Args:
            gap: absolute, in units of the objective.
        """
        rounds = 0
        while True:
            outcome = self._run(formulation, phase, gap)
            if outcome.values is None:
                return "infeasible" if outcome.status == "infeasible" else "stopped"
            values = formulation.decisions(outcome.values)
            variables = self.task.variables
            decided = variables.rounded(values, variables.not_saved(values) > 0.5)
            plan = self.consider(decided)
            if plan is None:
                if formulation.add_covers_of_resources(variables.of(decided)):
                    continue
                return "stopped"
            limit_bytes = formulation.limit_bytes(outcome.values)
            broken = worst_positions(plan.timeline.live_bytes, limit_bytes)
            if not broken:
                return "found"
            if not formulation.add_rows(broken):
                formulation.add_covers(broken, self.task.variables.of(plan.decisions))
            rounds += 1
            if rounds >= _ROUNDS_OF_TOPS:
                formulation.add_rows(spread_positions(plan.timeline.live_bytes, limit_bytes))

    def _run(self, formulation: Formulation, phase: Phase, gap: float = 0.0) -> SolverResult:
        """Solve a program and report progress."""
        if formulation.impossible:
            return INFEASIBLE
        if not self.task.in_time():
            return STOPPED
        integer = phase != "relaxation"
        start = self._start_values(formulation) if integer else None
        job = Job(formulation.program, integer, gap, self.task.deadline, start)
        if integer and not formulation.minimise_peak and not formulation.is_split:
            outcome = run_apart(self.task.backend, job, formulation.counts, formulation.lone)
        else:
            outcome = self.task.backend.run(job)
        self.task.rounds += integer
        self.learn(formulation, outcome)
        self.tell(phase, formulation)
        return outcome

    def _start_values(self, formulation: Formulation) -> np.ndarray | None:
        """The best plan as the solver's values, None if the program does not allow it."""
        if self.best is None or not formulation.allows(self.best.timeline.peak_bytes):
            return None
        return formulation.point(self.task.variables.of(self.best.decisions))

    def tell(self, phase: Phase, formulation: Formulation) -> None:
        """Call the progress callback."""
        if self.task.progress is None:
            return
        progress = Progress(
            phase=phase,
            round=self.task.rounds,
            rows=len(formulation.positions),
            extra_s=self.best.timeline.extra_s if self.best else None,
            bound_s=self.bound_s,
            least_peak_bytes=self.lowest.timeline.peak_bytes if self.lowest else None,
            elapsed_s=self.task.elapsed_s(),
        )
        self.task.progress(progress)

    def _roundings(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """Fractional decisions rounded at several thresholds, from fewest saved groups to most."""
        variables = self.task.variables
        not_saved = variables.not_saved(values)
        thresholds = np.unique(np.round(not_saved[not_saved > WHOLE], 3))
        chosen = (
            np.unique(np.linspace(0, len(thresholds) - 1, _ROUNDINGS).astype(int)) if len(thresholds) else []
        )
        for threshold in thresholds[chosen]:
            # Half a rounding step below, because the threshold may have been rounded up.
            yield variables.rounded(values, not_saved >= threshold - 5e-4)


def spread_positions(live_bytes: np.ndarray, limit_bytes: float) -> list[int]:
    """Positions above a limit, evenly chosen from all of them."""
    above = np.flatnonzero(live_bytes > limit_bytes)
    return above[np.linspace(0, len(above) - 1, _ROWS_ON_SLOPES).astype(int)].tolist() if len(above) else []


def worst_positions(live_bytes: np.ndarray, limit_bytes: float) -> list[int]:
    """Positions of local maxima above a limit, at most one per neighbourhood, highest first."""
    spread = len(live_bytes) // _ROWS_A_ROUND + 1
    left = np.array(live_bytes, dtype=np.float64)
    chosen = []
    while left[position := int(np.argmax(left))] > limit_bytes:
        near = slice(max(0, position - spread), position + spread + 1)
        # Blanking the neighbourhood of a higher position leaves slopes, whose tops are not local maxima.
        if live_bytes[position] >= live_bytes[near].max():
            chosen.append(position)
        left[near] = -np.inf
    return chosen
