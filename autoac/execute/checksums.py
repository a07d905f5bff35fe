"""Checksums of tensors, to check that recomputed values equal forward's to the bit."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from autoac.torch_private import disable_dispatch_modes, is_fake, local_part

_WORDS = 1 << 20  # 8-byte words summed at once on a device; takes about 50 MB
_FEW_WORDS = 1 << 16  # takes about 3 MB, and more time on a GPU: 16 times as many kernels
_FEW_ELEMENTS = 64
_PIECES = 64  # number of pieces in which a tensor with gaps is copied


def checksum_of(tensor: torch.Tensor, words: int = _WORDS) -> int | None:
    """A checksum of a tensor's elements, in memory order; None if they cannot be read.

    Tensors of equal sizes, strides and bits have equal checksums. On CPU only a tensor with gaps between its elements
    is copied, piece by piece.

    Args:
        words: number of 8-byte words summed at once on a device. Other numbers make other checksums.
    """
    tensor = local_part(tensor)
    if tensor.layout is not torch.strided or is_fake(tensor) or tensor.device.type == "meta":
        return None
    if not _has_bytes(tensor):
        return None
    if tensor.device.type == "cpu":
        return _on_cpu(tensor)
    with disable_dispatch_modes(), torch.no_grad():
        return on_device(tensor, words)


def checksum_in_little_memory(tensor: torch.Tensor) -> int | None:
    """A checksum that takes some three megabytes on a device; None also for tensors with gaps, which would be copied.

    It is another than that of `checksum_of`.
    """
    if tensor.device.type != "cpu" and tensor.layout is torch.strided and not is_gapless(tensor):
        return None
    return checksum_of(tensor, _FEW_WORDS)


def checksums_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers that change if these tensors do; on a device if their first elements do, which are copied at once.

    Tensors that cannot be read have none.
    """
    found, parts = list[int](), dict[torch.device, list[torch.Tensor]]()
    with disable_dispatch_modes(), torch.no_grad():
        for tensor in map(local_part, tensors):
            if tensor.device.type == "cpu":
                if (checksum := checksum_of(tensor)) is not None:
                    found.append(checksum)
            elif tensor.layout is torch.strided and not is_fake(tensor) and _has_bytes(tensor):
                few = tensor.reshape(-1)[:_FEW_ELEMENTS].contiguous()
                first = few.resolve_conj().resolve_neg().view(torch.uint8)
                parts.setdefault(tensor.device, []).append(first)
        for first in parts.values():
            found += torch.cat(first).tolist()
    return found


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the elements are in memory: a wrapper subclass (quantised weights) has none there."""
    if not tensor.numel():
        return True
    storage, item = tensor.untyped_storage(), tensor.element_size()
    end = int(tensor.storage_offset()) + sum(stride * (size - 1) for stride, size in _dims(tensor)) + 1
    try:
        return storage.data_ptr() != 0 and storage.nbytes() >= end * item
    except RuntimeError:  # a wrapper's storage has no address at all
        return False


def is_gapless(tensor: torch.Tensor) -> bool:
    """Whether there are no gaps between the tensor's elements."""
    dims = _dims(tensor)
    return sum(stride * (size - 1) for stride, size in dims) + 1 == _product(dims)


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension, largest stride first; repeated elements count once."""
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    return sorted(((stride, size) for stride, size in dims if stride), reverse=True)


def _on_cpu(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    dims, item = _dims(tensor), tensor.element_size()
    span = sum(stride * (size - 1) for stride, size in dims) + 1
    memory: Any = (ctypes.c_char * (span * item)).from_address(tensor.data_ptr())
    if span == _product(dims):
        return zlib.crc32(memory)
    shape, strides = [size for _, size in dims], [stride * item for stride, _ in dims]
    elements = np.ndarray(shape, np.dtype(f"V{item}"), memory, 0, strides)
    checksum, step = 0, -(-shape[0] // _PIECES)
    for start in range(0, shape[0], step):
        checksum = zlib.crc32(np.ascontiguousarray(elements[start : start + step]).data, checksum)
    return checksum


def _product(dims: Sequence[tuple[int, int]]) -> int:
    count = 1
    for _, size in dims:
        count *= size
    return count


def on_device(tensor: torch.Tensor, words: int = _WORDS) -> int:
    """A checksum by torch ops, on any device: 8-byte words, weighted by position and summed."""
    if not tensor.numel():
        return 0
    dims = _dims(tensor)
    flat = (
        tensor.as_strided([s for _, s in dims], [s for s, _ in dims])
        .contiguous()
        .resolve_conj()
        .resolve_neg()
        .reshape(-1)
        .view(torch.uint8)
    )
    flat = flat.clone() if flat.data_ptr() % 8 else flat
    whole = flat.numel() // 8 * 8
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for part in (*flat[:whole].view(torch.int64).split(words), flat[whole:].long()):
        weights = (2 * torch.arange(part.numel(), device=part.device) + 1) * _MIX
        # Upper halves are added once more: the weights are odd, so a word's top bit adds 2**63 at any position.
        total = total * _MIX + (part * weights).sum() + ((part >> 32) * (weights >> 7)).sum()
    return int(total)


_MIX = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 / golden ratio as a signed integer: odd, with well-mixed bits."""
