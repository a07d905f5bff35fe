"""Comparison of values, bitwise or within a tolerance."""

from __future__ import annotations

from typing import Any

import torch

from autoac.torch_private import parts_of


def alike(value: Any, other: Any, tolerance: float) -> bool:
    """Whether two values are bitwise equal or, with a tolerance other than 0, within that; see `close`."""
    return same(value, other) or bool(tolerance and close(value, other, tolerance))


def same(a: Any, b: Any) -> bool:
    """Whether two values are bitwise equal: a NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        ours, theirs = list(parts_of(a)), list(parts_of(b))
        if len(ours) != 1 or ours[0] is not a:
            return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and same(ours, theirs)
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        return torch.equal(bits_of(a), bits_of(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if hasattr(a, "shape"):
        return bool((a == b).all())
    return a == b


def close(a: Any, b: Any, tolerance: float) -> bool:
    """Whether the norm of the difference of floating-point tensors is within a share of the first one's norm.

    The tolerance is that of float32; dtypes with a larger epsilon have proportionally more.
    """
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(
            same(x, y) or close(x, y, tolerance) for x, y in zip(a, b, strict=True)
        )
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return False
    if a.dtype != b.dtype or a.shape != b.shape or not a.is_floating_point():
        return False
    steps = tolerance * torch.finfo(a.dtype).eps / torch.finfo(torch.float32).eps
    exact, other = a.detach().double(), b.detach().double()
    return bool((exact - other).norm() <= max(steps, tolerance) * exact.norm())


def values_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the tensor's parts."""
    return [part.detach().clone() for part in parts_of(tensor)]


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
