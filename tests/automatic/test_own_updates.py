"""Loops without an optimizer of torch: updates by hand, and optimizers of other libraries (fastai's)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.measure import measure_peak

WIDTH, BATCH = 32, 512


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)))


class WithZeros:
    """As fastai's: no `torch.optim.Optimizer`, writes to `.data`, and leaves gradients of zeros."""

    def __init__(self, model: nn.Module):
        self.params = list(model.parameters())

    def step(self) -> None:
        for p in self.params:
            assert p.grad is not None
            p.data.add_(p.grad.data, alpha=-0.1)
            p.grad.detach_()
            p.grad.zero_()


class WithoutGradients(WithZeros):
    def step(self) -> None:
        super().step()
        for p in self.params:
            p.grad = None


def loop(
    make_optimizer: Callable[[nn.Module], Any], micro_batches: int, budget: int | None = None
) -> tuple[nn.Module, Any, int]:
    """Eight steps; returns the model, the plan and the peak of the last step above its start."""
    model = make()
    optimizer = make_optimizer(model)
    handle = None if budget is None else autoac.auto(model, budget, engine="replay")
    generator = torch.Generator().manual_seed(1)

    def step(batches: list[torch.Tensor]) -> None:
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()

    peak_bytes = 0
    for _ in range(8):
        batches = [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(micro_batches)]
        peak_bytes = measure_peak(lambda of=batches: step(of)).peak_above_start_bytes
    plan = None
    if handle is not None:
        plan = handle.plan
        handle.remove()
    return model, plan, peak_bytes


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("make_optimizer", [WithZeros, WithoutGradients])
def test_steps_end_where_the_loop_updates_the_parameters(make_optimizer: Any, micro_batches: int):
    plain, _, _ = loop(make_optimizer, micro_batches)
    _, loose, _ = loop(make_optimizer, micro_batches, 10**9)
    model, plan, peak_bytes = loop(make_optimizer, micro_batches, int(0.8 * loose.predicted_peak_bytes))
    assert plan.record.profile.n_root_calls == micro_batches
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert plan.resident_bytes + peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes


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
