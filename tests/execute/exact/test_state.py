"""Modules that put something else in place of what they have read of themselves: under sac their code runs twice."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from autoac.torch_private import storage_ref
from tests.blocks import X, mean_square
from tests.execute.exact.harness import Case, assert_exact, assert_plan_exact, plan_with, planned, plans, run


class Stateful(nn.Module):
    """Reads a buffer, a tensor, a number or a container of its own, and then exchanges or extends them all.

    Args:
        kind: which of them it reads.
        keeps: whether it keeps what it computes, and with that its graph.
    """

    def __init__(self, kind: str, keeps: bool = False) -> None:
        super().__init__()
        self.kind, self.keeps = kind, keeps
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.register_buffer("average", torch.ones(128))
        self.tensor, self.count = torch.ones(128), 0
        self.list_, self.tuple_ = [torch.ones(128)], (0, torch.ones(128))
        self.nested_ = {"a": [torch.ones(128)]}
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        new = hidden.detach().abs().mean(0)
        scale: Any = {
            "buffer": self.average,
            "tensor": self.tensor,
            "view of a tensor": self.tensor[:1],
            "number": 0.5**self.count,
            "list": self.list_[-1],
            "tuple": self.tuple_[1],
            "nested": self.nested_["a"][-1],
        }[self.kind]
        hidden = hidden / scale
        if self.keeps:
            self.hidden = hidden
        self.average, self.tensor = 0.9 * self.average + new, self.tensor + new
        self.count += 1
        self.list_.append(new)
        self.tuple_ = (0, new)
        self.nested_["a"] = [new]
        return self.down(hidden.sin())


@pytest.mark.parametrize("kind", ["buffer", "tensor", "view of a tensor", "number"])
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
            assert module.count == 1
            assert torch.equal(module.tensor, expected.tensor)


@pytest.mark.parametrize("kind", ["list", "tuple", "nested"])
def test_containers_that_change_once_read(engine, kind):
    """They are no attribute to put back: replay takes them as they are, sac refuses the step."""
    case = Case(lambda: nn.Sequential(Stateful(kind), Stateful(kind)), mean_square, ("0", "1"))
    if engine == "replay":
        assert_exact(case, engine)
        return
    with pytest.raises(
        RuntimeError, match=rf"in region '[01]', what its modules hold in '{kind}_' has changed"
    ):
        run(case, plans(case, engine, [0.0])[0.0])


def test_a_kept_value_that_is_not_in_the_loss_is_let_go(engine):
    """Its graph holds the region's second run, which must not hold it."""
    kept: list[weakref.ref[torch.UntypedStorage]] = []

    class Keeps(Stateful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            if self.hidden is not None:
                self.tensor = self.tensor + self.hidden.detach().sum()
            self.hidden = hidden = self.up(x).exp()
            kept.append(storage_ref(hidden))
            return result

    case = Case(lambda: nn.Sequential(Keeps("tensor"), Keeps("tensor")), mean_square, ("0", "1"))
    model = planned(case, plans(case, engine, [0.0])[0.0])
    kept.clear()
    for _ in range(5):
        mean_square(model).backward()
        model.zero_grad(set_to_none=True)
    assert sum(ref() is not None for ref in kept) <= 2 + 2  # the last ones, and what they have read


def test_a_parameter_that_is_taken_away_before_backward(engine):
    case = Case(lambda: nn.Sequential(Stateful("number"), Stateful("number")), mean_square, ("0", "1"))
    model: Any = planned(case, plans(case, engine, [0.0])[0.0])
    loss = mean_square(model)
    weight = model[0].up._parameters.pop("weight")
    loss.backward()
    assert list(model[0].up._parameters) == ["bias"]
    assert weight.grad is not None


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
