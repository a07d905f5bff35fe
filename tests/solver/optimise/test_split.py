"""The relaxation, split by how many of some equal regions are wrapped."""

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest

from autoac_solver import NoPlanInTimeError, Problem, RegionCost, Simulator
from autoac_solver.optimise.backends import STOPPED, Backend, Job, SolverResult
from autoac_solver.optimise.formulation import Formulation
from autoac_solver.optimise.ilp import _LeastTime
from autoac_solver.optimise.search import Task
from tests.solver import reference
from tests.solver.generators import random_problem, with_policies

SEEDS = 400
REGIONS = 5


class Stopping:
    """A solver that is out of time after so many programs."""

    def __init__(self, backend: Backend, programs: int) -> None:
        self.name = backend.name
        self._backend, self._left = backend, programs

    def run(self, job: Job) -> SolverResult:
        self._left -= 1
        return self._backend.run(job) if self._left >= 0 else STOPPED


def equal_regions(seed: int) -> Problem:
    """Nine groups in five regions that cost the same to wrap; with policies if the seed is odd."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_groups=9)
    groups = tuple(dataclasses.replace(group, region=i % REGIONS) for i, group in enumerate(problem.groups))
    regions = (RegionCost(rng.uniform(0.3, 1)),) * REGIONS
    problem = dataclasses.replace(problem, groups=groups, regions=regions)
    return with_policies(rng, problem) if seed % 2 else problem


def budgets_and_least_times(problem: Problem) -> Iterator[tuple[int, float]]:
    """Three budgets, each with the objective of the best plan, by exhaustive search."""
    simulator = Simulator(problem)
    choices = reference.all_choices(problem, lambda decisions: simulator.simulate(decisions).peak_bytes)
    peaks = sorted({choice.peak_bytes for choice in choices})
    for budget_bytes in sorted({peaks[len(peaks) * third // 3] for third in range(3)} if peaks else ()):
        fitting = (choice for choice in choices if choice.peak_bytes <= budget_bytes)
        yield budget_bytes, min(choice.objective_s for choice in fitting)


def bound_s(problem: Problem, budget_bytes: int, programs: int = 1000) -> float:
    """What a search without an integer program has computed, not what it reports: that is never above its plan."""
    task = Task(problem, 60.0, "highs", None, None)
    task.backend = Stopping(task.backend, programs)
    search = _LeastTime(task, budget_bytes, 0.0, find_minimum=False)
    try:
        search.solve(rough=True)
    except NoPlanInTimeError:
        assert programs < 1000
    return search.bound_s


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The halves that were looked at."""
    found = []
    split = Formulation.split

    def counted(self, regions, least, most):
        found.append((least, most))
        return split(self, regions, least, most)

    monkeypatch.setattr(Formulation, "split", counted)
    return found


def test_no_plan_is_below_the_bound(splits):
    tried = 0
    for seed in range(SEEDS):
        problem = equal_regions(seed)
        for budget_bytes, least_s in budgets_and_least_times(problem):
            tried += 1
            assert bound_s(problem, budget_bytes) <= least_s * (1 + 1e-9) + 1e-9, (seed, budget_bytes)
    assert tried > 2 * SEEDS
    assert len(splits) > tried / 4


def test_out_of_time_half_a_split_proves_nothing(splits):
    for seed in range(0, SEEDS, 5):
        problem = equal_regions(seed)
        for budget_bytes, least_s in budgets_and_least_times(problem):
            for programs in range(1, 6):
                bound = bound_s(problem, budget_bytes, programs)
                assert bound <= least_s * (1 + 1e-9) + 1e-9, (seed, budget_bytes, programs)
    assert splits


def formulated(seed: int) -> tuple[Task, Formulation]:
    """A problem of which the relaxation wraps a fraction of a region, with all its rows."""
    problem = equal_regions(seed)
    task = Task(problem, 60.0, "highs", None, None)
    budget_bytes = list(budgets_and_least_times(problem))[1][0]
    formulation = task.formulate(budget_bytes)
    formulation.add_rows(range(problem.n_positions))
    return task, formulation


def objective(task: Task, formulation: Formulation) -> float:
    return task.backend.run(Job(formulation.program, False, 0.0, task.deadline)).bound


def test_what_is_split_is_whole_again_afterwards():
    task, formulation = formulated(0)
    whole = objective(task, formulation)
    with formulation.split(range(REGIONS), 4, 5):
        assert objective(task, formulation) > whole
    with pytest.raises(KeyError), formulation.split(range(REGIONS), 4, 5):
        raise KeyError
    assert not formulation.is_split
    assert objective(task, formulation) == pytest.approx(whole, rel=1e-9)


def test_all_decisions_are_points_of_a_program_that_was_split():
    task, formulation = formulated(0)
    with formulation.split(range(REGIONS), 1, 2):
        pass
    simulator, limit = task.simulator, formulation.limit_bytes(np.empty(0))
    choices = reference.all_choices(task.problem, lambda d: simulator.simulate(d).peak_bytes)
    fitting = [choice.decisions for choice in choices if choice.peak_bytes <= limit]
    assert fitting
    for decisions in fitting:
        values = formulation.point(task.variables.of(np.array(decisions)))
        by_name = dict(zip((v.name for v in formulation.program.variables), values, strict=True))
        for row in formulation.program.model.constraints():
            total = sum(factor * by_name[variable.name] for variable, factor in row.items())
            lower, upper = row.getLb(), row.getUb()
            assert lower is None or total >= lower - 1e-9
            assert upper is None or total <= upper + 1e-9
