"""Values that are assigned to a tensor's `.data` in forward: each op that runs again reads those that it read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac

pytestmark = pytest.mark.usefixtures("one_thread")


class Averaging(nn.Module):
    """Keeps a running average as people write it, in a buffer or in a tensor that is no buffer."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))
        if registered:
            self.register_buffer("mean", torch.zeros(16))
        else:
            self.mean = torch.zeros(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        before = (hidden + self.mean).sin()
        self.mean.data = 0.9 * self.mean.data + 0.1 * hidden.detach().mean(0)
        return (before * (hidden - self.mean).cos()).tanh()


class Swapped(nn.Module):
    """Its weight is elsewhere between forward and backward, as where hooks offload weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.inner = nn.Sequential(self.first, nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.first.weight
        kept = weight.data
        weight.data = kept.clone()
        result: torch.Tensor = self.inner(x).sin().exp()
        if result.requires_grad:
            result.register_hook(lambda _: setattr(weight, "data", kept))
        weight.data = torch.zeros_like(kept)
        return result


def build(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


SAMPLE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
BLOCKS = {
    "buffer": lambda: Averaging(True),
    "plain tensor": lambda: Averaging(False),
    "swapped weight": Swapped,
}


def states(model: nn.Module) -> list[torch.Tensor]:
    means = [module.mean for module in model.modules() if isinstance(module, Averaging)]
    return [*model.parameters(), *means]


def trained(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = model(SAMPLE).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *states(model)]


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_ops_that_run_again_read_what_they_read(block: Callable[[], nn.Module], engine: Any):
    model = build(block)
    before = [state.clone() for state in states(model)]
    profile = autoac.profile(model, SAMPLE)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1, engine=engine)
    plan = autoac.solve(profile, least.value.minimum_bytes, engine=engine)
    assert any(region.wrapped for region in plan.regions)
    assert plan.verify(model, SAMPLE).equal
    assert all(map(torch.equal, states(model), before))
    expected = trained(build(block))
    assert all(map(torch.equal, trained(plan.apply(model)), expected))
    loop = build(block)
    autoac.auto(loop, int(1.25 * profile.peak_bytes), engine=engine)
    assert all(map(torch.equal, trained(loop), expected))
