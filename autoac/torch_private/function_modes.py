"""Torch function modes, and the cross entropy that they see as a whole."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.utils._device


def function_modes() -> list[Any]:
    """The torch function modes that are on in this thread, the topmost last.

    Source: `torch._C._get_function_stack_at` (torch/csrc/autograd/init.cpp).
    """
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


disable_torch_functions = torch._C.DisableTorchFunction
"""Context in which torch's functions are called without function modes, and without those of tensor subclasses.

Source: `torch._C.DisableTorchFunction` (torch/csrc/autograd/init.cpp).
"""


def is_device_mode(mode: Any) -> bool:
    """Whether a torch function mode is that of a default device, which affects only functions that make tensors.

    Source: `DeviceContext` in torch/utils/_device.py.
    """
    return type(mode) is torch.utils._device.DeviceContext


put_function_mode_on = torch._C._push_on_torch_function_stack
"""Put a torch function mode on the stack, as the topmost.

Source: `torch._C._push_on_torch_function_stack` (torch/csrc/autograd/init.cpp).
"""


def take_function_mode_off(mode: Any) -> None:
    """Take a torch function mode off the stack, at any position; no-op if it is not on the stack any more.

    Source: `torch._C._pop_torch_function_stack` (torch/csrc/autograd/init.cpp).
    """
    above = []
    while function_modes():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        put_function_mode_on(other)


_CROSS_ENTROPY = torch.nn.functional.cross_entropy
_PATCHED = inspect.getsourcefile(_CROSS_ENTROPY) != torch.nn.functional.__file__

torchs_cross_entropy = None if _PATCHED else _CROSS_ENTROPY
"""`torch.nn.functional.cross_entropy`; None if a library had replaced it when this was imported.

Source: `cross_entropy` in torch/nn/functional.py.
"""
