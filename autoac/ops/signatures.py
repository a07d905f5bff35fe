"""Signatures of calls, which determine an op's time and workspace: overload, shapes, strides, dtypes, scalars, device.

Identical layers have equal signatures, so each is timed once. A signature's text is the key of a device's cost table.
Scratch arguments can be made from a signature, so that an op can be timed without a real run of the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from autoac.torch_private import dense_values, ranks_of_group
from autoac_solver.records.collectives import may_repeat, over


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor argument without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The tensor's description, without strides if its layout has none; for a jagged tensor, that of its values."""
        tensor = dense_values(tensor)
        stride = tensor.stride() if tensor.layout is torch.strided else None
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device)

    @property
    def is_contiguous(self) -> bool:
        """Whether the strides are those that the shape implies."""
        expected, step = [], 1
        for size in reversed(self.shape):
            expected.append(step)
            step *= max(size, 1)
        pairs = zip(self.shape, self.stride or (), reversed(expected), strict=True)
        return all(size <= 1 or stride == usual for size, stride, usual in pairs)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def moved_bytes(self) -> int:
        """Bytes that are read or written if every element is touched once; an expanded dimension counts once."""
        count = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride or self.shape, strict=True):
            count *= size if stride else 1
        return count

    def scratch(self) -> torch.Tensor:
        """A tensor like it, with values that most ops accept: normal numbers, zeros for integers."""
        if self.stride is None:
            raise NotImplementedError("no scratch tensor can be made for a layout without strides")
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            spread = any(
                size > 1 and not stride for size, stride in zip(self.shape, self.stride, strict=True)
            )
            (tensor.as_strided((1,), (1,)) if spread else tensor).fill_(0.5)
            if not spread and self.dtype.itemsize > 1:
                tensor.normal_()
            return tensor
        return tensor.zero_() if self.is_contiguous else torch.zeros_like(tensor)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = ",".join(map(str, self.shape))
        order = "" if self.stride is None or self.is_contiguous else "/" + ",".join(map(str, self.stride))
        return f"{name}[{shape}{order}]"


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """A storage among an op's arguments, which `torch.load` and safetensors pass to `set_`."""

    bytes: int

    def __str__(self) -> str:
        return f"storage of {self.bytes} bytes"  # torch writes all of them


@dataclass(frozen=True, slots=True)
class Signature:
    """An op's call without its values; equal calls take equal time."""

    func: Any
    args: tuple[Hashable, ...]
    kwargs: tuple[tuple[str, Hashable], ...]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> Signature:
        """The signature of a call."""
        described = tuple((name, _describe(value)) for name, value in kwargs.items())
        return cls(func, tuple(map(_describe, args)), described)

    @property
    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor among the arguments."""
        for value in (*self.args, *(value for _, value in self.kwargs)):
            yield from _specs(value)

    @property
    def device(self) -> torch.device | None:
        """Device of its first tensor, None without one."""
        return next((spec.device for spec in self.tensors), None)

    @property
    def dtype(self) -> str:
        """The dtype it computes in, for rates: that of its first floating-point tensor, "" if there is none."""
        floating = (s.dtype for s in self.tensors if s.dtype.is_floating_point or s.dtype.is_complex)
        return next((str(dtype).removeprefix("torch.") for dtype in floating), "")

    def scratch(self) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of this signature on fresh memory.

        Raises:
            NotImplementedError: one of them cannot be made.
        """
        return [_scratch(value) for value in self.args], {name: _scratch(v) for name, v in self.kwargs}

    def fits_in(self, n_bytes: int) -> bool:
        """Whether such arguments, results and workspace together take less than `n_bytes`, by a rough estimate."""
        return 3 * sum(spec.moved_bytes for spec in self.tensors) < n_bytes

    def moved_bytes(self, created: Iterable[torch.Tensor]) -> int:
        """Bytes read and written if every element is touched once."""
        read = sum(spec.moved_bytes for spec in self.tensors)
        return read + sum(TensorSpec.of(tensor).moved_bytes for tensor in created)

    def __str__(self) -> str:
        named = [f"{name}={_text(value)}" for name, value in self.kwargs if value is not None]
        given = [*map(_text, self.args), *named]
        if may_repeat(str(self.func)):  # its last argument is the name of a group of ranks
            given[-1] = over(ranks_of_group(str(self.args[-1])))
        return f"{self.func}({', '.join(given)})"


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of a matrix product, convolution or attention; 0 for ops that only move memory.

    Formulas: `torch.utils.flop_counter`, which has no entry for the names of attention's CPU kernel.
    """
    packet = getattr(func, "overloadpacket", None)
    formula = flop_registry.get(_SAME_FLOPS.get(str(packet), packet))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except AssertionError:
        # The formulas of older torch (2.11) refuse key heads that several queries share.
        if not str(packet).startswith("aten._scaled_dot_product_"):
            raise
        return int(formula(*_with_all_heads(str(packet), args), **kwargs, out_val=result))


def _with_all_heads(op: str, args: Any) -> list[Any]:
    """The arguments of an attention op with as many key heads as query heads."""
    place = 1 if op.endswith("_backward") else 0
    query, key, value = args[place : place + 3]
    heads = query.shape[1]
    whole = [torch.empty((x.shape[0], heads, *x.shape[2:]), device="meta") for x in (key, value)]
    return [*args[: place + 1], *whole, *args[place + 3 :]]


_SAME_FLOPS = {
    "aten._scaled_dot_product_flash_attention_for_cpu": torch.ops.aten._scaled_dot_product_flash_attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


def _describe(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    if isinstance(value, torch.Generator):
        return "generator"
    if isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
        return StorageSpec(value.nbytes())
    return value if isinstance(value, Hashable) else repr(value)


def _specs(value: Any) -> Iterator[TensorSpec]:
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _specs(item)


def _scratch(value: Any) -> Any:
    if isinstance(value, TensorSpec):
        return value.scratch()
    if isinstance(value, tuple):
        return [_scratch(item) for item in value]
    if isinstance(value, StorageSpec):
        raise NotImplementedError("no scratch storage is made")
    return None if value == "generator" else value


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(value).removeprefix("torch.")
