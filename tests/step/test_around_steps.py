"""Hooks around the steps of all optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoac.step import optimizer as around
from autoac.step.optimizer import around_steps


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


def test_one_more_is_put_there_and_taken_off_within_a_step(optimizer: torch.optim.Optimizer):
    """As another thread does, while a hook of this one makes a plan."""
    seen = []

    def before(*_: Any) -> None:
        seen.append("before")
        offs.append(around_steps(lambda *_: seen.append("too late"), lambda *_: seen.append("put there")))
        offs[0]()

    offs = [around_steps(lambda *_: seen.append("taken off")), around_steps(lambda *_: None)]
    offs[0]()
    offs.append(around_steps(before, lambda *_: seen.append("after")))
    optimizer.step()
    for off in offs:
        off()
    optimizer.step()
    assert seen == ["before", "after", "put there"]


def test_arguments_that_hooks_change(optimizer: torch.optim.Optimizer):
    """Each gets those of the one before."""

    def add(name: str) -> Any:
        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            _, closure = args
            return (optimizer, lambda: calls.append(f"{name} {closure()}")), kwargs

        return before

    calls: list[str] = []
    offs = [around_steps(add("first")), around_steps(lambda *_: None), around_steps(add("second"))]
    try:
        optimizer.step(lambda: "own")  # type: ignore[arg-type]
    finally:
        for off in offs:
            off()
    assert calls == ["first own", "second None"]


class Halved(torch.optim.Optimizer):
    """Its step is one graph, unlike those of torch's own."""

    def __init__(self, parameter: torch.Tensor):
        super().__init__([parameter], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)


def test_a_compiled_step_breaks_only_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    for hooks in (around._BEFORE, around._AFTER):  # a loop of another test may not be collected yet
        monkeypatch.setattr(hooks, "_hooks", {})
    parameter = torch.ones(2, requires_grad=True)
    optimizer, seen = Halved(parameter), []
    take_off = around_steps(lambda *_: seen.append(parameter.tolist()))
    torch.compile(optimizer.step, backend="eager")()
    take_off()
    torch._dynamo.reset()
    torch.compile(optimizer.step, backend="eager", fullgraph=True)()
    assert seen == [[1.0, 1.0]]
    assert parameter.tolist() == [0.25, 0.25]
