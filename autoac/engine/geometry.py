"""How a tensor sees its storage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoac.compat import conjugate_view, negative_view

Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]
"""Size, stride, storage offset, dtype, conjugate bit, negative bit."""


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How this tensor sees its storage."""
    dtype = tensor.dtype
    conj = dtype.is_complex and tensor.is_conj()
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), dtype, conj, tensor.is_neg()


def with_geometry(tensor: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A tensor on the same storage, seen otherwise."""
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
    return copy.copy_(tensor)


def certainly_disjoint(a: Geometry, b: Geometry) -> bool:
    """Whether two tensors on one storage have no element in common, as far as that is easily told.

    It is for parts that one tensor was cut into: their strides are the same. Written in these strides as digits, an
    element's place in the storage tells its indices, and parts are boxes of indices.
    """
    if a[1] != b[1] or a[3] is not b[3]:
        return False
    dims = sorted((stride, d) for d, stride in enumerate(a[1]) if max(a[0][d], b[0][d]) > 1)
    starts = _digits(a[2], dims), _digits(b[2], dims)
    reach = [0, 0]  # the largest place that the smaller strides lead to
    apart = False
    for stride, d in dims:
        if max(reach) >= stride:
            return False  # not digits: an element has several of them
        first = [start[d] for start in starts]
        last = [first[0] + a[0][d] - 1, first[1] + b[0][d] - 1]
        reach = [r + index * stride for r, index in zip(reach, last, strict=True)]
        apart |= last[0] < first[1] or last[1] < first[0]
    return apart


def _digits(offset: int, dims: Sequence[tuple[int, int]]) -> dict[int, int]:
    digits = {}
    for stride, d in reversed(dims):
        digits[d], offset = divmod(offset, stride) if stride else (0, offset)
    return digits
