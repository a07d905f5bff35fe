"""State of a region's modules, restored for engine sac's second run of their code.

A module may reassign an attribute or a buffer that it has read, or its `.data` (a counter, a running average that is
assigned and not written in place), and `torch.func.functional_call` swaps parameters for the time of forward. The
second run finds the tensors and numbers that the first run found, and its own assignments are undone.

Nothing here holds an autograd graph, which would make a reference cycle: tensors are referenced weakly until an op
reads them, and then held without their graph. The recomputation needs that memory anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from autoac.step.restore import point_to
from autoac.torch_private import (
    behind_transforms,
    detach_sharing_version,
    detach_unseen,
    disable_dispatch_modes,
    own_tensors,
    storage_key,
)

_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set)
_MOST = 1000
"""Most items of a container that are inspected."""

_ABSENT = object()

Table = dict[str, Any]
Place = tuple[Table, str]
"""A module's attributes, buffers or parameters, and a name in them."""

Read = tuple[Place, weakref.ref[torch.Tensor], torch.Tensor, bool]
"""A tensor that was read: its place, a weak reference, the tensor held for it, and whether it had a graph."""


class ModuleState:
    """Snapshot of module state: make it before the first run, and use it as a context around the second run.

    Args:
        root: the region's module.
    """

    def __init__(self, root: torch.nn.Module):
        self.root = root
        self.numbers: list[tuple[Place, Any]] = []
        self.tensors: list[Read] = []
        self.values: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []  # of those; an alias
        self.containers: list[tuple[Place, list[int]]] = []  # of which a tensor was read
        self.unread: dict[int, list[tuple[Place, Any, weakref.ref[torch.Tensor]]]] = {}  # by storage
        for table in _tables(root, parameters=True):
            for name, value in table.items():
                if name in _OF_TORCH:
                    continue
                if type(value) in _PLAIN:
                    self._wait(value, (table, name), None)
                elif isinstance(value, _NUMBERS):
                    self.numbers.append(((table, name), value))
                elif type(value) in _CONTAINERS:
                    items = [id(item) for item in _items(value)]
                    for item in _items(value):
                        if type(item) in _PLAIN:
                            self._wait(item, (table, name), items)

    def _wait(self, tensor: torch.Tensor, place: Place, items: list[int] | None) -> None:
        if tensor.layout is torch.strided and behind_transforms(tensor) is tensor:
            self.unread.setdefault(storage_key(tensor), []).append((place, items, weakref.ref(tensor)))

    def is_read(self, key: int) -> None:
        """Note that an op of the first run reads a storage."""
        for place, items, known in self.unread.pop(key, ()):
            tensor = known()
            if tensor is None:
                continue  # dead; another storage has its address
            if items is not None:
                self.containers.append((place, items))
            else:
                with disable_dispatch_modes():
                    values = detach_sharing_version(tensor)
                held = tensor if tensor.is_leaf else values
                self.values.append((known, values))
                self.tensors.append((place, known, held, tensor.requires_grad and not tensor.is_leaf))

    def lost(self) -> str:
        """Name of a container attribute that has changed since the first run read from it, "" if there is none."""
        for (table, name), items in self.containers:
            value = table.get(name)
            if type(value) not in _CONTAINERS or [id(item) for item in _items(value)] != items:
                return name
        return ""

    def __enter__(self) -> None:
        self.found = [(table, dict(table)) for table in _tables(self.root, parameters=False)]
        self.data = [(tensor, detach_unseen(tensor)) for tensor in self._tensors_now()]
        for known, values in self.values:
            if (tensor := known()) is not None:
                point_to(tensor, values)
        self.exchanged: list[tuple[Place, Any, Any]] = []
        wanted = [
            (place, value) for place, value in self.numbers if place[0].get(place[1], _ABSENT) is not value
        ]
        for (table, name), known, tensor, had_graph in self.tensors:
            now = table.get(name, _ABSENT)
            if now is _ABSENT or now is not known():
                wanted.append(((table, name), _as_it_was(tensor, had_graph)))
        for (table, name), value in wanted:
            self.exchanged.append(((table, name), value, table.get(name, _ABSENT)))
            table[name] = value

    def __exit__(self, *_: Any) -> None:
        # FSDP gathers parameters in a second run, and they must stay: among parameters, only our own swaps are undone.
        for (table, name), value, before in self.exchanged:
            if table.get(name) is value:
                _put(table, name, before)
        for table, values in self.found:
            for name in [*table, *values]:
                if table.get(name, _ABSENT) is not values.get(name, _ABSENT):
                    _put(table, name, values.get(name, _ABSENT))
        for tensor, values in self.data:
            point_to(tensor, values)
        self.found, self.exchanged, self.data = [], [], []

    def _tensors_now(self) -> Iterator[torch.Tensor]:
        for table in _tables(self.root, parameters=True):
            for value in table.values():
                if (
                    type(value) in _PLAIN
                    and value.layout is torch.strided
                    and behind_transforms(value) is value
                ):
                    yield value


def _put(table: Table, name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _as_it_was(tensor: torch.Tensor, had_graph: bool) -> torch.Tensor:
    """The held tensor, as a non-leaf if the original was one: autocast caches casts of leaves."""
    if not had_graph:
        return tensor
    with disable_dispatch_modes(), torch.enable_grad():
        return tensor.requires_grad_().view_as(tensor)


def _tables(root: torch.nn.Module, parameters: bool) -> Iterator[Table]:
    """The attribute and buffer tables of a module and those inside it, and with `parameters` the parameter tables."""
    for module in root.modules():
        yield vars(module)
        weights, buffers = own_tensors(module)
        for table in (buffers, weights) if parameters else (buffers,):
            if type(table) is dict:  # a scripted module's is something else
                yield table


def _items(container: Any) -> Iterator[Any]:
    """All items of a container and of those nested in it, at most `_MOST`."""
    return islice(_all_items(container), _MOST)


def _all_items(container: Any) -> Iterator[Any]:
    for item in container.values() if type(container) is dict else container:
        yield item
        if type(item) in _CONTAINERS:
            yield from _all_items(item)
