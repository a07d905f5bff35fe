"""Mixed precision: autocast keeps the casts of weights, in forward across regions and in recomputation not."""

import pytest
import torch
from torch import nn

from tests.execute.exact.harness import Case, assert_exact, decisions

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


class Shared(nn.Module):
    """A layer of its own and one that it shares with the others."""

    def __init__(self, shared: nn.Module):
        super().__init__()
        self.own, self.norm, self.shared = nn.Linear(64, 64), nn.LayerNorm(64), shared

    def forward(self, x):
        return x + torch.tanh(self.shared(torch.nn.functional.gelu(self.own(self.norm(x)))))


def shared_blocks() -> nn.Module:
    shared = nn.Linear(64, 64)
    return nn.Sequential(*(Shared(shared) for _ in range(3)))


@pytest.mark.parametrize("cache", [True, False], ids=["casts kept", "casts not kept"])
def test_weights_shared_between_regions(engine, cache):
    """The first region casts the shared weight, the others find the cast; in backward the last region is the first."""

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            return model(X).float().square().mean()

    case = Case(shared_blocks, forward, regions=("0", "1", "2"))
    made = assert_exact(case, engine)
    assert any(decisions(made[0.0], "aten._to_copy.default"))


def test_shared_weight_and_only_some_regions_planned(engine):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float().square().mean()

    for regions in (("0", "2"), ("1",)):
        assert_exact(Case(shared_blocks, forward, regions), engine)


def test_one_module_called_three_times(engine):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            x = model[0](X)
            for _ in range(3):
                x = model[1](x)
            return x.float().square().mean()

    assert_exact(
        Case(lambda: nn.ModuleList([nn.Linear(64, 64), Shared(nn.Linear(64, 64))]), forward, "1"), engine
    )


class Islands(nn.Module):
    """Full precision inside of mixed, and mixed inside of that."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = torch.softmax(self.second(y.float()), -1)
            with torch.autocast("cpu", torch.bfloat16):
                y = self.second(torch.tanh(y))
        return x + self.first(y)


@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_switched_inside_a_region(engine, backward_inside):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float().square().mean()

    def backward(loss):
        with torch.autocast("cpu", torch.bfloat16, enabled=backward_inside):
            loss.backward()

    case = Case(lambda: nn.Sequential(Islands(), Islands()), forward, regions=("0", "1"), backward=backward)
    assert_exact(case, engine)


def test_frozen_weights_under_autocast(engine):
    """Casts of weights that need no gradient are not kept."""

    def build():
        model = shared_blocks()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("own" in name)
        return model

    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float().square().mean()

    assert_exact(Case(build, forward, regions=("0", "1", "2")), engine)


def test_parameters_in_half_precision(engine):
    case = Case(
        build=lambda: shared_blocks().to(torch.bfloat16),
        forward=lambda model: model(X.bfloat16()).float().square().mean(),
        regions=("0", "1", "2"),
    )
    assert_exact(case, engine)
