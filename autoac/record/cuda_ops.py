"""The ops that CUDA takes where the CPU takes others, for steps that are recorded on fake tensors without a GPU.

A CPU build of torch cannot record fake CUDA tensors: its autograd has no device guard for them. So the step is recorded
on fake CPU tensors, and the functions that choose their op by device are led to CUDA's choice here: attention (flash or
memory-efficient), dropout (one op with a mask of bytes) and batch norm (cuDNN). Sources: `sdp_utils.cpp`, `Dropout.cpp`
and `Normalization.cpp` in ATen. Not covered: recurrent layers (cuDNN's), `rms_norm`
(fused on CUDA) and what happens inside of `F.multi_head_attention_forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from autoac.execute.cross_entropy.lean import LeavesLosses

_HALF = (torch.float16, torch.bfloat16)
_FLASH_MOST_WIDTH = 256


class CudaOps(LeavesLosses):
    """Mode in which functions run the ops that they would run on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = _REPLACEMENTS.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    width = query.shape[-1]
    plain = query.dim() == 4 and width % 8 == 0 and key.shape[-1] == value.shape[-1] == width
    if not plain:
        return NotImplemented
    if attn_mask is None and query.dtype in _HALF and width <= _FLASH_MOST_WIDTH:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and query.shape[1] != key.shape[1]:
        return NotImplemented  # the memory-efficient kernel does not share heads
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_statistics = query.requires_grad or key.requires_grad or value.requires_grad
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, needs_statistics, dropout_p, is_causal, scale=scale)[0]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    single = input.dtype is torch.float32 or (
        input.dtype is torch.float16 and weight is not None and weight.dtype is torch.float32
    )
    has_statistics = running_mean is not None and running_var is not None
    if not training or not single or weight is None or bias is None or not has_statistics or input.dim() < 3:
        return NotImplemented
    return torch.cudnn_batch_norm(input, weight, bias, running_mean, running_var, True, momentum, eps)[0]


_REPLACEMENTS: dict[Any, Any] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.batch_norm: _batch_norm,
}
