"""What the objects among a call's arguments hold, so that a change is noticed: a cache of keys and values, say."""

from __future__ import annotations

import types
from collections.abc import Hashable, Mapping
from typing import Any

import torch

_MOST = 20_000
"""Objects looked at in one call; what is beyond them is taken not to change."""
_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_NO_STATE = (torch.nn.Module, torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType)
"""A module's state is its own, and no argument."""


def held_in(arguments: Any) -> list[Hashable]:
    """What is in containers and in objects' attributes, however deep: tensors by identity and shape, numbers by value.

    Two of these are equal if nothing was put in, taken out or replaced in between. Values that are written in place do
    not count: these are ops, and seen as such.
    """
    found: list[Hashable] = []
    seen: set[int] = set()
    stack = [arguments]
    while stack and len(found) < _MOST:
        value = stack.pop()
        if isinstance(value, _VALUES):
            found.append(value)
        elif isinstance(value, torch.Tensor):
            found.append((id(value), value.shape))
        elif isinstance(value, tuple):
            found.append(len(value))
            stack.extend(value)
        elif id(value) not in seen and not isinstance(value, _NO_STATE):
            seen.add(id(value))
            found.append(id(value))
            if isinstance(value, Mapping):
                stack.extend(value.keys())
                stack.extend(value.values())
            elif isinstance(value, (list, set, frozenset)):
                stack.extend(value)
            stack.extend(getattr(value, "__dict__", {}).values())
    return found
