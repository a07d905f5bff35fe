"""CUDA's choice of ops, for steps that are recorded on fake tensors without a GPU.

A CPU build of torch cannot record fake CUDA tensors: its autograd has no device guard for them. So the step is recorded
on fake CPU tensors, and functions that choose their op by device run CUDA's op instead: attention (see
`attention`), dropout (one op with a byte mask), batch norm (cuDNN) and `rms_norm` (fused). Sources: `Dropout.cpp`,
`Normalization.cpp` and `layer_norm.cpp` in ATen. `python -m tests.cuda_ops` checks all of it against a CUDA build. Not
covered: recurrent layers (cuDNN's), and device checks in a model's own code.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from autoac.execute.cross_entropy.lean import LeavesLosses
from autoac.record.cuda.attention import Capability, attention
from autoac.record.cuda.autocast import CASTS, casting, in_float32, in_half
from autoac.torch_private import CAN_REPLACE_CASTS, DispatchMode, any_autocast, call_below_autograd
from autoac_solver.records.devices import DeviceTable

_ATEN = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_CAPABILITIES = {
    r"GB?[23]00": (10, 0),
    r"B[123]00": (10, 0),
    r"GH200|H[128]00|H20": (9, 0),
    r"L4|L40S?|RTX 40\d0|4090|Ada": (8, 9),
    r"A10G?|A16|A40|A[2456]000|RTX 30\d0": (8, 6),
    r"A[138]00|A30": (8, 0),
    r"RTX 50\d0|5090": (12, 0),
    r"T4|RTX 20\d0": (7, 5),
    r"V100": (7, 0),
}
_LIKELIEST = (9, 0)


def capability_of(title: str) -> Capability:
    """The compute capability of a GPU by its name; that of an H100 if the name is unknown."""
    for names, capability in _CAPABILITIES.items():
        if re.search(rf"(?<![0-9a-z])({names})(?![0-9])", title, re.IGNORECASE):
            return capability
    return _LIKELIEST


def capability_elsewhere(table: DeviceTable | None, device: torch.device) -> Capability | None:
    """The capability of the CUDA GPU that a device table describes; None unless `device` is of another type."""
    elsewhere = table is not None and table.kind == "cuda" and device.type != "cuda"
    return capability_of(table.title) if table is not None and elsewhere else None


class CudaOps(LeavesLosses):
    """Mode in which functions run the ops that they would run on a GPU of this capability.

    Attributes:
        saw_cpus_casts: whether autocast was on in any call, with the CPU's casts. CUDA's apply to other ops.
        saw_recurrent: names of the recurrent layers that were called, and that cuDNN runs as one op on CUDA.
    """

    def __init__(self, capability: Capability):
        super().__init__()
        self.saw_cpus_casts = False
        self.saw_recurrent: set[str] = set()
        self.replacements: dict[Any, Any] = {
            F.scaled_dot_product_attention: functools.partial(_attention, capability),
            F.dropout: _dropout,
            torch.dropout: _dropout,
            F.batch_norm: _batch_norm,
            F.instance_norm: _instance_norm,
            F.rms_norm: _rms_norm,
            torch.rms_norm: _rms_norm,
        }

    def __enter__(self) -> Any:
        self._recording = CASTS.recording()
        self._recording.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._recording.__exit__(*raised)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any_autocast():
            if CAN_REPLACE_CASTS:
                CASTS.as_cudas()
            else:
                self.saw_cpus_casts = True
        if func in _RECURRENT:
            self.saw_recurrent.add(func.__name__)
        if func is F.multi_head_attention_forward:
            with self._inside():
                return func(*args, **kwargs)
        replacement = self.replacements.get(func)
        result = NotImplemented if replacement is None else replacement(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Context: replace the functions that a torch function calls by name in its module, where the mode is off."""
        before = F.scaled_dot_product_attention, F.dropout
        F.scaled_dot_product_attention = self.replacements[F.scaled_dot_product_attention]
        F.dropout = _or_own(_dropout, F.dropout)
        try:
            yield
        finally:
            F.scaled_dot_product_attention, F.dropout = before


def _attention(*args: Any, **kwargs: Any) -> Any:
    return in_half(attention, *args, **kwargs) if casting() else attention(*args, **kwargs)


