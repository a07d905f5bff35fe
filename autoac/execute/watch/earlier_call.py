"""Counts the graphs of a model's previous calls that are alive and wait for their backward."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from autoac.step.restore import tensors_of
from autoac.torch_private import in_backward


class _Backward:
    """Prehook of a graph's last nodes. It dies with them, and so with the graph."""

    def __init__(self) -> None:
        self.began = False

    def __call__(self, gradients: Any) -> None:
        self.began = True


class EarlierCall:
    """Forward hook of the model: notes the graph of each call. A copied or unpickled one has noted none."""

    def __init__(self) -> None:
        # Replaced as a whole: another thread may call the model as well.
        self._backwards: tuple[weakref.ref[_Backward], ...] = ()

    def __reduce__(self) -> Any:
        return EarlierCall, ()

    @property
    def waiting(self) -> int:
        """The number of calls whose graph is alive, and whose backward has not begun."""
        return len(self._still_waiting())

    def _still_waiting(self) -> list[weakref.ref[_Backward]]:
        return [kept for kept in self._backwards if (backward := kept()) is not None and not backward.began]

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Note the graph of this call."""
        if torch.compiler.is_compiling() or in_backward():
            return
        backward = _Backward()
        # Backward may begin at any output: a loop may have a loss of its own.
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(backward)
        self._backwards = (*self._still_waiting(), weakref.ref(backward))
