"""What a region's modules hold besides their weights: engine sac runs their code a second time.

A module may put something else in place of an attribute or a buffer that it has read (a counter, a running average that
is assigned and not written), and `torch.func.functional_call` puts other parameters in place for the time of forward.
The second run finds what the first one found, and whatever it puts in place itself is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, set)
_ABSENT = object()

Table = dict[str, Any]


class ModuleState:
    """What the modules held before the first run: make it then.

    Args:
        root: the region's module.
    """

    def __init__(self, root: torch.nn.Module):
        self.root = root
        self.entries = _entries(_tables(root, parameters=True))
        self.containers = _containers(self.entries)

    def settle(self, was_read: Callable[[torch.Tensor], bool]) -> None:
        """The first run is over: let go of what the second one has no use for.

        Args:
            was_read: whether an op has read a tensor's storage. Others are not kept alive.
        """

        def is_kept(value: Any) -> bool:
            return was_read(value) if type(value) in _PLAIN else isinstance(value, _SIMPLE)

        self.entries = [entry for entry in self.entries if is_kept(entry[2])]
        self.containers = [pair for pair in self.containers if not _same(_items(pair[0]), pair[1])]

    def __enter__(self) -> None:
        """The second run begins."""
        tables = [*_tables(self.root, parameters=False)]
        self.found = [(table, dict(table)) for table in tables]
        self.found_containers = _containers(_entries(tables))
        self.changed = [
            (table, name, value, table.get(name, _ABSENT))
            for table, name, value in self.entries
            if table.get(name, _ABSENT) is not value
        ]
        for table, name, value, _ in self.changed:
            table[name] = value
        for container, items in self.containers:
            _fill(container, items)

    def __exit__(self, *_: Any) -> None:
        for table, name, value, before in self.changed:
            if before is not _ABSENT and table.get(name) is value:
                table[name] = before
        for table, values in self.found:
            for name in [name for name in table if name not in values]:
                del table[name]
            for name, value in values.items():
                if table.get(name, _ABSENT) is not value:
                    table[name] = value
        for container, items in self.found_containers:
            if not _same(_items(container), items):
                _fill(container, items)


def _tables(root: torch.nn.Module, parameters: bool) -> Iterator[Table]:
    """Attributes and buffers of a module and those inside it, and their parameters.

    What else exchanges parameters in a second run (FSDP gathers them) is to stay.
    """
    for module in root.modules():
        own = vars(module)
        yield own
        for name in ("_buffers", "_parameters") if parameters else ("_buffers",):
            table = own.get(name)
            if type(table) is dict:  # a scripted module's is something else
                yield table


def _entries(tables: Iterable[Table]) -> list[tuple[Table, str, Any]]:
    return [
        (table, name, value) for table in tables for name, value in table.items() if name not in _OF_TORCH
    ]


def _containers(entries: list[tuple[Table, str, Any]]) -> list[tuple[Any, list[Any]]]:
    return [(value, _items(value)) for _, _, value in entries if type(value) in _CONTAINERS]


def _items(container: Any) -> list[Any]:
    return list(container.items()) if type(container) is dict else list(container)


def _same(left: list[Any], right: list[Any]) -> bool:
    if len(left) != len(right):
        return False
    return all(
        a is b or (type(a) is type(b) is tuple and _same([*a], [*b]))
        for a, b in zip(left, right, strict=True)
    )


def _fill(container: Any, items: list[Any]) -> None:
    container.clear()
    (container.extend if type(container) is list else container.update)(items)