def _or_own(replacement: Any, own: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = replacement(*args, **kwargs)
        return own(*args, **kwargs) if result is NotImplemented else result

    return run


_RECURRENT = {torch.gru, torch.rnn_tanh, torch.rnn_relu}
"""The CPU runs these as many small ops. `lstm` is one op there, too, whose workspace is not known."""


class CudaResults(DispatchMode):
    """Mode in which norms of half precision keep their statistics in float32, as CUDA's kernels do.

    Below autograd, right above the fake mode. (The CPU's kernels return them in the input's type.)
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _WITH_STATISTICS or result[0].dtype not in _HALF:
            return result
        output, *statistics = result
        return (output, *(_in_float32(kept) if kept.dtype in _HALF else kept for kept in statistics))


def _in_float32(statistic: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(statistic, dtype=torch.float32)


_WITH_STATISTICS = {
    _ATEN.cudnn_batch_norm.default,
    _ATEN.native_layer_norm.default,
    _ATEN.native_batch_norm.default,
    _ATEN._fused_rms_norm.default,
}


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1 or not input.numel():
        return NotImplemented
    return torch.native_dropout(input, p, True)[0]


_CUDNN_MOST_ROWS = {True: 880_801, False: 65_535}
"""Most rows of a batch norm by cuDNN, in training and in evaluation."""


def _takes_cudnns_batch_norm(
    input: torch.Tensor,
    rows: int,
    statistics: Sequence[torch.Tensor | None],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
) -> bool:
    """Whether CUDA runs a batch norm by cuDNN.

    Args:
        rows: as the kernel sees them.

    Source: `_select_batch_norm_backend` in aten/src/ATen/native/Normalization.cpp.
    """
    if weight is None or bias is None or input.dim() < 3 or not torch.backends.cudnn.enabled:
        return False
    is_half = input.dtype is torch.float16
    fits_type = weight.dtype is torch.float32 if is_half else input.dtype in (torch.float32, torch.float64)
    has_all, has_none = all(s is not None for s in statistics), all(s is None for s in statistics)
    fits_size = rows <= _CUDNN_MOST_ROWS[training] and input.numel() < 2**31 - 1
    return fits_type and (has_all or (has_none and training)) and fits_size


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
    statistics = running_mean, running_var
    if not _takes_cudnns_batch_norm(input, input.shape[0], statistics, weight, bias, training):
        return NotImplemented
    assert weight is not None
    return torch.cudnn_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _instance_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """A batch norm of each row's channels.

    Source: `instance_norm` in aten/src/ATen/native/Normalization.cpp. Other ops run with running statistics.
    """
    statistics = running_mean, running_var
    if weight is None or bias is None or running_mean is not None or not use_input_stats:
        return NotImplemented
    if not _takes_cudnns_batch_norm(input, 1, statistics, weight, bias, True):
        return NotImplemented
    rows, channels, *others = input.shape
    by_channel = input.contiguous().view(1, rows * channels, *others)
    made = torch.cudnn_batch_norm(
        by_channel, weight.repeat(rows), bias.repeat(rows), None, None, True, momentum, eps
    )
    return made[0].view(input.shape)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> Any:
    if casting():
        return in_float32(_rms_norm, input, normalized_shape, weight, eps)
    if weight is not None and weight.dtype != input.dtype:
        return NotImplemented
    return _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The fused op with its derivative: on CPU tensors the op decomposes above all modes.

    Source: `_fused_rms_norm` in torch's derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> torch.Tensor:
        made: list[torch.Tensor] = []
        call_below_autograd(lambda: made.extend(_ATEN._fused_rms_norm.default(input, shape, weight, eps)))
        ctx.save_for_backward(input, weight, made[1])
        ctx.shape = shape
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, rstd = ctx.saved_tensors
        needed = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        made: list[torch.Tensor] = []
        backward = _ATEN._fused_rms_norm_backward.default
        call_below_autograd(
            lambda: made.extend(backward(gradients[0], input, ctx.shape, rstd, weight, needed))
        )
        of_input, of_weight = (
            gradient if need else None for gradient, need in zip(made, needed, strict=True)
        )
        return of_input, None, of_weight, None
