"""Loops that call the model by `torch.func.vmap` or `jvp`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoac
from autoac.measure import measure_peak

WIDTH = 16
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def by_vmap(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def each(row: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(model(row), 0.1)

    return torch.func.vmap(each, randomness="different")(x.view(16, -1, WIDTH)).square().mean()


def by_jvp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()


def trained(loss: Loss, budget: int | None) -> tuple[nn.Module, int, autoac.Plan | None]:
    """Six steps; returns the model, the peak of the last one above its start, and the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = None if budget is None else autoac.auto(model, budget, optimizer=optimizer, engine="replay")
    peak_bytes = 0
    for _ in range(6):
        x = torch.randn(256, WIDTH)
        peak_bytes = measure_peak(lambda x=x: loss(model, x).backward()).peak_above_start_bytes
        optimizer.step()
        optimizer.zero_grad()
    plan = None if handle is None else handle.plan
    if handle is not None:
        handle.remove()
    return model, peak_bytes, plan


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("loss", [by_vmap, by_jvp])
def test_a_model_that_is_called_within_a_transform(loss: Loss):
    plain, _, _ = trained(loss, None)
    with pytest.raises(autoac.InfeasibleBudgetError) as error:
        trained(loss, 1000)
    model, peak_bytes, plan = trained(loss, error.value.minimum_bytes)
    assert plan is not None
    for ours, others in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, others)
    if loss is by_vmap:
        assert plan.resident_bytes + peak_bytes == plan.predicted_peak_bytes
