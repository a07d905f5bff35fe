"""Snapshots of the contents of a call's arguments, to notice changes, such as to a key-value cache."""

from __future__ import annotations

import types
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_MOST = 20_000
"""Limit of entries per call; anything beyond it is taken not to change."""
_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)
_NO_STATE = (torch.nn.Module, torch.Generator, type, types.ModuleType, types.FunctionType, types.MethodType)
"""Types that are not looked into; a module's state is its own, and no argument."""


@dataclass(frozen=True)
class Held:
    """A snapshot of the contents of arguments.

    Args:
        entries: tensors by identity, numbers and strings by value, everything else by type.
        tensors: weak references; the identities are valid as long as these are kept.
    """

    entries: tuple[Hashable, ...]
    tensors: tuple[weakref.ref[torch.Tensor], ...]

    def lost(self, later: Held) -> bool:
        """Whether any entry was removed or replaced later; additions do not count."""
        return bool(Counter(self.entries) - Counter(later.entries))


def held_in(arguments: Any) -> Held:
    """All leaves of nested containers and object attributes.

    The `entries` of two snapshots, the first of which is still alive, are equal if nothing was added, removed or
    replaced in between. In-place writes to tensors do not count: these are ops, and seen as such.
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
            entries.append(id(tensors[-1]))  # a live tensor has one such reference
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
            return  # an error of the object's own code, which the step itself may never run: its contents are skipped
