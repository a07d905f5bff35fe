import dataclasses
import random

import numpy as np
import pytest

from autoac_solver import (
    ALWAYS,
    Extension,
    Lifetime,
    Problem,
    RegionCost,
    Simulator,
    alive_at,
    save_or_recompute,
    simulate,
    violations,
)
from autoac_solver.problem.problem import when_recomputed, when_saved
from tests.solver import reference
from tests.solver.generators import random_problem, with_resources


def two_values() -> Problem:
    """Two values of one region: 0 of 10 bytes and 1 s, 1 of 20 bytes and 3 s; a loss needs 50 bytes in between.

    Position 0 and 1 write them, 2 is the loss, 3 and 4 replay them, 4 is the last use of value 1, 5 that of value 0.
    """
    return Problem(
        n_positions=6,
        resident_bytes=100,
        step_s=10.0,
        groups=(save_or_recompute(0, 1.0), save_or_recompute(0, 3.0)),
        regions=(RegionCost(0.5),),
        lifetimes=(
            Lifetime(10, 0, 1, ALWAYS, (Extension(6, when_saved(0)),)),
            Lifetime(10, 3, 6, when_recomputed(0)),
            Lifetime(20, 1, 2, ALWAYS, (Extension(5, when_saved(1)),)),
            Lifetime(20, 4, 5, when_recomputed(1)),
            Lifetime(50, 2, 3),
        ),
    )


@pytest.mark.parametrize(
    ("recomputed", "live_bytes", "peak_position", "extra_s"),
    [
        ((False, False), [110, 130, 180, 130, 130, 110], 2, 0.0),
        ((True, False), [110, 120, 170, 130, 130, 110], 2, 1.5),
        ((False, True), [110, 130, 160, 110, 130, 110], 2, 3.5),
        ((True, True), [110, 120, 150, 110, 130, 110], 2, 4.5),
    ],
)
def test_two_values_by_hand(recomputed, live_bytes, peak_position, extra_s):
    timeline = simulate(two_values(), recomputed)
    assert timeline.live_bytes.tolist() == live_bytes
    assert timeline.live_bytes.dtype == np.int64
    assert (timeline.peak_bytes, timeline.peak_position) == (max(live_bytes), peak_position)
    assert timeline.extra_s == extra_s


def test_alive_at():
    assert alive_at(two_values(), (False, False), 2).tolist() == [0, 2, 4]
    assert alive_at(two_values(), (True, False), 2).tolist() == [2, 4]
    assert alive_at(two_values(), (True, True), 4).tolist() == [1, 3]


def test_a_transient_lives_for_its_readers_only():
    # DecisionGroup 1 reads group 0 in its replay at position 3; nobody else does.
    reader = Extension(4, when_recomputed(1))
    problem = Problem(
        n_positions=5,
        resident_bytes=0,
        step_s=1.0,
        groups=(save_or_recompute(0, 1.0), save_or_recompute(0, 1.0)),
        regions=(RegionCost(),),
        lifetimes=(
            Lifetime(7, 0, 1, ALWAYS, (Extension(4, when_recomputed(1) & when_saved(0)),)),
            Lifetime(7, 2, 3, when_recomputed(0), (reader,)),
        ),
    )
    assert simulate(problem, (False, False)).live_bytes.tolist() == [7, 0, 0, 0, 0]
    assert simulate(problem, (False, True)).live_bytes.tolist() == [7, 7, 7, 7, 0]
    assert simulate(problem, (True, False)).live_bytes.tolist() == [7, 0, 7, 0, 0]
    assert simulate(problem, (True, True)).live_bytes.tolist() == [7, 0, 7, 7, 0]


def test_violations_name_the_rule():
    groups = (
        save_or_recompute(0, 1.0, must_save="fixed"),
        save_or_recompute(0, 1.0, requires=(2,)),
        save_or_recompute(0, 1.0, same_as=3),
        save_or_recompute(0, 1.0),
    )
    problem = Problem(1, 0, 1.0, groups, (RegionCost(),), ())
    assert violations(problem, (False, False, False, False)) == []
    assert violations(problem, (False, True, True, True)) == []
    assert violations(problem, (True, True, False, True)) == [
        "group 0 takes option 1, which is refused: fixed",
        "group 1 takes option 1, which requires group 2 to take 1",
        "groups 2 and 3 must be decided alike",
    ]
    assert violations(problem, (False,)) == ["1 decisions for 4 groups"]


@pytest.mark.parametrize("most_options", [2, 4])
@pytest.mark.parametrize("seed", range(150))
def test_equals_the_definition(seed, most_options):
    rng = random.Random(seed)
    problem = random_problem(rng, most_options=most_options)
    if seed % 3 == 0:
        problem = with_resources(rng, problem)
    simulator = Simulator(problem)
    for _ in range(5):
        decisions = [rng.randrange(len(group.options)) for group in problem.groups]
        timeline = simulator.simulate(decisions)
        assert timeline.live_bytes.tolist() == reference.live_bytes(problem, decisions)
        assert timeline.peak_bytes == max(reference.live_bytes(problem, decisions))
        assert timeline.extra_s == pytest.approx(reference.extra_s(problem, decisions), rel=1e-12)
        assert (not violations(problem, decisions)) == reference.permitted(problem, decisions)
        position = rng.randrange(problem.n_positions)
        alive = [
            k for k, i in enumerate(problem.lifetimes) if reference.is_alive(problem, i, decisions, position)
        ]
        assert simulator.alive_at(decisions, position).tolist() == alive


def test_bytes_stay_exact_beyond_what_a_float_holds():
    lifetimes = (Lifetime(2**60 + 1, 0, 1), Lifetime(2**60 + 2, 0, 1))
    problem = Problem(1, 3, 1.0, (), (), lifetimes)
    assert simulate(problem, ()).peak_bytes == 2**61 + 6


@pytest.mark.parametrize("seed", range(60))
def test_a_part_is_the_simulator_of_those_instances(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    recomputed = [rng.random() < 0.5 for _ in problem.groups]
    chosen = np.array([rng.random() < 0.5 for _ in problem.lifetimes])
    some = [i for i, taken in zip(problem.lifetimes, chosen, strict=True) if taken]
    alone = Simulator(dataclasses.replace(problem, lifetimes=tuple(some), resident_bytes=7))
    part = Simulator(problem).part(chosen, resident_bytes=7)
    assert part.live_bytes(recomputed).tolist() == alone.live_bytes(recomputed).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_a_decision_changes_only_what_depends_on_it(seed):
    rng = random.Random(seed)
    problem = random_problem(rng, most_options=3)
    before = np.array([rng.randrange(len(group.options)) for group in problem.groups])
    simulator = Simulator(problem)
    for index, group in enumerate(problem.groups):
        after = before.copy()
        after[index] = (before[index] + 1) % len(group.options)
        rest = simulator.part(~simulator.depending_on(index))
        assert rest.live_bytes(before).tolist() == rest.live_bytes(after).tolist()
