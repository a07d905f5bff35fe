"""Where the host waits until the device has done all ops so far, and launches none."""

from __future__ import annotations

from typing import Any

import torch

from autoac.ops.info import OpInfo, tensors_in

_INDEX_PUTS = {
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
    "aten._unsafe_index_put.default",
}
_REPEATS = "aten.repeat_interleave.Tensor"
_CAST, _COPY = "aten._to_copy.default", "aten.copy_.default"


def waits(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether the host waits until the device has done this op.

    It does so for the size of a result that depends on values, for the places of an index that is a mask, and for
    blocking copies between host and device. What the host reads afterwards (`item()`) is another op.

    Source: `index_out` and `_index_put_impl_` in ATen/native/TensorAdvancedIndexing.cpp, of which the second fills
    masked places with one number of the host without a look at them; `copy_kernel_cuda` in ATen/native/cuda/Copy.cu;
    `_to_copy` in ATen/native/TensorConversions.cpp, which copies to pinned memory if it is not to block.
    """
    if info.name == _CAST:
        return _is_between_devices(args[0], result) and not kwargs.get("non_blocking", False)
    if info.name == _COPY:
        return _copy_waits(*args, **kwargs)
    if info.name in _INDEX_PUTS:
        return _put_waits(*args, **kwargs)
    if info.name == _REPEATS and kwargs.get("output_size") is not None:
        return False
    return info.sized_by_values(args)


def _is_between_devices(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.device.type != target.device.type


def _copy_waits(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    if not _is_between_devices(source, target):
        return False
    return not non_blocking or (target.device.type == "cpu" and not target.is_pinned())


def _put_waits(
    _into: torch.Tensor, indices: Any, values: torch.Tensor, accumulate: bool = False, unsafe: bool = False
) -> bool:
    is_number = values.numel() == 1 and values.device.type == "cpu"
    has_mask = any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(indices))
    return has_mask and (accumulate or not is_number)
