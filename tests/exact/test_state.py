"""Modules that put something else in place of what they have read of themselves: under sac their code runs twice."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tests.blocks import X, mean_square
from tests.exact.harness import Case, assert_exact, assert_plan_exact, plan_with, planned, plans


class Stateful(nn.Module):
    """Reads a buffer, a tensor, a number and a list of its own, and then exchanges or extends them.

    Args:
        kind: which of them it reads.
        keeps: whether it keeps what it computes, and with that its graph.
    """

    def __init__(self, kind: str, keeps: bool = False) -> None:
        super().__init__()
        self.kind, self.keeps = kind, keeps
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("average", torch.ones(128))
        self.tensor, self.count, self.seen = torch.ones(128), 0, [torch.ones(128)]
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        new = hidden.detach().abs().mean(0)
        scale: Any = {
            "buffer": self.average,
            "tensor": self.tensor,
            "view of a tensor": self.tensor[:1],
            "number": 0.5**self.count,
            "list": self.seen[-1],
        }[self.kind]
        hidden = hidden / scale
        if self.keeps:
            self.hidden = hidden
        self.average, self.tensor = 0.9 * self.average + new, self.tensor + new
        self.count += 1
        self.seen.append(new)
        return self.down(hidden.sin())


@pytest.mark.parametrize("kind", ["buffer", "tensor", "view of a tensor", "number", "list"])
def test_state_that_is_exchanged_once_read(engine, kind):
    case = Case(lambda: nn.Sequential(Stateful(kind), Stateful(kind)), mean_square, ("0", "1"))
    assert_exact(case, engine)
    for op in ("aten.tanh.default", "aten.div.Tensor", "aten.sin.default", "nothing"):
        # Also an op that is kept has its arguments saved again by autograd.
        assert_plan_exact(case, plan_with(case, engine, lambda region, name, nth, op=op: name != op))
    for plan in plans(case, engine).values():
        model, plain = planned(case, plan), case.model()
        for each in (model, plain):
            mean_square(each).backward()
        for module, expected in zip(model, plain, strict=True):
            assert (module.count, len(module.seen)) == (1, 2)
            assert torch.equal(module.tensor, expected.tensor)
            assert torch.equal(module.seen[-1], expected.seen[-1])


def test_gradient_of_a_value_that_a_module_keeps(engine):
    def build() -> nn.Module:
        return nn.Sequential(Stateful("number", keeps=True), Stateful("number", keeps=True))

    def gradients(model: Any) -> list[torch.Tensor]:
        loss = mean_square(model)
        for module in model:
            module.hidden.retain_grad()
        loss.backward()
        return [module.hidden.grad for module in model]

    case = Case(build, mean_square, ("0", "1"))
    for plan in plans(case, engine, [0.0, 0.5]).values():
        for found, expected in zip(gradients(planned(case, plan)), gradients(case.model()), strict=True):
            assert torch.equal(found, expected)


def test_functional_call(engine):
    """The parameters are in place for the time of forward, and are others in backward."""

    def forward(model: nn.Module) -> torch.Tensor:
        weights = {name: parameter * 1.5 for name, parameter in model.named_parameters()}
        return functional_call(model, weights, (X,)).square().mean()

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in "ab"))

    assert_exact(Case(build, forward, ("0", "1")), engine)


def test_mode_of_forward(engine):
    """Evaluation is switched on before backward: dropout is recomputed as it was all the same."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Tanh()) for _ in "ab"))

    def forward(model: nn.Module) -> torch.Tensor:
        loss = mean_square(model.train())
        model.eval()
        return loss

    assert_exact(Case(build, forward, ("0", "1")), engine)
