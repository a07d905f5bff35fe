"""Where autograd's formulas take memory in their own way: peaks are as predicted, with a plan and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoac

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
PLACES = torch.arange(64 * 64).reshape(64, 64) * 7 % 64
ROWS = torch.arange(64) * 5 % 64

Middle = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.middle = middle
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.middle(self.first(x))))


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    y *= 0.5
    y /= 3.0
    y.div_(3, rounding_mode=None)
    return torch.div(y.mul_(2.0).div_(7), 3, rounding_mode=None)


def scattered(reduce: str, include_self: bool) -> Middle:
    return lambda x: torch.scatter_reduce(x.sin(), 0, PLACES, x.cos(), reduce, include_self=include_self)


def reduced_rows(reduce: str) -> Middle:
    return lambda x: torch.index_reduce(x.sin(), 0, ROWS, x.cos() + 2, reduce)


def by_condition(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(
        x.sum() > 0, lambda x: torch.sin(torch.cos(x)), lambda x: torch.cos(x) * torch.sin(x), (x,)
    )


def plans(middle: Middle) -> tuple[nn.Module, list[autoac.Plan]]:
    """A model, and plans for the least budget and for an ample one."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(middle) for _ in range(3)))
    profile = autoac.profile(model, X)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1)
    return model, [autoac.solve(profile, budget) for budget in (least.value.minimum_bytes, 10**9)]


def measured_peak(model: nn.Module, plan: autoac.Plan) -> int:
    """The peak of a planned step by the allocator's account, resident bytes included."""
    return plan.verify(model, X).measured_peak_bytes


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    "middle",
    [in_place]
    + [scattered(reduce, own) for reduce in ("amax", "amin", "mean") for own in (True, False)]
    + [reduced_rows(reduce) for reduce in ("amax", "amin", "mean", "prod")],
)
def test_peak(middle: Middle):
    model, made = plans(middle)
    for plan in made:
        assert measured_peak(model, plan) == plan.predicted_peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_higher_order_ops_are_counted_by_a_bound():
    """Nobody sees what their branches run; the most that is alive inside counts at the op before."""
    model, made = plans(by_condition)
    for plan in made:
        assert not any("higher-order" in note for note in plan.record.profile.notes)
        measured = measured_peak(model, plan)
        assert measured <= plan.predicted_peak_bytes <= 1.05 * measured


class Mixed(nn.Module):
    """A branch that reads many tensors: torch copies all of them while it traces the branches for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.weights = nn.ParameterList(torch.linspace(-1, 1, 64 * 64).reshape(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        mixed = torch.cond(
            h.sum() > -(10**9), lambda x, *w: sum(w) * x, lambda x, *w: x.sin() * sum(w), (h, *self.weights)
        )
        return mixed.relu()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_branches_are_traced_on_copies():
    torch.manual_seed(0)
    model = Mixed()
    plan = autoac.solve(autoac.profile(model, X), 10**9)
    assert measured_peak(model, plan) == plan.predicted_peak_bytes


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_numbers_in_branches_are_counted_by_a_bound():
    """Eight bytes for each op that takes one, at most twice as many as there are at a time."""
    model, made = plans(
        lambda x: torch.cond(x.sum() > -(10**9), lambda x: x * 2 * 3, lambda x: x.sin() / 5 + 1, (x,))
    )
    for plan in made:
        assert plan.predicted_peak_bytes - 32 <= measured_peak(model, plan) <= plan.predicted_peak_bytes


class Gated(Layer):
    """Its peak is in backward: the branch keeps nothing, and runs again there."""

    def __init__(self) -> None:
        super().__init__(
            lambda x: torch.cond(x.sum() > 0, lambda x: x.sin() * x.cos(), lambda x: x.cos() * 2, (x,))
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_branches_that_torch_traces_are_no_memory():
    """It traces them on fake tensors while the step runs, under its hooks on saved tensors."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(), Gated())
    profile = autoac.profile(model, X)
    assert sum(s.bytes for s in profile.storage_table if s.kind == "Input") == X.nbytes
    plan = autoac.solve(profile, 10**9)
    assert measured_peak(model, plan) == plan.predicted_peak_bytes
