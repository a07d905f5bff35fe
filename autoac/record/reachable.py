"""Restores the objects that an optimizer's settings and attributes lead to: a copy of the optimizer shares them."""

from __future__ import annotations

import contextlib
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from autoac.step.restore import is_plain, put_back, same_items, values_kept

_MOST_OBJECTS = 10_000
_MOST_ELEMENTS = 4096
_DICTIONARIES = (dict, OrderedDict, defaultdict, Counter)


@contextlib.contextmanager
def unchanged(roots: Iterable[Any], modules: Collection[str]) -> Iterator[None]:
    """Context: what these objects lead to is afterwards as it was.

    That is: contents of dictionaries, lists, queues and sets, attributes of objects, and values of tensors on the CPU
    and of numpy arrays, if these are small. Of many objects, the nearest count.

    Args:
        modules: names of the Python modules whose objects have attributes of interest. Those of others, such as loggers
            and thread pools, may belong to other threads, and are not entered.
    """
    undo: list[Callable[[], None]] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # holds them, so that no number is used twice
    queue = deque(roots)
    while queue and len(seen) < _MOST_OBJECTS:
        found = queue.popleft()
        kind = type(found)
        if id(found) in seen:
            continue
        seen[id(found)] = found
        if issubclass(kind, torch.Tensor):
            on_cpu = is_plain(found) and found.device.type == "cpu" and not found.requires_grad
            if on_cpu and found.numel() <= _MOST_ELEMENTS:
                tensors.append(found)
        elif kind is np.ndarray:
            if found.size <= _MOST_ELEMENTS and found.flags.writeable:
                undo.append(_array(found))
        elif kind in _DICTIONARIES:
            undo.append(_dictionary(found))
            queue.extend(found.values())
        elif kind in (list, deque):
            undo.append(_sequence(found))
            queue.extend(found)
        elif kind is set:
            undo.append(_set(found))
        elif issubclass(kind, tuple):
            queue.extend(found)
        elif (
            kind is types.SimpleNamespace
            or kind.__module__ in modules
            or hasattr(kind, "__dataclass_fields__")
        ) and not issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, type)):
            queue.append(vars(found) if hasattr(found, "__dict__") else {})
    with values_kept(tensors):
        try:
            yield
        finally:
            put_back(undo)


def _array(array: np.ndarray) -> Callable[[], None]:
    before = array.copy()

    def restore() -> None:
        array[...] = before

    return restore


def _dictionary(place: dict[Any, Any]) -> Callable[[], None]:
    before = list(place.items())

    def restore() -> None:
        if same_items(list(place.items()), before):
            return
        place.clear()
        for name, value in before:  # `update` of a Counter would count
            place[name] = value

    return restore


def _sequence(place: list[Any] | deque[Any]) -> Callable[[], None]:
    before = list(place)

    def restore() -> None:
        if not same_items(list(place), before):
            place.clear()
            place.extend(before)

    return restore


def _set(place: set[Any]) -> Callable[[], None]:
    before = set(place)

    def restore() -> None:
        if place != before:
            place.clear()
            place.update(before)

    return restore
