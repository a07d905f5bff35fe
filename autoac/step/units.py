"""FSDP2's units in a model: their parameters are whole only around their own calls and the backward of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from autoac.torch_private import is_unit, local_part, own_class, set_units_up

_SHOWN = 3


def own_name(module: torch.nn.Module) -> str:
    """The name of the module's class, as it was before the module was sharded."""
    return own_class(module).__name__


def units_inside(module: torch.nn.Module) -> list[str]:
    """Names, seen from a module, of the outermost units in it; the module itself is none of them.

    A region must not be larger than a unit: where its values are computed again, in the backward of its last one, the
    parameters of the others are not there.
    """
    found: list[str] = []
    stack = [(name, child) for name, child in module.named_children()]
    while stack:
        name, child = stack.pop()
        if is_unit(child):
            found.append(name)
        else:
            stack.extend((f"{name}.{inner}", below) for inner, below in child.named_children())
    return found


def holds_units(module: torch.nn.Module) -> bool:
    """Whether there is a unit inside of a module."""
    return any(is_unit(child) or holds_units(child) for child in module.children())


def some_units(names: Sequence[str], within: str = "") -> str:
    """A few of these names, as they are in the model."""
    full = sorted(f"{within}.{name}" if within else name for name in names)
    shown = ", ".join(map(repr, full[:_SHOWN]))
    return shown + (f" and {len(full) - _SHOWN} more" if len(full) > _SHOWN else "")


def roots_of_units(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost units: what brings in all that is shared by those inside."""
    if is_unit(model):
        yield model
        return
    for child in model.children():
        yield from roots_of_units(child)


def settle_units(model: torch.nn.Module) -> None:
    """Let units do now what they do once at their first call; it is not to be taken back with a step."""
    for root in roots_of_units(model):
        set_units_up(root)


def here(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is here of these tensors: of sharded ones the shards."""
    return [local_part(tensor) for tensor in tensors]
