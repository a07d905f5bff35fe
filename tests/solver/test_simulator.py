import dataclasses
import random

import numpy as np
import pytest

from autoac_solver import (
    ALWAYS,
    Condition,
    Holder,
    Instance,
    Problem,
    RegionCost,
    Simulator,
    Unit,
    alive_at,
    simulate,
    violations,
)
from tests.solver import reference
from tests.solver.generators import random_problem


def two_values() -> Problem:
    """Two values of one region: 0 of 10 bytes and 1 s, 1 of 20 bytes and 3 s; a loss needs 50 bytes in between.

    Position 0 and 1 write them, 2 is the loss, 3 and 4 replay them, 4 is the last use of value 1, 5 that of value 0.
    """
    return Problem(
        n_positions=6,
        resident_bytes=100,
        step_s=10.0,
        units=(Unit(0, 1.0), Unit(0, 3.0)),
        regions=(RegionCost(0.5),),
        instances=(
            Instance(10, 0, 1, ALWAYS, (Holder(6, Condition(kept=0)),)),
            Instance(10, 3, 6, Condition(recomputed=0)),
            Instance(20, 1, 2, ALWAYS, (Holder(5, Condition(kept=1)),)),
            Instance(20, 4, 5, Condition(recomputed=1)),
            Instance(50, 2, 3),
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
    # Unit 1 reads unit 0 in its replay at position 3; nobody else does.
    reader = Holder(4, Condition(recomputed=1))
    problem = Problem(
        n_positions=5,
        resident_bytes=0,
        step_s=1.0,
        units=(Unit(0, 1.0), Unit(0, 1.0)),
        regions=(RegionCost(),),
        instances=(
            Instance(7, 0, 1, ALWAYS, (Holder(4, Condition(recomputed=1, kept=0)),)),
            Instance(7, 2, 3, Condition(recomputed=0), (reader,)),
        ),
    )
    assert simulate(problem, (False, False)).live_bytes.tolist() == [7, 0, 0, 0, 0]
    assert simulate(problem, (False, True)).live_bytes.tolist() == [7, 7, 7, 7, 0]
    assert simulate(problem, (True, False)).live_bytes.tolist() == [7, 0, 7, 0, 0]
    assert simulate(problem, (True, True)).live_bytes.tolist() == [7, 0, 7, 7, 0]


def test_violations_name_the_rule():
    units = (Unit(0, 1.0, must_save=True), Unit(0, 1.0, requires=(2,)), Unit(0, 1.0, same_as=3), Unit(0, 1.0))
    problem = Problem(1, 0, 1.0, units, (RegionCost(),), ())
    assert violations(problem, (False, False, False, False)) == []
    assert violations(problem, (False, True, True, True)) == []
    assert violations(problem, (True, True, False, True)) == [
        "unit 0 is recomputed but must be saved",
        "unit 1 is recomputed but unit 2, which that requires, is not",
        "units 2 and 3 must be decided alike",
    ]
    assert violations(problem, (False,)) == ["1 decisions for 4 units"]


@pytest.mark.parametrize("seed", range(150))
def test_equals_the_definition(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    simulator = Simulator(problem)
    for _ in range(5):
        recomputed = [rng.random() < 0.5 for _ in problem.units]
        timeline = simulator.simulate(recomputed)
        assert timeline.live_bytes.tolist() == reference.live_bytes(problem, recomputed)
        assert timeline.peak_bytes == max(reference.live_bytes(problem, recomputed))
        assert timeline.extra_s == pytest.approx(reference.extra_s(problem, recomputed), rel=1e-12)
        assert (not violations(problem, recomputed)) == reference.permitted(problem, recomputed)
        position = rng.randrange(problem.n_positions)
        alive = [
            k for k, i in enumerate(problem.instances) if reference.is_alive(problem, i, recomputed, position)
        ]
        assert simulator.alive_at(recomputed, position).tolist() == alive


def test_bytes_stay_exact_beyond_what_a_float_holds():
    instances = (Instance(2**60 + 1, 0, 1), Instance(2**60 + 2, 0, 1))
    problem = Problem(1, 3, 1.0, (), (), instances)
    assert simulate(problem, ()).peak_bytes == 2**61 + 6


@pytest.mark.parametrize("seed", range(60))
def test_a_part_is_the_simulator_of_those_instances(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    recomputed = [rng.random() < 0.5 for _ in problem.units]
    chosen = np.array([rng.random() < 0.5 for _ in problem.instances])
    some = [i for i, taken in zip(problem.instances, chosen, strict=True) if taken]
    alone = Simulator(dataclasses.replace(problem, instances=tuple(some), resident_bytes=7))
    part = Simulator(problem).part(chosen, resident_bytes=7)
    assert part.live_bytes(recomputed).tolist() == alone.live_bytes(recomputed).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_a_decision_changes_only_what_depends_on_it(seed):
    rng = random.Random(seed)
    problem = random_problem(rng)
    before = np.array([rng.random() < 0.5 for _ in problem.units])
    simulator = Simulator(problem)
    for unit in range(len(problem.units)):
        after = before.copy()
        after[unit] = not after[unit]
        rest = simulator.part(~simulator.depending_on(unit))
        assert rest.live_bytes(before).tolist() == rest.live_bytes(after).tolist()
