import functools
import itertools
import random

import pytest

from autoac_solver.conditions import FALSE, TRUE, Algebra
from autoac_solver.problem import ALWAYS, Condition, Problem, RegionCost, Unit
from tests.solver import reference
from tests.solver.generators import random_problem


def algebra(*units: Unit) -> Algebra:
    """Of units in two regions; with n units, literal n + 1 is region 0."""
    return Algebra(Problem(1, 0, 1.0, units, (RegionCost(), RegionCost()), ()))


def term(rules: Algebra, *alternatives: tuple[Condition, ...]) -> set[frozenset[int]]:
    return set(rules.term(rules.alternative(*conditions) for conditions in alternatives))


def test_a_recomputed_unit_wraps_its_region():
    rules = algebra(Unit(0, 1.0), Unit(1, 1.0))
    assert rules.alternative(Condition(recomputed=0, wrapped=0)) == {1}
    assert rules.alternative(Condition(recomputed=0, wrapped=1)) == {1, 4}


def test_contradictions_are_impossible():
    rules = algebra(Unit(0, 1.0), Unit(0, 1.0, must_save=True), Unit(0, 1.0, requires=(0,)))
    assert rules.alternative(Condition(recomputed=0, kept=0)) is None
    assert rules.alternative(Condition(recomputed=1)) is None
    assert rules.alternative(Condition(recomputed=2, kept=0)) is None
    assert rules.alternative(Condition(wrapped=1)) is None  # has no unit at all
    assert rules.term([None]) == FALSE


def test_a_unit_that_must_be_saved_is_always_kept():
    rules = algebra(Unit(0, 1.0), Unit(0, 1.0, must_save=True), Unit(0, 1.0, requires=(1,)))
    assert rules.alternative(Condition(kept=1)) == frozenset()
    assert rules.alternative(Condition(kept=2)) == frozenset()


def test_units_decided_alike_share_a_literal():
    rules = algebra(Unit(0, 1.0), Unit(0, 1.0, same_as=0), Unit(1, 1.0, same_as=1))
    assert rules.alternative(Condition(recomputed=2, kept=-1)) == {1}
    assert rules.alternative(Condition(recomputed=2, kept=1)) is None
    assert rules.alternative(Condition(recomputed=0, wrapped=1)) == {1}  # by unit 2


def test_units_that_require_each_other_share_a_literal():
    rules = algebra(Unit(0, 1.0, requires=(1,)), Unit(0, 1.0, requires=(2,)), Unit(0, 1.0, requires=(0,)))
    assert rules.twin == [0, 0, 0]


def test_alternatives_are_merged():
    rules = algebra(Unit(0, 1.0), Unit(0, 1.0))
    recomputed, kept = (Condition(recomputed=0),), (Condition(kept=0),)
    other = Condition(recomputed=1)
    assert rules.term([rules.alternative(*recomputed), rules.alternative(*kept)]) == TRUE
    assert term(rules, recomputed, (other, *recomputed)) == {frozenset({1})}
    assert term(rules, kept, (other, *recomputed)) == {frozenset({-1}), frozenset({2})}
    assert term(rules, (other, *kept), (other, *recomputed)) == {frozenset({2})}


@pytest.mark.parametrize("seed", range(300))
def test_a_term_is_true_when_one_of_its_conditions_holds(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, n_units=rng.randint(1, 5))
    rules = Algebra(problem)
    used = [c for i in problem.instances for c in (i.exists, *(h.when for h in i.holders))] + [ALWAYS]
    alternatives = [rng.sample(used, min(len(used), rng.choice((1, 2)))) for _ in range(rng.randint(1, 5))]
    simple = [rules.alternative(*conditions) for conditions in alternatives]
    result = rules.term(simple)
    one_by_one = functools.reduce(rules.joined, simple, FALSE)
    for recomputed in itertools.product((False, True), repeat=len(problem.units)):
        if reference.permitted(problem, recomputed):
            wrapped = [reference.is_wrapped(problem, k, recomputed) for k in range(len(problem.regions))]
            truth = [*recomputed, *wrapped]
            expected = any(all(reference.holds(problem, c, recomputed) for c in a) for a in alternatives)
            for found in (result, one_by_one):
                assert any(all(truth[abs(x) - 1] == (x > 0) for x in a) for a in found) == expected
