"""The fastest of several choices of regions, without solving each of them to the end."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from autoac_solver.choices import Choices
from autoac_solver.errors import InfeasibleBudgetError
from autoac_solver.partitions import partitions
from autoac_solver.profile import Profile

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
GAP = 1e-3


@functools.cache
def profile(name: str) -> Profile:
    return Profile.load(PROFILES / f"{name}-cpu.json")


@pytest.mark.parametrize("name", ["gpt-8-blocks", "unet-3-levels"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.8])
def test_no_choice_has_a_plan_that_is_faster_by_more_than_the_gap(name: str, share: float) -> None:
    calls = partitions(profile(name))
    choices = Choices(profile(name), calls, "replay")
    with pytest.raises(InfeasibleBudgetError) as caught:
        choices.best(1, 60, GAP)
    kept = [False] * len(choices[0].built.problem.units)
    least, most = caught.value.minimum_bytes, choices[0].prepared.simulator.simulate(kept).peak_bytes
    limit = least + int(share * (most - least))
    best = choices.best(limit, 60, GAP)[1]
    assert best.peak_bytes <= limit
    assert best.status == "optimal"
    for one in calls:
        try:
            alone = Choices(profile(name), [one], "replay").best(limit, 60, GAP)[1]
        except InfeasibleBudgetError:
            continue
        assert best.objective_s <= alone.objective_s + GAP * profile(name).step_s
