"""Optimizers over copies of the parameters, which take the gradients away after each micro-batch (ZeRO, Megatron)."""

from __future__ import annotations

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


class OverCopies:
    """Keeps the sum of the gradients and a copy of the parameters, both flat, and steps on those."""

    def __init__(self, model: nn.Module):
        self.own = list(model.parameters())
        self.copy = torch.cat([p.detach().flatten() for p in self.own])
        self.copy.grad = torch.zeros_like(self.copy)
        self.inner = torch.optim.AdamW([self.copy], lr=1e-3)
        views = self.copy.grad.split([p.numel() for p in self.own])
        self.sums: dict[torch.Tensor, torch.Tensor] = dict(zip(self.own, views, strict=True))
        for p in self.own:
            p.register_post_accumulate_grad_hook(self.take)

    def take(self, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.sums[p].add_(p.grad.flatten())
        p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.inner.step()
        for p, new in zip(self.own, self.copy.split([p.numel() for p in self.own]), strict=True):
            p.copy_(new.view_as(p))
        assert self.copy.grad is not None
        self.copy.grad.zero_()


def loop(micro_batches: list[int], budget: int | None = None) -> tuple[nn.Module, Any, list[int]]:
    """Steps of so many micro-batches each; returns the model, the plan and the steps' peaks above their starts."""
    model = make()
    optimizer = OverCopies(model)
    handle = None if budget is None else autoac.auto(model, budget, engine="replay")
    generator = torch.Generator().manual_seed(1)

    def step(batches: list[torch.Tensor]) -> None:
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()

    steps = [[torch.randn(BATCH, WIDTH, generator=generator) for _ in range(n)] for n in micro_batches]
    peaks = [measure_peak(lambda of=of: step(of)).peak_above_start_bytes for of in steps]
    plan = None
    if handle is not None:
        plan = handle.plan
        handle.remove()
    return model, plan, peaks


@pytest.mark.parametrize(
    ("micro_batches", "calls"),
    [([2] * 7, 2), ([1] * 6, 1), ([1, 1, 1, 3, 3, 3, 3, 3], 3), ([3, 3, 3, 3, 3, 3, 1, 3], 3)],
)
def test_micro_batches_whose_gradients_are_taken_away_are_one_step(micro_batches: list[int], calls: int):
    plain, _, _ = loop(micro_batches)
    _, loose, _ = loop(micro_batches, 10**9)
    model, plan, peaks = loop(micro_batches, int(0.8 * loose.predicted_peak_bytes))
    assert plan.record.profile.n_root_calls == calls
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert plan.resident_bytes + peaks[-1] <= plan.predicted_peak_bytes <= plan.budget_bytes


def test_another_models_optimizer_that_steps_no_more_is_forgotten():
    """Beside a model without an optimizer: it does not hold up new plans."""
    model, other = make(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    handle = autoac.auto(model, 10**9, engine="replay", on_larger="replan")
    seen = []
    for index in range(16):
        model(torch.randn(BATCH * (1 + index // 14), WIDTH)).square().mean().backward()
        model.zero_grad()
        if index % 2 and index < 8:
            optimizer.step()
        seen.append(None if handle.plan is None else handle.plan.record.profile.n_root_calls)
    assert handle.plan is not None
    sample = handle.plan.record.profile.sample
    handle.remove()
    assert 2 in seen
    assert sample == f"float32[{2 * BATCH},{WIDTH}]"
