"""Warnings if backward runs otherwise than in the planned step, and takes more memory for that.

Inside autocast, if the plan was made for autocast around forward and loss alone: autocast caches its casts of weights
until its outermost context ends, even one with `enabled=False`. The casts are then alive in backward; the plan assumes
that they are freed.

With `create_graph=True`, if the planned step went backward without: autograd saves what backward makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoac.step.autocast import backward_is_as_planned
from autoac.step.restore import tensors_of
from autoac.torch_private import any_autocast, backward_keeps_graph, inside_autocast, remove_forward_hooks
from autoac.warned import warn

_INSIDE_AUTOCAST = (
    "backward runs inside of autocast, and the plan was made for autocast around forward and loss alone: casts of "
    "weights live longer, and this step may take more than the budget. End autocast before loss.backward(), or plan "
    "the step as it is, with a function that runs forward, loss and backward: autoac.plan(model, step, ...)"
)

WITH_A_GRAPH = "goes backward with create_graph=True, which the recorded one did not: autograd holds more"

_WITH_A_GRAPH = (
    f"this step {WITH_A_GRAPH}, and it may take more than the budget. Plan a step that does so: "
    "autoac.plan(model, step, ...) with a function that runs it, or one of the first steps under autoac.auto"
)


class GraphOfBackward:
    """Hook of autograd's nodes. It refers to nothing else, as a graph that the loop holds keeps it alive.

    Attributes:
        is_made: a backward has made a graph of its own (`create_graph`).
        is_kept: a backward has kept the graph (`retain_graph`).
    """

    __slots__ = ("is_kept", "is_made")

    def __init__(self) -> None:
        self.is_made = self.is_kept = False

    def __call__(self, gradients: Any) -> None:
        """A node is about to run."""
        self.is_made |= torch.is_grad_enabled()
        self.is_kept |= backward_keeps_graph()


def before_backward(result: Any, hook: Callable[[Any], None]) -> None:
    """Have a hook called before anything goes backward from a tensor in a module's result."""
    for node in {tensor.grad_fn for tensor in tensors_of(result)}:
        if node is not None:
            node.register_prehook(hook)


class UnplannedBackward:
    """Forward hook of the model: lets the first backwards from its outputs be checked, and warns.

    Args:
        autocast, graph: what to warn of.
    """

    def __init__(self, autocast: bool, graph: bool) -> None:
        self._autocast, self._graph = autocast, graph

    def __deepcopy__(self, memo: dict[int, Any]) -> UnplannedBackward:
        return self

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch for the backward of this call."""
        if not (self._autocast or self._graph) or torch.compiler.is_compiling():
            return
        before_backward(output, self._backward_begins)

    def _backward_begins(self, gradients: Any) -> None:
        if self._graph and torch.is_grad_enabled():
            self._graph = False
            warn(_WITH_A_GRAPH)
        if self._autocast and not backward_is_as_planned():
            self._autocast = False
            # Autograd's device threads know whether autocast is on, but not the nesting depth of its contexts.
            if any_autocast() or inside_autocast():
                warn(_INSIDE_AUTOCAST)


def watch_backward(model: torch.nn.Module, autocast: bool, graph: bool) -> None:
    """Register the hook on a model, until `unwatch_backward`; arguments as of `UnplannedBackward`."""
    if autocast or graph:
        model.register_forward_hook(UnplannedBackward(autocast, graph))


def unwatch_backward(model: torch.nn.Module) -> None:
    """Remove the hook, if it is there."""
    remove_forward_hooks(model, UnplannedBackward)
