"""Modules nested so deeply that the interpreter's stack is nearly full without us."""

import sys
import threading

import pytest
import torch
from torch import nn

import autoac
from autoac.record.tape.instrumented import stack
from tests.execute.exact.harness import Case, assert_exact

X = torch.linspace(-1, 1, 256 * 8).reshape(256, 8)
DEPTH = 200
HALF = ".".join(["inner"] * (DEPTH // 2))


class Nested(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


def nested() -> nn.Module:
    model: nn.Module = nn.Linear(8, 8)
    for _ in range(DEPTH):
        model = Nested(model)
    return model


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_plan(engine: str):
    limit = sys.getrecursionlimit()
    assert_exact(Case(nested, lambda model: model(X).square().mean(), (HALF,)), engine, [0.0])
    assert sys.getrecursionlimit() == limit


def test_recursion_without_end_is_an_error_as_ever():
    class Endless(nn.Linear):
        def forward(self, input):
            return self(input)

    limit = sys.getrecursionlimit()
    with pytest.raises(RecursionError):
        autoac.profile(Endless(8, 8), X)
    assert sys.getrecursionlimit() == limit


def test_limit_is_there_once_for_all_threads():
    """Whoever is the last to record puts it back; somebody's own limit is left alone."""
    before, ready, go = sys.getrecursionlimit(), threading.Barrier(2), threading.Event()
    limits: list[int] = []

    def record(first: bool) -> None:
        stack.enter()
        ready.wait()
        if not first:
            go.wait()
        stack.leave()
        limits.append(sys.getrecursionlimit())
        go.set()

    threads = [threading.Thread(target=record, args=(first,)) for first in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert limits == [3 * before, before]


def test_a_limit_that_is_large_already():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**9)
    try:
        autoac.profile(nn.Linear(8, 8), X)
        assert sys.getrecursionlimit() == 10**9
    finally:
        sys.setrecursionlimit(before)
