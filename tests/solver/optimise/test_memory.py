import random

import numpy as np
import pytest

from autoac_solver import ALWAYS, Extension, Lifetime, Problem, RegionCost, save_or_recompute
from autoac_solver.optimise.algebra import Algebra
from autoac_solver.optimise.memory import MemoryModel
from autoac_solver.problem.problem import SAVE, when_recomputed, when_saved
from tests.solver import reference
from tests.solver.generators import random_problem


def model(problem: Problem) -> MemoryModel:
    return MemoryModel(problem, Algebra(problem))


def problem_of(*lifetimes: Lifetime, groups: int = 2) -> Problem:
    return Problem(
        10, 100, 1.0, tuple(save_or_recompute(0, 1.0) for _ in range(groups)), (RegionCost(),), lifetimes
    )


def row(problem: Problem, position: int) -> tuple[int, dict[int, int]]:
    found = model(problem).row(position)
    return found.constant_bytes, dict(zip(found.literals.tolist(), found.bytes.tolist(), strict=True))


def test_single_literals_are_coefficients():
    problem = problem_of(
        Lifetime(7, 0, 1, ALWAYS, (Extension(5, when_saved(0)),)), Lifetime(3, 0, 5, when_recomputed(1))
    )
    assert row(problem, 0) == (107, {2: 3})
    assert row(problem, 1) == (100, {-1: 7, 2: 3})


def test_both_copies_of_one_storage_are_a_constant():
    problem = problem_of(
        Lifetime(7, 0, 1, ALWAYS, (Extension(5, when_saved(0)),)), Lifetime(9, 3, 5, when_recomputed(0))
    )
    assert row(problem, 4) == (107, {1: 2})
    assert model(problem).floor_bytes == 107


def test_one_auxiliary_variable_for_all_positions_and_storages_of_a_condition():
    extensions = (Extension(6, when_recomputed(1) & when_saved(0)),)
    problem = problem_of(Lifetime(7, 0, 1, ALWAYS, extensions), Lifetime(5, 2, 3, ALWAYS, extensions))
    memory = model(problem)
    assert row(problem, 1) == (100, {4: 7})  # variables 1 and 2 are groups, 3 is the region
    assert row(problem, 5) == (100, {4: 12})
    assert memory.auxiliary_term(4) == {frozenset({-1, 2})}


def test_readers_fall_away_one_after_the_other():
    extensions = (Extension(8, when_recomputed(1)), Extension(5, when_recomputed(0)))
    problem = problem_of(Lifetime(7, 0, 1, ALWAYS, extensions))
    assert row(problem, 0) == (107, {})
    assert list(row(problem, 4)[1].values()) == [7]
    assert model(problem).auxiliary_term(next(iter(row(problem, 4)[1]))) == {frozenset({1}), frozenset({2})}
    assert row(problem, 5) == (100, {2: 7})
    assert row(problem, 8) == (100, {})


def test_relaxation_is_the_largest_alternative():
    extensions = (
        Extension(5, when_recomputed(1) & when_saved(0)),
        Extension(5, when_recomputed(2) & when_saved(0)),
    )
    memory = model(problem_of(Lifetime(8, 0, 1, ALWAYS, extensions), groups=3))
    values = memory.evaluate(np.array([0.25, 0.5, 1.0, 1.0]))
    assert values.tolist() == [0.25, 0.5, 1.0, 1.0, 0.75]
    assert memory.live_bytes(values)[:6].tolist() == [108, 106, 106, 106, 106, 100]


@pytest.mark.parametrize("most_options", [2, 4])
@pytest.mark.parametrize("seed", range(150))
def test_equals_the_definition_at_whole_numbers(seed, most_options):
    rng = random.Random(seed)
    problem = random_problem(rng, most_options=most_options)
    algebra = Algebra(problem)
    memory = MemoryModel(problem, algebra)
    for _ in range(5):
        decisions = [rng.randrange(len(g.options)) if rng.random() < 0.4 else SAVE for g in problem.groups]
        if not reference.permitted(problem, decisions):
            continue
        values = memory.evaluate(algebra.variables.of(np.array(decisions)))
        expected = reference.live_bytes(problem, decisions)
        assert memory.live_bytes(values) == pytest.approx(expected, rel=1e-12)
        assert memory.floor_bytes <= max(expected)
        assert memory.floor_bytes == max(
            memory.row(position).constant_bytes for position in range(problem.n_positions)
        )
        for position in range(problem.n_positions):
            found = memory.row(position)
            true = (values[np.abs(found.literals) - 1] > 0.5) == (found.literals > 0)
            assert found.constant_bytes + int(found.bytes[true].sum()) == expected[position]
