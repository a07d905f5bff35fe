"""Graph breaks within loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoac import torch_private

LIMIT: dict[str, Any] = {"recompile_limit": 100}


class Loop(nn.Module):
    """Calls modules that the compiler leaves out, and notes what happens between."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(turns))
        self.named = nn.ModuleDict({str(i): nn.Identity() for i in range(turns)})
        self.seen: list[Any] = []
        for layer in (*self.layers, *self.named.values()):
            layer.__dict__["forward"] = torch_private.disable_dynamo(lambda x: self.turn(x), "it is left out")

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(float(x.sum()))
        return x + len(self.seen)


def over_a_list(model: Loop, x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    for layer in model.layers:
        x = layer(x)
        model.seen.append("turn")
    return x.sin()


def over_numbered(model: Loop, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x + index)
    return x.sin()


def over_values(model: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in model.named.values():
        x = layer(x)
    return x.sin()


def over_items(model: Loop, x: torch.Tensor) -> torch.Tensor:
    for name, layer in model.named.items():
        x = layer(x) + len(name)
    return x.sin()


def over_a_slice_twice(model: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers[:2]:
        for other in (layer, layer):
            x = other(x)
    return x.sin()


@pytest.mark.parametrize(
    "function", [over_a_list, over_numbered, over_values, over_items, over_a_slice_twice]
)
@pytest.mark.parametrize("turns", [3, 20])
def test_code_after_a_loop_with_breaks_is_compiled(function: Callable[..., torch.Tensor], turns: int):
    """A loud test: `breaks_in_loops` stands on what Dynamo does today. More turns than Dynamo's own limits allow."""
    if function is over_a_slice_twice and turns > 3:
        pytest.skip("it has as many turns")
    torch._dynamo.reset()
    model, plain, sines = Loop(turns), Loop(turns), list[bool]()

    def noted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        sines.append(any(node.target == "sin" for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(function, backend=noted, dynamic=False, **LIMIT)
    for rows in (2, 2, 3):
        with torch_private.breaks_in_loops(1000):
            assert torch.equal(compiled(model, torch.ones(rows)), function(plain, torch.ones(rows)))
        assert model.seen == plain.seen
        model.seen.clear()
        plain.seen.clear()
    assert sum(sines) == 2  # one for each number of rows


def test_elsewhere_torch_does_as_ever():
    torch._dynamo.reset()
    graphs = list[Any]()

    def noted(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    with torch_private.breaks_in_loops(1000):
        pass
    model = Loop(3)
    config = torch._dynamo.config
    limits = config.recompile_limit, config.accumulated_recompile_limit, config.allow_unspec_int_on_nn_module
    torch.compile(over_a_list, backend=noted)(model, torch.ones(2))
    assert not any(node.target == "sin" for graph in graphs for node in graph.graph.nodes)
    assert limits == (8, 256, False)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return x * self.steps


@pytest.mark.parametrize("within", [False, True])
def test_integers_of_modules_that_are_compiled_as_one_graph(within: bool):
    torch._dynamo.reset()
    model, plain, translated = Counter(), Counter(), list[int]()
    compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
    for _ in range(6):
        with torch_private.numbers_as_inputs() if within else contextlib.nullcontext():
            assert torch.equal(compiled(torch.ones(2)), plain(torch.ones(2)))
        translated.append(torch_private.graphs_translated())
    assert (translated[-1] == translated[2]) == within


@pytest.mark.parametrize("within", [False, True])
def test_integers_of_modules_become_inputs(within: bool):
    torch._dynamo.reset()
    model, plain, translated = Counter(), Counter(), list[int]()
    compiled = torch.compile(model.forward, backend="eager")
    for _ in range(6):
        with torch_private.breaks_in_loops(1000) if within else contextlib.nullcontext():
            assert torch.equal(compiled(torch.ones(2)), plain(torch.ones(2)))
        translated.append(torch_private.frames_translated())
    assert (translated[-1] == translated[2]) == within
