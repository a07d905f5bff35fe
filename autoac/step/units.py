"""FSDP2's units in a model: their parameters are gathered only around their own calls and the backward of these."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from autoac.torch_private import is_sharded_type, is_unit, own_class, parts_of, set_units_up

_SHOWN = 3


def own_name(module: torch.nn.Module) -> str:
    """The name of the module's class, as it was before the module was sharded."""
    return own_class(module).__name__


def units_inside(module: torch.nn.Module, besides: Collection[str] = ()) -> list[str]:
    """Names, relative to a module, of the outermost units in it, without the module itself.

    A region must not be larger than a unit: its values are recomputed in the backward of its last unit, where the
    parameters of its other units are not gathered.

    Args:
        besides: names of modules that are left out, with what is in them.
    """
    found: list[str] = []
    stack = [(name, child) for name, child in module.named_children()]
    while stack:
        name, child = stack.pop()
        if name in besides:
            continue
        if is_unit(child):
            found.append(name)
        else:
            stack.extend((f"{name}.{inner}", below) for inner, below in child.named_children())
    return found


def holds_units(module: torch.nn.Module) -> bool:
    """Whether there is a unit inside a module."""
    return any(is_unit(child) or holds_units(child) for child in module.children())


def has_units(model: torch.nn.Module) -> bool:
    """Whether the model or a module in it is a unit."""
    return is_unit(model) or holds_units(model)


def holds_shards(model: torch.nn.Module) -> bool:
    """Whether parameters or buffers are sharded or split over ranks (`DTensor`)."""
    return any(is_sharded_type(type(tensor)) for tensor in (*model.parameters(), *model.buffers()))


def some_units(names: Sequence[str], within: str = "") -> str:
    """A few of these names, as full names in the model."""
    full = sorted(f"{within}.{name}" if within else name for name in names)
    shown = ", ".join(map(repr, full[:_SHOWN]))
    return shown + (f" and {len(full) - _SHOWN} more" if len(full) > _SHOWN else "")


def roots_of_units(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost units, which own the state that the units inside share."""
    if is_unit(model):
        yield model
        return
    for child in model.children():
        yield from roots_of_units(child)


def settle_units(model: torch.nn.Module) -> None:
    """Run the one-time setup of units, which they do at their first call: restoring a step must not undo it."""
    for root in roots_of_units(model):
        set_units_up(root)


@contextlib.contextmanager
def gathered(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Context in which the parameters of a module are gathered, as during its call, if it is part of a unit.

    All ranks that shard the model enter it.

    Args:
        name: the module's, in the model.
    """
    unit: Any = _unit_of(model, name)
    if unit is None:
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def is_split(module: torch.nn.Module) -> bool:
    """Whether a module's own parameters or buffers, without those of units inside of it, are split over ranks now."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(is_sharded_type(type(tensor)) for tensor in own) or any(
        is_split(child) for child in module.children() if not is_unit(child)
    )


def _unit_of(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The innermost unit that a module is part of."""
    found, module = model if is_unit(model) else None, model
    for part in filter(None, name.split(".")):
        module = module.get_submodule(part)
        found = module if is_unit(module) else found
    return found


def here(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The plain tensors of this process that these keep their values in: shards, and the parts of quantized ones."""
    return [part for tensor in tensors for part in parts_of(tensor)]
