"""Restores the objects that an optimizer's settings and attributes lead to: a copy of the optimizer shares them."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from autoac.step.restore import put_back, values_kept

_MOST_OBJECTS = 10_000
_MOST_ELEMENTS = 4096
_NOT_ENTERED = (
    torch.nn.Module,
    torch.optim.Optimizer,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    type,
)


@contextlib.contextmanager
def unchanged(roots: Iterable[Any]) -> Iterator[None]:
    """Context: what these objects lead to is afterwards as it was.

    That is: contents of dictionaries, lists and sets, attributes of objects, and values of tensors on the CPU and of
    numpy arrays, if these are small. Modules, optimizers and functions are not entered. Of many objects, the nearest
    count.
    """
    undo: list[Callable[[], None]] = []
    tensors: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # holds them, so that no number is used twice
    queue = deque(roots)
    while queue and len(seen) < _MOST_OBJECTS:
        found = queue.popleft()
        if id(found) in seen or isinstance(found, _NOT_ENTERED):
            continue
        seen[id(found)] = found
        if isinstance(found, torch.Tensor):
            if found.device.type == "cpu" and found.numel() <= _MOST_ELEMENTS and not found.requires_grad:
                tensors.append(found)
            continue
        if isinstance(found, np.ndarray):
            if found.size <= _MOST_ELEMENTS and found.flags.writeable:
                undo.append(_array(found))
            continue
        if isinstance(found, dict):
            undo.append(_dictionary(found))
            queue.extend(found.values())
        elif isinstance(found, (list, deque)):
            undo.append(_sequence(found))
            queue.extend(found)
        elif isinstance(found, set):
            undo.append(_set(found))
        elif isinstance(found, tuple):
            queue.extend(found)
        if isinstance(attributes := getattr(found, "__dict__", None), dict):
            queue.append(attributes)
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
        if not _same(_flat(place.items()), _flat(before)):
            place.clear()
            place.update(before)

    return restore


def _sequence(place: list[Any] | deque[Any]) -> Callable[[], None]:
    before = list(place)

    def restore() -> None:
        if not _same(place, before):
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


def _flat(items: Iterable[tuple[Any, Any]]) -> list[Any]:
    return [one for item in items for one in item]


def _same(found: Iterable[Any], before: Iterable[Any]) -> bool:
    """Whether they are the same objects in the same order."""
    return list(map(id, found)) == list(map(id, before))
