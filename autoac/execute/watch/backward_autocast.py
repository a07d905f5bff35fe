"""Warning if backward runs inside autocast and the plan was made for autocast around forward and loss alone.

Autocast caches its casts of weights until its outermost context ends, even one with `enabled=False`. The casts are then
alive in backward; the plan assumes that they are freed.
"""

from __future__ import annotations

from typing import Any

import torch

from autoac.step.autocast import backward_is_as_planned
from autoac.step.restore import tensors_of
from autoac.torch_private import any_autocast, inside_autocast, remove_forward_hooks
from autoac.warned import warn

_WORDS = (
    "backward runs inside of autocast, and the plan was made for autocast around forward and loss alone: casts of "
    "weights live longer, and this step may take more than the budget. End autocast before loss.backward(), or plan "
    "the step as it is, with a function that runs forward, loss and backward: autoac.plan(model, step, ...)"
)


class BackwardAutocast:
    """Forward hook of the model: lets the first backward from its output check autocast and warn."""

    def __init__(self) -> None:
        self.seen = False  # a backward was checked

    def __deepcopy__(self, memo: dict[int, Any]) -> BackwardAutocast:
        return self

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Watch for the backward of this call."""
        if self.seen or torch.compiler.is_compiling():
            return
        node = next((t.grad_fn for t in tensors_of(output) if t.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(self._backward_begins)

    def _backward_begins(self, gradients: Any) -> None:
        if not self.seen and not backward_is_as_planned():
            self.seen = True
            # Autograd's device threads know whether autocast is on, but not the nesting depth of its contexts.
            if any_autocast() or inside_autocast():
                warn(_WORDS)


def watch_backward(model: torch.nn.Module) -> None:
    """Register the hook on a model, until `unwatch_backward`."""
    model.register_forward_hook(BackwardAutocast())


def unwatch_backward(model: torch.nn.Module) -> None:
    """Remove the hook, if it is there."""
    remove_forward_hooks(model, BackwardAutocast)
