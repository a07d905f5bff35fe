"""Autograd: nodes, the running backward, saved-tensor hooks."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Function = TypeVar("Function", bound=Callable[..., Any])


def call_below_autograd(function: Callable[..., None], *args: Any) -> None:
    """Call a function below autograd and autocast: its ops record no graph although gradients are on; modes see them.

    Source: `_AutoDispatchBelowAutograd` (torch/csrc/utils/python_dispatch.cpp), `_DisableAutocast` and
    `_set_grad_enabled` (torch/csrc/autograd/init.cpp).
    """
    grad = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)  # as `torch.enable_grad` does, in a tenth of the time
    try:
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            function(*args)
    finally:
        torch._C._set_grad_enabled(grad)


def any_autocast() -> bool:
    """Whether autocast is on for any device in this thread.

    Source: `torch._C._is_any_autocast_enabled` (torch/csrc/autograd/init.cpp).
    """
    return torch._C._is_any_autocast_enabled()


def inside_autocast() -> bool:
    """Whether an autocast context is open in this thread, even one that turns it off: casts of weights are cached.

    Source: `torch.autocast.__exit__` (torch/amp/autocast_mode.py), which clears the cache where the depth is zero.
    """
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0


def next_node_number() -> int:
    """The sequence number that this thread's next autograd node gets; inside an op's dispatch, its own is one less.

    Source: `torch._C._autograd._get_sequence_nr` (torch/csrc/autograd/init.cpp).
    """
    return torch._C._autograd._get_sequence_nr()


def node_number(node: Any) -> int:
    """The sequence number of an autograd node: those made later in a thread have larger ones.

    Source: `Node._sequence_nr` (torch/csrc/autograd/python_cpp_function.cpp).
    """
    return node._sequence_nr()


def current_node() -> Any:
    """The autograd node that is being evaluated, None outside of backward.

    Source: `torch._C._current_autograd_node` (torch/csrc/Module.cpp).
    """
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether this thread is inside a backward pass.

    Source: `torch._C._current_graph_task_id` (torch/csrc/Module.cpp).
    """
    return torch._C._current_graph_task_id() != -1


def current_backward() -> int:
    """A number of the backward that is running in this thread, -1 outside of one.

    Source: `torch._C._current_graph_task_id` (torch/csrc/Module.cpp).
    """
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call a function when the backward that runs in this thread has come to its end; not if it fails.

    Source: `Variable._execution_engine.queue_callback` (torch/csrc/autograd/python_engine.cpp), by which DDP and FSDP2
    are called, too.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def backward_keeps_graph() -> bool:
    """Whether the running backward retains the graph; true outside of a backward pass.

    Source: `torch._C._autograd._get_current_graph_task_keep_graph` (torch/csrc/autograd/init.cpp).
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


def top_saved_tensors_hooks() -> tuple[Any, Any] | None:
    """The pack and unpack hook that autograd calls now, None if there are none.

    Source: `torch._C._autograd._top_saved_tensors_default_hooks` (torch/csrc/autograd/init.cpp).
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def saved_tensors_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be used here (`torch.autograd.graph.disable_saved_tensors_hooks`).

    Source: `torch._C._autograd._saved_tensors_hooks_is_enabled` (torch/csrc/autograd/init.cpp).
    """
    return torch._C._autograd._saved_tensors_hooks_is_enabled()


def in_function_transform() -> bool:
    """Whether `torch.func` transforms what runs here (grad, vmap, jvp, ...), or forward-mode derivatives are taken.

    Source: `torch._C._functorch.peek_interpreter_stack` (torch/csrc/functorch/init.cpp), `_current_level` in
    torch/autograd/forward_ad.py.
    """
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return forward_mode or torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_transforms(function: Function) -> Function:
    """The function, which runs as if no transform of `torch.func` were on (a plan is made in it, say).

    Source: `temporarily_clear_interpreter_stack` (torch/_functorch/pyfunctorch.py).
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is None:
            return function(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for several, as in `torch.func.vmap` or a gradient with `is_grads_batched`.

    Source: `torch._C._functorch.is_functorch_wrapped_tensor` and its like (torch/csrc/functorch/init.cpp).
    """
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)


def behind_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind the wrappers that `torch.func.vmap`, `jvp` and others pass to their function.

    A wrapper has no accessible storage of its own; dispatch modes and saved-tensor hooks see the plain tensor.

    Source: `torch._C._functorch.get_unwrapped` (torch/csrc/functorch/init.cpp).
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
