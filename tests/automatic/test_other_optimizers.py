"""Loops whose optimizer is none of torch's (fastai's), or steps on copies of the parameters (ZeRO's, Megatron's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.automatic import cycle
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


def loop(
    make_optimizer: Callable[[nn.Module], Any], micro_batches: list[int], budget: int | None = None
) -> tuple[nn.Module, Any, int]:
    """Steps of so many micro-batches each; returns the model, the plan and the last step's peak above its start."""
    model = make()
    optimizer = make_optimizer(model)
    handle = None if budget is None else autoac.auto(model, budget, engine="replay")
    generator = torch.Generator().manual_seed(1)

    def step(batches: list[torch.Tensor]) -> None:
        for x in batches:
            model(x).square().mean().backward()
        optimizer.step()

    peak_bytes = 0
    steps = [[torch.randn(BATCH, WIDTH, generator=generator) for _ in range(n)] for n in micro_batches]
    for batches in steps:
        peak_bytes = measure_peak(lambda of=batches: step(of)).peak_above_start_bytes
    plan = None
    if handle is not None:
        plan = handle.plan
        handle.remove()
    return model, plan, peak_bytes


@pytest.mark.parametrize(
    ("make_optimizer", "micro_batches", "calls"),
    [
        (WithZeros, [1] * 8, 1),
        (WithZeros, [2] * 8, 2),
        (WithoutGradients, [1] * 8, 1),
        (WithoutGradients, [2] * 8, 2),
        (OverCopies, [1] * 6, 1),
        (OverCopies, [2] * 7, 2),
        (OverCopies, [1, 1, 1, 3, 3, 3, 3, 3], 3),
        (OverCopies, [3, 3, 3, 3, 3, 3, 1, 3], 3),
    ],
)
def test_where_steps_end(make_optimizer: Any, micro_batches: list[int], calls: int):
    plain, _, _ = loop(make_optimizer, micro_batches)
    _, loose, _ = loop(make_optimizer, micro_batches, 10**9)
    model, plan, peak_bytes = loop(make_optimizer, micro_batches, int(0.8 * loose.predicted_peak_bytes))
    assert plan.record.profile.n_root_calls == calls
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)
    assert plan.resident_bytes + peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("several", [True, False])
def test_on_several_ranks_updates_by_hand_are_not_looked_for(several: bool, monkeypatch: pytest.MonkeyPatch):
    """One rank's parameters may change and another's not, and all begin their steps at once."""
    monkeypatch.setattr(cycle, "has_other_ranks", lambda: several)
    model = make()
    steps = cycle.Cycle(model)
    steps.called(begins=True)
    model(torch.randn(2, WIDTH)).sum().backward()
    assert steps.has_gradients()
    WithZeros(model).step()
    assert steps.has_gradients() == several


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
