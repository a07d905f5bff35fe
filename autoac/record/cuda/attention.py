"""CUDA's choice of attention kernel, and the ops around it.

NOTE [ The choice of attention kernels ]
  The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` (`can_use_cudnn_attention`,
  `can_use_flash_attention`, `can_use_mem_efficient_attention`, `priority_order`), the ops around a kernel those of
  `scaled_dot_product_attention` in `attention.cpp`. `python -m tests.cuda_ops` holds both against the CUDA build of
  torch 2.15.0 and 2.14.1, for GPUs of capability 8.0 and 9.0.
  1. From capability 9.0 to 10.x cuDNN's kernel comes first, as with CUDA 13 and cuDNN 9.16 or newer. Older builds take
     flash attention there; it saves the same tensors.
  2. Then flash attention, the memory-efficient kernel, and plain matrix products, in this order.
  3. Kernels that the user has switched off (`torch.backends.cuda`, `sdpa_kernel`) are not taken. A priority order that
     the user sets (`sdpa_kernel(set_priority=True)`) is not followed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

Capability = tuple[int, int]
"""Major and minor, such as (9, 0)."""

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_MOST_WIDTH = 256
_MASK_ALIGNMENT = 8
EFFICIENT_SHARES_HEADS = torch.__version__ >= "2.14"
"""Whether the memory-efficient kernel takes fewer key heads than query heads."""


def attention(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run `scaled_dot_product_attention` with the ops of a GPU of this capability."""
    kernel = choice(capability, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero, minus_infinity = (
            torch.scalar_tensor(value, dtype=query.dtype, device=query.device)
            for value in (0.0, float("-inf"))
        )
        attn_mask = torch.where(attn_mask, zero, minus_infinity)
    needs_statistics = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if kernel == "cudnn":
        cudnn = _ATEN._scaled_dot_product_cudnn_attention
        return cudnn(
            query, key, value, attn_mask, needs_statistics, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "flash":
        width = query.shape[-1]
        scale = width**-0.5 if scale is None else scale
        padded = [_padded(tensor, 8) for tensor in (query, key, value)]
        result = _ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[
            0
        ]
        return result if width % 8 == 0 else result[..., :width]
    if kernel == "efficient":
        if attn_mask is not None:
            attn_mask = _aligned(attn_mask).expand(*query.shape[:3], key.shape[2])
        efficient = _ATEN._scaled_dot_product_efficient_attention
        return efficient(query, key, value, attn_mask, needs_statistics, dropout_p, is_causal, scale=scale)[0]
    math = _ATEN._scaled_dot_product_attention_math
    return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def choice(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    shares_heads: bool,
) -> str:
    """The kernel's name: "cudnn", "flash", "efficient" or "math"."""
    tensors = (query, key, value)
    heads_fit = (
        key.shape[1] == value.shape[1] and query.shape[1] % max(1, key.shape[1]) == 0
        if shares_heads and query.dim() == 4
        else all(tensor.shape[:2] == query.shape[:2] for tensor in tensors)
    )
    dense = (
        all(tensor.dim() == 4 and tensor.shape[-1] and tensor.shape[-2] for tensor in tensors)
        and len({tensor.dtype for tensor in tensors}) == len({tensor.shape[0] for tensor in tensors}) == 1
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and heads_fit
        and capability[0] <= 12
    )
    if not dense:
        return "math"
    backends = torch.backends.cuda
    if backends.cudnn_sdp_enabled() and _cudnn_can(capability, query, key, value, mask, dropout):
        return "cudnn"
    if backends.flash_sdp_enabled() and _flash_can(capability, query, key, value, mask, dropout, is_causal):
        return "flash"
    if backends.mem_efficient_sdp_enabled() and _efficient_can(capability, query, key, value):
        return "efficient"
    return "math"


def _cudnn_can(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
) -> bool:
    if capability[0] not in (9, 10) or query.dtype not in _HALF or (mask is not None and mask.requires_grad):
        return False
    if (dropout * 16) % 1 or key.shape[2] == 1 or (dropout and query.shape[2] == 1):
        return False
    if (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return False
    widths = query.shape[-1], value.shape[-1]
    if any(width % 8 or width > _MOST_WIDTH for width in widths):
        return False
    backward = any(tensor.requires_grad for tensor in (query, key, value))
    return not backward or max(widths) <= 128 or widths in ((192, 128), (256, 256))


def _flash_can(
    capability: Capability,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
) -> bool:
    width = query.shape[-1]
    if capability < (8, 0) or query.dtype not in _HALF or mask is not None or width > _MOST_WIDTH:
        return False
    if not key.shape[-1] == value.shape[-1] == width or (is_causal and query.shape[2] != key.shape[2]):
        return False
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    backward = any(tensor.requires_grad for tensor in (query, key, value))
    return not (small and backward) or width <= 192 or (not dropout and width > 224)


def _efficient_can(
    capability: Capability, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> bool:
    half = query.dtype in _HALF
    if key.shape[1] != query.shape[1] and not EFFICIENT_SHARES_HEADS:
        return False
    if query.dtype not in (torch.float32, *_HALF) or (query.dtype is torch.bfloat16 and capability < (8, 0)):
        return False
    alignment = (8 if half else 4) if capability >= (8, 0) else (8 if half and capability >= (7, 0) else 1)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % alignment or value.shape[-1] % alignment:
        return False
    return capability < (8, 0) or not any(x.storage_offset() % alignment for x in (query, key, value))


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """The mask, padded so that rows begin at multiples of 8 elements (`pad_bias` in attention.cpp)."""
    if mask.stride(-1) == 1 and not any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        return mask
    width = mask.shape[-1]
    return F.pad(mask, (0, _MASK_ALIGNMENT - width % _MASK_ALIGNMENT))[..., :width]
