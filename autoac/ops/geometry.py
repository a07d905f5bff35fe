"""The geometry of a tensor on its storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoac.torch_private import conjugate_view, negative_view

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]
"""Size, stride, storage offset, dtype, conjugate bit, negative bit."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The tensor's geometry on its storage."""
    dtype = tensor.dtype
    conj = dtype.is_complex and tensor.is_conj()
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), dtype, conj, tensor.is_neg()


def with_geometry(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A tensor on the same storage with another geometry."""
    shape, stride, offset, dtype, conj, neg = geometry
    if dtype is tensor.dtype and not (conj or neg or tensor.is_conj() or tensor.is_neg()):
        return tensor.as_strided(shape, stride, offset)
    seen = torch.empty(0, dtype=dtype, device=tensor.device)
    seen = seen.set_(tensor.untyped_storage(), offset, shape, stride)
    if conj:
        seen = conjugate_view(seen)
    return negative_view(seen) if neg else seen


def clone_with_geometry(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on a storage of its own, with the same size and stride."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    # Expanded dimensions repeat one element.
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    copy[once].copy_(tensor[once])
    return copy


def certainly_disjoint(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors on one storage provably have no element in common; conservative and cheap.

    It is for parts of one tensor, some of which lack dimensions of it (`x[..., 0]`). With the strides as a positional
    number system, the digits of an element's offset in the storage are its indices, and parts are boxes of indices.
    """
    if a[3] is not b[3]:
        return False
    sizes_a, sizes_b = _sizes(a), _sizes(b)
    if sizes_a is None or sizes_b is None:
        return False
    strides = sorted({*sizes_a, *sizes_b})
    rest_a, first_a = _digits(a[2], strides)
    rest_b, first_b = _digits(b[2], strides)
    apart = rest_a != rest_b
    reach = max(rest_a, rest_b)  # the largest offset within the smaller strides
    for stride in strides:
        if reach >= stride:
            return False  # no number system: some offset has several representations
        last_a = first_a[stride] + sizes_a.get(stride, 1) - 1
        last_b = first_b[stride] + sizes_b.get(stride, 1) - 1
        apart = apart or last_a < first_b[stride] or last_b < first_a[stride]
        reach += max(last_a, last_b) * stride
    return apart


def _sizes(geometry: Geometry) -> dict[int, int] | None:
    """The size of each dimension with several elements, by stride; None if two have the same."""
    dims = [(stride, size) for size, stride in zip(*geometry[:2], strict=True) if size > 1 and stride]
    sizes = dict(dims)
    return sizes if len(sizes) == len(dims) else None


def _digits(offset: int, strides: Sequence[int]) -> tuple[int, dict[int, int]]:
    """The offset in digits of the strides: the remainder, and the index along each."""
    digits = {}
    for stride in reversed(strides):
        digits[stride], offset = divmod(offset, stride)
    return offset, digits
