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

    It is for parts of one tensor, which have equal strides. With the strides as a positional number system, the digits
    of an element's offset in the storage are its indices, and parts are boxes of indices.
    """
    if a[1] != b[1] or a[3] is not b[3]:
        return False
    dims = sorted((stride, d) for d, stride in enumerate(a[1]) if max(a[0][d], b[0][d]) > 1)
    rest_a, first_a = _digits(a[2], dims)
    rest_b, first_b = _digits(b[2], dims)
    apart = rest_a != rest_b
    reach = max(rest_a, rest_b)  # the largest offset within the smaller strides
    for stride, d in dims:
        if reach >= stride:
            return False  # no number system: some offset has several representations
        last_a, last_b = first_a[d] + a[0][d] - 1, first_b[d] + b[0][d] - 1
        apart = apart or last_a < first_b[d] or last_b < first_a[d]
        reach += max(last_a, last_b) * stride
    return apart


def _digits(offset: int, dims: Sequence[tuple[int, int]]) -> tuple[int, dict[int, int]]:
    """The offset in digits of the strides: the remainder, and the index along each dimension."""
    digits = {}
    for stride, d in reversed(dims):
        digits[d], offset = divmod(offset, stride) if stride else (0, offset)
    return offset, digits
