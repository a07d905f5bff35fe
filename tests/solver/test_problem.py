from dataclasses import replace

import pytest

from autoac_solver import (
    ALWAYS,
    Condition,
    Holder,
    Instance,
    Problem,
    RegionCost,
    SharedCost,
    Unit,
    solve,
    validate,
)

GOOD = Problem(5, 0, 1.0, (Unit(0, 1.0), Unit(0, 1.0)), (RegionCost(),), (Instance(1, 0, 2),))


def instance(**changes) -> Problem:
    return replace(GOOD, instances=(replace(GOOD.instances[0], **changes),))


@pytest.mark.parametrize(
    ("problem", "fault"),
    [
        (replace(GOOD, n_positions=0, instances=()), "n_positions must be positive"),
        (replace(GOOD, resident_bytes=-1), "resident_bytes"),
        (replace(GOOD, step_s=float("nan")), "step_s"),
        (replace(GOOD, regions=(RegionCost(-1.0),)), "region 0: wrap_s=-1.0"),
        (replace(GOOD, shared=(SharedCost((0,), -1.0),)), r"shared cost 0: units=\(0,\) or time_s=-1.0"),
        (replace(GOOD, shared=(SharedCost((2,), 1.0),)), r"shared cost 0: units=\(2,\)"),
        (replace(GOOD, units=(Unit(0, float("inf")),)), "unit 0: time_s=inf"),
        (replace(GOOD, units=(Unit(1, 1.0),)), "unit 0: there is no region 1"),
        (replace(GOOD, units=(Unit(0, 1.0, requires=(-1,)),)), r"unit 0: requires=\(-1,\)"),
        (replace(GOOD, units=(Unit(0, 1.0, same_as=1),)), "same_as=1 names no unit"),
        (instance(bytes=-1), "instance 0: -1 bytes"),
        (instance(end=6), r"instance 0: 1 bytes over \[0, 6\)"),
        (instance(start=3), r"over \[3, 2\)"),
        (instance(exists=Condition(recomputed=2)), "names no unit or region"),
        (instance(holders=(Holder(3, Condition(kept=-2)),)), "names no unit or region"),
        (instance(holders=(Holder(3, Condition(wrapped=1)),)), "names no unit or region"),
        (instance(holders=(Holder(6, ALWAYS),)), "a holder ends after the last position"),
    ],
)
def test_faults_are_refused(problem, fault):
    with pytest.raises(ValueError, match=fault):
        validate(problem)
    with pytest.raises(ValueError, match=fault):
        solve(problem, 100)


def test_a_good_problem_passes():
    validate(GOOD)
