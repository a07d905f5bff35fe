"""Autocast around planning, around the loop, around both: the budget holds, or a word is said."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import autoac
from autoac.measure import measure_peak
from tests.small_models import BATCH, WIDTH, Blocks, make

pytestmark = pytest.mark.usefixtures("one_thread")


def autocast(on: bool = True) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def planned(model: Blocks, x: torch.Tensor, under: bool) -> autoac.Plan:
    """A plan for less than the peak without one."""
    with autocast(under):
        profile = autoac.profile(model, x)
    ample = autoac.solve(profile, 10**9)
    spare = ample.record.unplanned_peak_bytes - ample.resident_bytes
    return autoac.solve(profile, int(ample.resident_bytes + 0.85 * spare))


def step(model: Blocks, x: torch.Tensor, around: str) -> None:
    with autocast(around != "nothing"):
        output = model(x)
        loss = output.mean()
    if around == "each forward":
        loss = output.mean()
    loss.backward()
    model.zero_grad()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("around", ["loss too", "each forward"])
def test_planned_under_the_loops_autocast(around: str, warm: bool):
    model, x = make(blocks=6, dropout=0.0).train(), torch.randn(BATCH, WIDTH)
    with autocast():
        if warm:
            model(x)  # leaves casts of weights in autocast's cache
        plan = planned(model, x, under=True)
        report = plan.verify(model, x)
    assert report.ok
    assert report.measured_peak_bytes == plan.predicted_peak_bytes
    plan.apply(model)
    step(model, x, around)
    measured = plan.resident_bytes + measure_peak(lambda: step(model, x, around)).peak_above_start_bytes
    assert measured == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert measured <= plan.budget_bytes
    assert not plan.is_not_followed
    assert any("recorded under the autocast" in note for note in plan.record.profile.notes)


@pytest.mark.parametrize("around", ["nothing", "loss too"])
def test_another_autocast_is_told(around: str):
    model, x = make(blocks=6).train(), torch.randn(BATCH, WIDTH)
    plan = planned(model, x, under=around == "nothing")
    with plan.applied(model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # the engine says as well that other ops run
        step(model, x, around)
    words = [str(warning.message) for warning in told]
    assert sum("with torch.autocast(...): plan = autoac.plan" in text for text in words) == 1
