"""What the objects among a call's arguments hold, so that a change is noticed: a cache of keys and values, say."""

from __future__ import annotations

import types
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_MOST = 20_000
"""Things looked at in one call; what is beyond them is taken not to change."""
_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_NO_STATE = (torch.nn.Module, torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType)
"""A module's state is its own, and no argument."""


@dataclass(frozen=True)
class Held:
    """What arguments held at some time.

    Args:
        entries: tensors by identity, numbers and texts by value, everything else by type.
        tensors: the identities; they stay valid as long as these weak references are kept.
    """

    entries: tuple[Hashable, ...]
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    def lost(self, later: Held) -> bool:
        """Whether something that was held was taken out or replaced later; what was put in since does not count."""
        return bool(Counter(self.entries) - Counter(later.entries))


def held_in(arguments: Any) -> Held:
    """What is in containers and in attributes of objects, however deep.

    The `entries` of two of these, of which the first is still alive, are equal if nothing was put in, taken out or
    replaced in between. Values that are written in place do not count: these are ops, and seen as such.
    """
    entries: list[Hashable] = []
    tensors: list[weakref.ref[torch.Tensor]] = []
    seen: set[int] = set()
    stack = [arguments]
    while stack and len(entries) < _MOST:
        value = stack.pop()
        if isinstance(value, _VALUES):
            entries.append(value)
        elif isinstance(value, torch.Tensor):
            tensors.append(weakref.ref(value))
            entries.append(id(tensors[-1]))  # a tensor has one such reference as long as it lives
        elif id(value) not in seen and not isinstance(value, _NO_STATE):
            seen.add(id(value))
            entries.append(type(value))
            stack.extend(_inside(value))
    return Held(tuple(entries), tuple(tensors))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif type(value) is dict:
        yield from value.keys()
        yield from value.values()
    else:
        try:
            if isinstance(value, Mapping):
                yield from list(value.keys())
                yield from list(value.values())
            yield from getattr(value, "__dict__", {}).values()
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            yield from [
                getattr(value, name, None) for name in slots if name not in ("__dict__", "__weakref__")
            ]
        except Exception:
            return  # somebody's own code, which the step itself need not run: such an object is not looked into
