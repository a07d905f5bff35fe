from dataclasses import replace

import pytest

from autoac_solver import (
    ALWAYS,
    Extension,
    Lifetime,
    Problem,
    RegionCost,
    save_or_recompute,
    solve,
    validate,
)
from autoac_solver.problem.problem import when_recomputed, when_saved, when_wrapped

GOOD = Problem(
    5, 0, 1.0, (save_or_recompute(0, 1.0), save_or_recompute(0, 1.0)), (RegionCost(),), (Lifetime(1, 0, 2),)
)


def lifetime(**changes) -> Problem:
    return replace(GOOD, lifetimes=(replace(GOOD.lifetimes[0], **changes),))


@pytest.mark.parametrize(
    ("problem", "fault"),
    [
        (replace(GOOD, n_positions=0, lifetimes=()), "n_positions must be positive"),
        (replace(GOOD, resident_bytes=-1), "resident_bytes"),
        (replace(GOOD, step_s=float("nan")), "step_s"),
        (replace(GOOD, regions=(RegionCost(-1.0),)), "region 0: wrap_s=-1.0"),
        (replace(GOOD, groups=(save_or_recompute(0, float("inf")),)), "group 0: time_s=inf"),
        (replace(GOOD, groups=(save_or_recompute(1, 1.0),)), "group 0: there is no region 1"),
        (
            replace(GOOD, groups=(save_or_recompute(0, 1.0, requires=(-1,)),)),
            "group 0: requires=.* names no option of a group",
        ),
        (replace(GOOD, groups=(save_or_recompute(0, 1.0, same_as=1),)), "same_as=1 names no group"),
        (lifetime(bytes=-1), "lifetime 0: -1 bytes"),
        (lifetime(end=6), r"lifetime 0: 1 bytes over \[0, 6\)"),
        (lifetime(start=3), r"over \[3, 2\)"),
        (lifetime(exists=when_recomputed(2)), "names no option of a group, or no region"),
        (lifetime(extensions=(Extension(3, when_saved(-2)),)), "names no option of a group, or no region"),
        (lifetime(extensions=(Extension(3, when_wrapped(1)),)), "names no option of a group, or no region"),
        (lifetime(extensions=(Extension(6, ALWAYS),)), "an extension ends after the last position"),
    ],
)
def test_faults_are_refused(problem, fault):
    with pytest.raises(ValueError, match=fault):
        validate(problem)
    with pytest.raises(ValueError, match=fault):
        solve(problem, 100)


def test_a_good_problem_passes():
    validate(GOOD)
