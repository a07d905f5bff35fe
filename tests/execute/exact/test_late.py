"""What a region does after the last tensor that autograd saves: early stop never comes to it again."""

import pytest
import torch
from torch import nn

from tests.execute.exact.harness import Case, assert_exact, plan_with, planned

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


class Shifted(nn.Module):
    """Reads a buffer, then writes it."""

    shift: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x):
        out = torch.tanh(torch.sin(self.linear(x))) + self.shift
        with torch.no_grad():
            self.shift.mul_(0.9)
        return out


class Noisy(nn.Module):
    """Adds numbers of its own generator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x):
        y = torch.tanh(torch.sin(self.linear(x)))
        return y + torch.empty_like(y).normal_(generator=self.generator)


class Dropping(nn.Module):
    """Drops out of what carries no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(torch.sin(nn.functional.dropout(self.linear(x), 0.5)))
        return y + nn.functional.dropout(x.detach() + 1, 0.5)


class Written(nn.Module):
    """Keeps a value that is written after another one was computed from it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        t = torch.sin(self.linear(x))
        a = t + 1
        y = a + torch.sigmoid(t)
        a.add_(1)
        return y + a


@pytest.mark.parametrize("block", [Shifted, Noisy, Dropping, Written])
def test_plans_of_all_budgets(block, engine):
    assert_exact(
        Case(
            build=lambda: nn.Sequential(block(), block(), nn.Linear(64, 1)),
            forward=lambda model: model(X).square().mean(),
            regions=("0", "1"),
        ),
        engine,
    )


@pytest.mark.parametrize("alias", [lambda buffer: buffer, torch.detach, lambda buffer: buffer[:]])
def test_input_that_is_written_before_backward_sac(alias):
    """Not in the profiled step: then plans save what reads it, and here nothing else tells that it has changed."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.register_buffer("scale", torch.ones(64))

        def forward(self, x):
            return torch.sin(self.linear(x) * alias(self.scale))

    case = Case(
        build=lambda: nn.Sequential(Scaled(), nn.Linear(64, 1)),
        forward=lambda model: model(X).square().mean(),
        regions=("0",),
    )
    model = planned(case, plan_with(case, "sac", lambda region, op, nth: True))
    loss = case.forward(model)
    model[0].scale.add_(1)
    with pytest.raises(RuntimeError, match="would run again on what was written since: between forward and"):
        loss.backward()
