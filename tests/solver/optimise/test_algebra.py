import functools
import itertools
import random

import numpy as np
import pytest

from autoac_solver.optimise.algebra import FALSE, TRUE, Algebra
from autoac_solver.problem.problem import (
    ALWAYS,
    Condition,
    DecisionGroup,
    Problem,
    RegionCost,
    save_or_recompute,
    when_recomputed,
    when_saved,
    when_wrapped,
)
from tests.solver import reference
from tests.solver.generators import random_problem


def algebra(*groups: DecisionGroup) -> Algebra:
    """Of groups in two regions; with n groups, literal n + 1 is region 0."""
    return Algebra(Problem(1, 0, 1.0, groups, (RegionCost(), RegionCost()), ()))


def term(rules: Algebra, *alternatives: tuple[Condition, ...]) -> set[frozenset[int]]:
    return set(rules.term(rules.alternative(*conditions) for conditions in alternatives))


def test_a_recomputed_group_wraps_its_region():
    rules = algebra(save_or_recompute(0, 1.0), save_or_recompute(1, 1.0))
    assert rules.alternative(when_recomputed(0) & when_wrapped(0)) == {1}
    assert rules.alternative(when_recomputed(0) & when_wrapped(1)) == {1, 4}


def test_contradictions_are_impossible():
    rules = algebra(
        save_or_recompute(0, 1.0),
        save_or_recompute(0, 1.0, must_save="fixed"),
        save_or_recompute(0, 1.0, requires=(0,)),
    )
    assert rules.alternative(when_recomputed(0) & when_saved(0)) is None
    assert rules.alternative(when_recomputed(1)) is None
    assert rules.alternative(when_recomputed(2) & when_saved(0)) is None
    assert rules.alternative(when_wrapped(1)) is None  # has no group at all
    assert rules.term([None]) == FALSE


def test_a_group_that_must_be_saved_is_always_kept():
    rules = algebra(
        save_or_recompute(0, 1.0),
        save_or_recompute(0, 1.0, must_save="fixed"),
        save_or_recompute(0, 1.0, requires=(1,)),
    )
    assert rules.alternative(when_saved(1)) == frozenset()
    assert rules.alternative(when_saved(2)) == frozenset()


def test_groups_decided_alike_share_a_literal():
    rules = algebra(
        save_or_recompute(0, 1.0), save_or_recompute(0, 1.0, same_as=0), save_or_recompute(1, 1.0, same_as=1)
    )
    assert rules.alternative(when_recomputed(2)) == {1}
    assert rules.alternative(when_recomputed(2) & when_saved(1)) is None
    assert rules.alternative(when_recomputed(0) & when_wrapped(1)) == {1}  # by group 2


def test_groups_that_require_each_other_share_a_literal():
    rules = algebra(
        save_or_recompute(0, 1.0, requires=(1,)),
        save_or_recompute(0, 1.0, requires=(2,)),
        save_or_recompute(0, 1.0, requires=(0,)),
    )
    assert rules.twin == [0, 0, 0]


def test_alternatives_are_merged():
    rules = algebra(save_or_recompute(0, 1.0), save_or_recompute(0, 1.0))
    recomputed, kept = (when_recomputed(0),), (when_saved(0),)
    other = when_recomputed(1)
    assert rules.term([rules.alternative(*recomputed), rules.alternative(*kept)]) == TRUE
    assert term(rules, recomputed, (other, *recomputed)) == {frozenset({1})}
    assert term(rules, kept, (other, *recomputed)) == {frozenset({-1}), frozenset({2})}
    assert term(rules, (other, *kept), (other, *recomputed)) == {frozenset({2})}


@pytest.mark.parametrize("most_options", [2, 4])
@pytest.mark.parametrize("seed", range(300))
def test_a_term_is_true_when_one_of_its_conditions_holds(seed, most_options):
    rng = random.Random(seed)
    problem = random_problem(rng, n_groups=rng.randint(1, 5), most_options=most_options)
    rules = Algebra(problem)
    used = [c for i in problem.lifetimes for c in (i.exists, *(h.when for h in i.extensions))] + [ALWAYS]
    alternatives = [rng.sample(used, min(len(used), rng.choice((1, 2)))) for _ in range(rng.randint(1, 5))]
    simple = [rules.alternative(*conditions) for conditions in alternatives]
    result = rules.term(simple)
    one_by_one = functools.reduce(rules.joined, simple, FALSE)
    for decisions in itertools.product(*(range(len(group.options)) for group in problem.groups)):
        if reference.permitted(problem, decisions):
            truth = rules.variables.of(np.array(decisions)) > 0.5
            expected = any(all(reference.holds(problem, c, decisions) for c in a) for a in alternatives)
            for found in (result, one_by_one):
                assert any(all(truth[abs(x) - 1] == (x > 0) for x in a) for a in found) == expected
