import random

import numpy as np
import pytest

from autoac_solver import ALWAYS, Condition, Holder, Instance, Problem, RegionCost, Unit
from autoac_solver.conditions import Algebra
from autoac_solver.memory import MemoryModel
from tests.solver import reference
from tests.solver.generators import random_problem


def model(problem: Problem) -> MemoryModel:
    return MemoryModel(problem, Algebra(problem))


def problem_of(*instances: Instance, units: int = 2) -> Problem:
    return Problem(10, 100, 1.0, tuple(Unit(0, 1.0) for _ in range(units)), (RegionCost(),), instances)


def row(problem: Problem, position: int) -> tuple[int, dict[int, int]]:
    found = model(problem).row(position)
    return found.constant_bytes, dict(zip(found.literals.tolist(), found.bytes.tolist(), strict=True))


def test_single_literals_are_coefficients():
    problem = problem_of(
        Instance(7, 0, 1, ALWAYS, (Holder(5, Condition(kept=0)),)), Instance(3, 0, 5, Condition(recomputed=1))
    )
    assert row(problem, 0) == (107, {2: 3})
    assert row(problem, 1) == (100, {-1: 7, 2: 3})


def test_both_copies_of_one_storage_are_a_constant():
    problem = problem_of(
        Instance(7, 0, 1, ALWAYS, (Holder(5, Condition(kept=0)),)), Instance(9, 3, 5, Condition(recomputed=0))
    )
    assert row(problem, 4) == (107, {1: 2})


def test_one_auxiliary_variable_for_all_positions_and_storages_of_a_condition():
    holders = (Holder(6, Condition(recomputed=1, kept=0)),)
    problem = problem_of(Instance(7, 0, 1, ALWAYS, holders), Instance(5, 2, 3, ALWAYS, holders))
    memory = model(problem)
    assert row(problem, 1) == (100, {4: 7})  # variables 1 and 2 are units, 3 is the region
    assert row(problem, 5) == (100, {4: 12})
    assert memory.auxiliary_term(4) == {frozenset({-1, 2})}


def test_readers_fall_away_one_after_the_other():
    holders = (Holder(8, Condition(recomputed=1)), Holder(5, Condition(recomputed=0)))
    problem = problem_of(Instance(7, 0, 1, ALWAYS, holders))
    assert row(problem, 0) == (107, {})
    assert list(row(problem, 4)[1].values()) == [7]
    assert model(problem).auxiliary_term(next(iter(row(problem, 4)[1]))) == {frozenset({1}), frozenset({2})}
    assert row(problem, 5) == (100, {2: 7})
    assert row(problem, 8) == (100, {})


def test_relaxation_is_the_largest_alternative():
    holders = (Holder(5, Condition(recomputed=1, kept=0)), Holder(5, Condition(recomputed=2, kept=0)))
    memory = model(problem_of(Instance(8, 0, 1, ALWAYS, holders), units=3))
    values = memory.evaluate(np.array([0.25, 0.5, 1.0, 1.0]))
    assert values.tolist() == [0.25, 0.5, 1.0, 1.0, 0.75]
    assert memory.live_bytes(values)[:6].tolist() == [108, 106, 106, 106, 106, 100]


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_definition_at_whole_numbers(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    memory = model(problem)
    for _ in range(5):
        recomputed = [rng.random() < 0.3 for _ in problem.units]
        if not reference.permitted(problem, recomputed):
            continue
        wrapped = [reference.is_wrapped(problem, k, recomputed) for k in range(len(problem.regions))]
        values = memory.evaluate(np.array([*recomputed, *wrapped], dtype=float))
        expected = reference.live_bytes(problem, recomputed)
        assert memory.live_bytes(values) == pytest.approx(expected, rel=1e-12)
        for position in range(problem.n_positions):
            found = memory.row(position)
            true = (values[np.abs(found.literals) - 1] > 0.5) == (found.literals > 0)
            assert found.constant_bytes + int(found.bytes[true].sum()) == expected[position]
