"""Shallow copies of planned modules run their own weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.execute.exact.harness import Case, plan_with

X = torch.linspace(-1, 1, 8 * 16).reshape(8, 16)
ENGINES = pytest.mark.parametrize("engine", ["replay", "sac"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(self.linear(x)) * self.weight)


CASE = Case(
    build=lambda: nn.Sequential(Block(), Block()),
    forward=lambda model: model(X).square().mean(),
    regions=("0", "1"),
)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b)


def planned(engine: str) -> Any:
    return plan_with(CASE, engine, lambda region, op, nth: True).apply(CASE.model())


def with_other_weights(module: Any) -> Any:
    """A shallow copy of a block, as libraries make them for a teacher, or for parameters put in for one call."""
    other = copy.copy(module)
    other._parameters = {"weight": nn.Parameter(torch.full((16,), 3.0))}
    return other


@ENGINES
def test_a_shallow_copy_runs_its_own_weights(engine):
    model = planned(engine)
    other, plain = with_other_weights(model[0]), with_other_weights(CASE.model()[0])
    for block in (other, plain):
        block(X).sum().backward()
    assert torch.equal(other(X), plain(X))
    assert same(other.weight.grad, plain.weight.grad)
    assert model[0].weight.grad is None
    assert torch.equal(model[0](X), CASE.model()[0](X))


class Averaged(nn.Module):
    """Calls a copy of its first block that has weights of its own, as a teacher's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) + with_other_weights(self.blocks[0])(x)


@ENGINES
def test_verify_finds_copies_that_run_the_originals_weights(engine, monkeypatch):
    """The values are recomputed as forward had them, and forward is wrong: only a step without the plan shows it."""
    case = Case(Averaged, lambda model: model(X).square().mean(), ("blocks.0", "blocks.1"))
    model, plan = case.model(), plan_with(case, engine, lambda region, op, nth: True)
    assert plan.verify(model, X).equal
    monkeypatch.setattr("autoac.execute.attach.called_module", lambda module: module)
    assert not plan.verify(model, X).equal


@ENGINES
def test_with_hooks_on_it(engine):
    model = planned(engine)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    other = with_other_weights(model[0])
    other(X).sum().backward()
    assert seen == [other]
    assert other.weight.grad is not None
    assert model[0].weight.grad is None


@ENGINES
def test_replicas_of_data_parallel(engine):
    """As `torch.nn.parallel.replicate` makes them: modules without parameters, with tensors in their place."""
    model = planned(engine)
    replica = model[0]._replicate_for_data_parallel()
    replica.linear = model[0].linear
    replica.weight = torch.full((16,), 3.0, requires_grad=True)
    replica(X).sum().backward()
    plain = with_other_weights(CASE.model()[0])
    plain(X).sum().backward()
    assert same(replica.weight.grad, plain.weight.grad)


@ENGINES
def test_a_copy_of_a_copy_in_a_module_that_is_planned_too(engine):
    model = planned(engine)
    other = nn.Sequential(with_other_weights(model[0]), with_other_weights(with_other_weights(model[1])))
    plain_model = CASE.model()
    plain = nn.Sequential(*map(with_other_weights, plain_model))
    for one in (other, plain):
        one(X).sum().backward()
    for ours, theirs in zip(other, plain, strict=True):
        assert same(ours.weight.grad, theirs.weight.grad)


@ENGINES
def test_a_forward_of_its_own_cannot_be_told_apart(engine):
    """What a library has put on the instance is bound to the original, with a plan and without."""
    model = CASE.model()
    block = model[0]
    block.forward = lambda x: Block.forward(block, x)
    plan = plan_with(CASE, engine, lambda region, op, nth: True)
    plan.apply(model)
    with_other_weights(block)(X).sum().backward()
    assert block.weight.grad is not None
