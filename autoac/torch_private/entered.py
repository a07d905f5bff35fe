"""The modes and hooks active in a thread, and how to leave them when an interrupt hit the exit of their context."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch

from autoac.torch_private.autograd import top_saved_tensors_hooks

_SEEN_BY_DYNAMO = "_is_in_any_mode_without_ignore_compile_internals"
_FLAGS = [
    name
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode", _SEEN_BY_DYNAMO)
    if hasattr(_python_dispatch, name)  # older releases do not have all of them
]


class ModesEntered(NamedTuple):
    """The active state of a thread: the numbers of modes, the topmost saved-tensor hooks, gradients on or off.

    Args:
        flags: torch's flags about the modes on the dispatch stack, which it keeps beside the stack.

    Source: as for `modes_entered` and `leave_modes`.
    """

    dispatch: int
    flags: dict[str, bool]
    function: int
    hooks: tuple[Any, Any] | None
    grad: bool


def modes_entered() -> ModesEntered:
    """The current state.

    Source: `_len_torch_dispatch_stack` and `_len_torch_function_stack` (torch/csrc/autograd/init.cpp), the flags that
    `TorchDispatchMode.__enter__` sets (torch/utils/_python_dispatch.py).
    """
    return ModesEntered(
        torch._C._len_torch_dispatch_stack(),
        {name: getattr(_python_dispatch, name) for name in _FLAGS},
        torch._C._len_torch_function_stack(),
        top_saved_tensors_hooks(),
        torch.is_grad_enabled(),
    )


def leave_modes(before: ModesEntered) -> None:
    """Leave the modes and hooks that were entered since.

    A mode's own exit is not called: an interrupted exit cannot be called again.

    Source: the exits of `TorchDispatchMode` (torch/utils/_python_dispatch.py), of `TorchFunctionMode`
    (torch/overrides.py) and of `saved_tensors_hooks` (torch/autograd/graph.py).
    """
    while torch._C._len_torch_dispatch_stack() > before.dispatch:
        top = torch._C._get_dispatch_stack_at(torch._C._len_torch_dispatch_stack() - 1)
        torch._C._pop_torch_dispatch_stack(getattr(top, "_mode_key", None))
    for name, value in before.flags.items():
        setattr(_python_dispatch, name, value)
    if _SEEN_BY_DYNAMO in before.flags:
        _python_dispatch.set_is_in_mode_without_ignore_compile_internals(before.flags[_SEEN_BY_DYNAMO])
    while torch._C._len_torch_function_stack() > before.function:
        torch._C._pop_torch_function_stack()
    while top_saved_tensors_hooks() not in (before.hooks, None):
        torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._set_grad_enabled(before.grad)
