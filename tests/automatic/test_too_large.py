"""Steps that no plan fits, while the loop goes on under the plan that it has."""

from __future__ import annotations

import warnings

import pytest
import torch

import autoac
from tests.small_models import WIDTH, make

BATCH = 512


def test_a_batch_that_no_plan_fits_is_recorded_once(caplog: pytest.LogCaptureFixture):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows: int) -> None:
        model(torch.randn(rows, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    handle = autoac.auto(model, 10**9, engine="replay")
    for _ in range(3):
        step(BATCH)
    assert handle.plan is not None
    budget = int(1.2 * handle.plan.predicted_peak_bytes)
    handle.remove()
    handle = autoac.auto(model, budget, engine="replay", on_larger="replan")
    for _ in range(3):
        step(BATCH)
    plan = handle.plan
    caplog.set_level("INFO", logger="autoac")
    step(8 * BATCH)
    with pytest.warns(UserWarning, match="takes more than the budget under any plan"):
        step(8 * BATCH)
    for rows in (8 * BATCH, BATCH, 8 * BATCH):
        step(rows)
    assert handle.plan is plan
    handle.remove()
    assert caplog.text.count("recording this step") == 1


@pytest.mark.parametrize("on_larger", ["error", "warn"])
def test_a_step_that_no_plan_fits_hides_no_larger_batch(on_larger: str):
    """Steps of the usual size go backward twice, which fits no plan; then a larger batch comes."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(rows: int, penalty: bool = False) -> None:
        x = torch.randn(rows, WIDTH, requires_grad=penalty)
        loss = model(x).square().mean()
        if penalty:
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + gradient.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    autoac.auto(model, 1000, engine="replay")
    step(BATCH)
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        step(BATCH)
    handle = autoac.auto(model, error.value.minimum_bytes, engine="replay", on_larger=on_larger)  # type: ignore[arg-type]
    for _ in range(3):
        step(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the penalty
        for _ in range(4):
            step(BATCH, penalty=True)
        step(BATCH)
        step(BATCH)
    if on_larger == "error":
        with pytest.raises(ValueError, match="Nothing was run"):
            step(8 * BATCH)
    else:
        with pytest.warns(UserWarning, match="the model is called with"):
            step(8 * BATCH)
    handle.remove()
