"""`autoac.auto` where tokens choose experts, so that a step may take more than the recorded one."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import autoac
from autoac.automatic import Auto

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:sizes of tensors depend on values"),
]

WIDTH, TOKENS = 16, 256
FEW, MANY = 0.1, 1.0
"""Weights of the large expert in the choice of one, beside 1 for each other one."""


def mlp(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))


class Experts(nn.Module):
    """The last one is larger than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([mlp(WIDTH), mlp(WIDTH), mlp(8 * WIDTH)])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = x
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            result = result.index_add(0, rows, expert(x[rows]))
        return result


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts() for _ in range(3)])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, chosen)
        return x


def trained(weights: list[float], budget: int | None, **options: str | bool) -> tuple[Routed, Auto | None]:
    """A loop with one step for each weight of the large expert."""
    torch.manual_seed(0)
    model, generator = Routed(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = None if budget is None else autoac.auto(model, budget, **options)  # type: ignore[arg-type]
    for weight in weights:
        chosen = torch.multinomial(torch.tensor([1.0, 1.0, weight]), TOKENS, True, generator=generator)
        model(torch.randn(TOKENS, WIDTH, generator=generator), chosen).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


def peak_of(weight: float) -> int:
    """With nothing recomputed, in the loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, handle = trained([weight] * 3, 10**9, measure=True)
    assert handle is not None
    assert handle.measured_peak_bytes is not None
    return handle.measured_peak_bytes


@pytest.fixture(scope="module")
def budget() -> int:
    """Less than the later steps take, and more than the first one."""
    return (peak_of(FEW) + peak_of(MANY)) // 2


def test_a_larger_step_is_planned_for(budget: int, caplog: pytest.LogCaptureFixture):
    weights = [FEW, *[MANY] * 19]
    plain, _ = trained(weights, None)
    with caplog.at_level(logging.INFO, "autoac"), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*took more than the budget")
        model, handle = trained(weights, budget, measure=True, on_larger="replan")
    assert handle is not None
    assert handle.plan is not None
    assert "took more than the budget: recording another one" in caplog.text
    assert handle.measured_peak_bytes is not None
    assert handle.plan.predicted_overhead > 0
    assert handle.measured_peak_bytes <= budget
    assert caplog.text.count("measured peak") >= 2
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def test_a_larger_step_is_told(budget: int):
    with pytest.warns(UserWarning, match=r"took more than the budget.*depend on values.*on_larger='replan'"):
        _, handle = trained([FEW, FEW, FEW, MANY, MANY, MANY], budget, measure=True)
    assert handle is not None
    assert handle.plan is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes > budget  # of the second measured step


def trained_on_few(shares: list[float], budget: int, **options: str | bool) -> Auto:
    """A loop whose loss leaves out rows; with one step for each share of them that is left."""
    torch.manual_seed(0)
    model = nn.Sequential(*(mlp(4 * WIDTH) for _ in range(3)))
    head = torch.randn(WIDTH, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = autoac.auto(model, budget, **options)  # type: ignore[arg-type]
    for share in shares:
        labels = torch.where(torch.arange(TOKENS) < share * TOKENS, 3, -100)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="sizes of tensors depend on values")
            output = model(torch.randn(TOKENS, WIDTH))
            rows = (labels >= 0).nonzero().flatten()
            logits = output.index_select(0, rows) @ head
            nn.functional.cross_entropy(logits, labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return handle


def test_a_loss_that_leaves_out_rows_is_measured_again():
    large = trained_on_few([1.0] * 3, 10**9, measure=True).measured_peak_bytes
    assert large is not None
    budget = int(0.95 * large)
    handle = trained_on_few([0.1, *[1.0] * 9], budget, measure=True, on_larger="replan")
    assert handle.plan is not None
    assert any("outside of the model's modules" in note for note in handle.plan.record.profile.notes)
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    assert handle.plan.predicted_overhead > 0


class Dropping(nn.Module):
    """Keeps as many rows as a number says that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(mlp(4 * WIDTH) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x[: 1 + int(torch.rand(()) * len(x))])


def test_a_larger_step_by_a_number_that_was_drawn_is_told():
    model = Dropping()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(TOKENS, WIDTH)

    def steps(seeds: list[int]) -> None:
        for seed in seeds:
            torch.manual_seed(seed)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    drawn = {seed: torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in range(50)}
    few, many = min(drawn, key=lambda seed: drawn[seed]), max(drawn, key=lambda seed: drawn[seed])
    handle = autoac.auto(model, 10**9)
    steps([few] * 2)
    assert handle.plan is not None
    budget = handle.plan.predicted_peak_bytes + 4000
    handle.remove()
    handle = autoac.auto(model, budget, measure=True)
    with pytest.warns(UserWarning, match="depend on a number that is drawn or read, it seems"):
        steps([few, few, few, many, many, many])
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes > budget


def test_where_no_plan_has_room_the_loop_goes_on():
    least = least_budget()
    with pytest.warns(UserWarning, match="no plan has room for one like that"):
        model, handle = trained([FEW, *[MANY] * 9], least, measure=True, on_larger="replan")
    plain, _ = trained([FEW, *[MANY] * 9], None)
    assert handle is not None
    assert handle.plan is not None
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


def least_budget() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, handle = trained([FEW] * 3, 10**9)
    assert handle is not None
    assert handle.plan is not None
    return handle.plan.record.profile.least_peak_bytes
