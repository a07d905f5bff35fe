"""Descriptions of a model's inputs: names, dtypes and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from autoac.step.restore import tensors_of

_MOST = 8
_UNDER = " under autocast to "


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The tensors of a call, such as "input_ids int64[4,32], labels int64[4,32]", and autocast if it is on.

    It is "" if there are no tensors.
    """
    parts = [f"{name} {_of(tensor)}".strip() for name, tensor in _named(args, kwargs)]
    rest = _elements(tensor for _, tensor in list(_named(args, kwargs))[_MOST:])
    words = ", ".join(
        [*parts[:_MOST], *([f"and {len(parts) - _MOST} more [{rest}]"] if len(parts) > _MOST else [])]
    )
    return words and words + under_autocast()


def under_autocast() -> str:
    """The autocast part of a description, such as " under autocast to bfloat16"; "" if autocast is off."""
    types = [
        torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    ]
    return _UNDER + str(types[0]).removeprefix("torch.") if types else ""


def autocast_in(description: str) -> str:
    """The autocast part of a description, see `under_autocast`."""
    _, found, dtype = description.partition(_UNDER)
    return found + dtype


def without_autocast(description: str) -> str:
    """A description without its autocast part."""
    return description.partition(_UNDER)[0]


def elements_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements of all tensors of a call, without single numbers: trainers add some, and they make no batch larger."""
    return _elements(tensors_of((args, kwargs)))


def elements_in(description: str) -> int:
    """Elements of all tensors that `described` names, as `elements_of`."""
    shapes = re.findall(r"\[([\d,]+)\]", description)
    return sum(math.prod(map(int, shape.split(","))) for shape in shapes)


def larger(one: str, other: str) -> str:
    """The description with more elements."""
    return other if elements_in(other) > elements_in(one) else one


def _elements(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in (*(("", arg) for arg in args), *kwargs.items()):
        inside = value.items() if isinstance(value, Mapping) else [(name, value)]
        for key, item in inside:
            for tensor in tensors_of(item):
                yield str(key), tensor


def _of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(map(str, tensor.shape))}]"
