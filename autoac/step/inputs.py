"""Descriptions of a model's inputs: names, dtypes and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from autoac.step.autocast import autocasts
from autoac.step.restore import tensors_of

MOST = 8
"""Tensors that a description names."""
_UNDER = " under autocast to "
_LEFT_OUT = " more ["


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any], most: int = MOST) -> str:
    """The tensors of a call, such as "input_ids int64[4,32], labels int64[4,32]", and autocast if it is on.

    It is "" if there are no tensors. Of those after the first `most`, it has the number of elements.
    """
    tensors = list(_named(args, kwargs))
    parts = [f"{name} {_of(tensor)}".strip() for name, tensor in tensors[:most]]
    if len(tensors) > most:
        parts.append(
            f"and {len(tensors) - most}{_LEFT_OUT}{_elements(tensor for _, tensor in tensors[most:])}]"
        )
    words = ", ".join(parts)
    return words and words + under_autocast()


def under_autocast() -> str:
    """The autocast part of a description, such as " under autocast to bfloat16"; "" if autocast is off."""
    on = autocasts()
    return _UNDER + str(on[0][1]).removeprefix("torch.") if on else ""


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
    return sum(map(math.prod, _shapes_in(description)))


def number_in(description: str) -> int:
    """Number of the tensors that `described` names, without single numbers."""
    return len(_shapes_in(description))


def _shapes_in(description: str) -> list[tuple[int, ...]]:
    """Shapes of the tensors that a description names, without single numbers."""
    return [tuple(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", description)]


def is_longer(called: str, planned: str) -> bool:
    """Whether a call takes more than another if it keeps something for each pair of elements of a row.

    Attention's scores grow so: with the elements of a batch times their length. A length is the largest dimension of a
    tensor but its first. Descriptions that leave tensors out are not compared.

    Args:
        called, planned: descriptions of the calls' tensors.
    """
    if _LEFT_OUT in called or _LEFT_OUT in planned:
        return False
    return _pairs_in(called) > _pairs_in(planned)


def has_no_longer(called: str, other: str) -> bool:
    """Whether a call has the tensors of another one, none of them longer in any dimension.

    Args:
        called, other: descriptions of the calls' tensors.
    """
    if _LEFT_OUT in called or _LEFT_OUT in other:
        return called == other
    ours, theirs = _shapes_in(called), _shapes_in(other)
    return list(map(len, ours)) == list(map(len, theirs)) and all(
        size <= most
        for shape, limit in zip(ours, theirs, strict=True)
        for size, most in zip(shape, limit, strict=True)
    )


def _pairs_in(description: str) -> int:
    """Sum over tensors of elements times length."""
    return sum(math.prod(shape) * max(shape[1:], default=1) for shape in _shapes_in(description))


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
