"""CUDA's autocast, for steps that are recorded on fake CPU tensors.

NOTE [ CUDA's casts ]
  1. Autocast casts in the dispatcher, by the device of the tensors. CPU tensors get the casts of the CPU's lists, which
     differ: there norms and softmax run in half precision. So where autocast is on under `CudaOps`, the kernels of the
     CPU's autocast are replaced by kernels that cast as CUDA's do. Sources: the lists `AT_FORALL_*` and the policies
     `CastPolicy` in aten/src/ATen/autocast_mode.h (the same in torch 2.13 to 2.15), their use in autocast_mode.cpp.
  2. Ops that run in half precision on both keep torch's own kernel, and with it torch's cache of cast weights. CUDA's
     others (`einsum`, `mv`) have a cache here, by the same rules (`cached_cast` in autocast_mode.cpp); a weight that
     ops of both kinds read is cast twice.
  3. Kernels belong to the process. Calls of other threads on real tensors get the CPU's, as before.
  4. Where there is no GPU, torch switches `torch.autocast("cuda")` off. Under `CudaOps` it sets the CPU's state. That
     of the caller cannot be seen: around `autoac.plan` it has to be `torch.autocast("cpu", dtype=...)`.
`python -m tests.cuda_ops` compares ops and saved tensors with those of CUDA's autocast.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac.torch_private import (
    aten_overload,
    cast_by_cpu_autocast,
    cpu_autocast_kernels,
    is_fake,
    is_view,
    schema_of,
    tree_leaves,
    tree_map_only,
    without_cpu_autocast,
)

_ATEN = torch.ops.aten


def _names(text: str) -> list[str]:
    return text.split()


LOWER = _names("""
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
    baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
    rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""")
FLOAT32 = _names("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
    pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
    nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
    hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa
    upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""")
FLOAT32_RESULT = _names("""
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
""")
FLOAT32_NORM = ["norm.Scalar", "norm.ScalarOpt_dim"]
WIDEST = _names("""
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""")
REFUSED = "binary_cross_entropy"

_FROM_HALF = {
    _ATEN.softmax.int: _ATEN._softmax.default,
    _ATEN.log_softmax.int: _ATEN._log_softmax.default,
}
"""Their kernels on CUDA read float16 and write float32 (aten/src/ATen/native/SoftMax.cpp)."""


def casting() -> bool:
    """Whether autocast casts CPU tensors, which stand for CUDA's."""
    return torch.is_autocast_enabled("cpu")


def in_half(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call with its arguments in autocast's type, and without further casts."""
    return _cast(_half(), run, args, kwargs)


def in_float32(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call with its arguments in float32, and without further casts."""
    return _cast(torch.float32, run, args, kwargs)


def _half() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _cast(dtype: torch.dtype, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return tree_map_only(torch.Tensor, functools.partial(_cast_tensor, dtype), value)

    with without_cpu_autocast():
        # The last argument first: torch casts in a C++ call's arguments, which GCC evaluates in this order.
        named = {name: cast(kwargs[name]) for name in reversed(kwargs)}
        return run(*reversed([cast(value) for value in reversed(args)]), **named)


_cast_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def _cast_tensor(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    if not _eligible(tensor) or tensor.dtype is dtype:
        return tensor
    weight = tensor.dtype is torch.float32 and tensor.requires_grad and tensor.is_leaf and not is_view(tensor)
    if dtype is not _half() or not weight or not torch.is_autocast_cache_enabled():
        return tensor.to(dtype)
    if id(tensor) not in _cast_weights:
        _cast_weights[id(tensor)] = tensor, tensor.to(dtype)
    return _cast_weights[id(tensor)][1]


# Kernels, see `AutocastKernel`: what runs the op as it is, the op, and its arguments.


def _lower(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    return _cast(_half(), op, args, kwargs)


def _float32(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    return _cast(torch.float32, op, args, kwargs)


def _float32_result(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    place = [argument.name for argument in schema_of(op).arguments].index("dtype")
    given = args[place] if place < len(args) else kwargs.get("dtype")
    with without_cpu_autocast():
        if given is not None or not _eligible(args[0]):
            return op(*args, **kwargs)
        if op in _FROM_HALF and args[0].dtype is torch.float16:
            return _FROM_HALF[op](args[0], args[1], True)
        return op(*args[:place], **{**kwargs, "dtype": torch.float32})


def _float32_norm(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    typed = _ATEN.norm.ScalarOpt_dim_dtype if len(args) > 2 or "dim" in kwargs else _ATEN.norm.ScalarOpt_dtype
    defaults = {argument.name: argument.default_value for argument in schema_of(op).arguments}
    given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    with without_cpu_autocast():
        return typed(*given.values(), dtype=dtype)


def _widest(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    dtypes = {value.dtype for value in tree_leaves((args, kwargs)) if _eligible(value)}
    return _cast(torch.float32 if torch.float32 in dtypes else _half(), op, args, kwargs)


def _refused(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is unsafe to autocast: CUDA refuses it. Use binary_cross_entropy_with_logits."
    )


def _as_it_is(below: Callable[[], Any], op: Any, args: Any, kwargs: Any) -> Any:
    return below()


@functools.cache
def _kernels() -> dict[str, Any]:
    """CUDA's casts by overload, where they differ from the CPU's."""
    cpus = cast_by_cpu_autocast()
    policies = {
        **dict.fromkeys(cpus, _as_it_is),
        **dict.fromkeys(LOWER, _lower),
        **dict.fromkeys(FLOAT32, _float32),
        **dict.fromkeys(FLOAT32_RESULT, _float32_result),
        **dict.fromkeys(FLOAT32_NORM, _float32_norm),
        **dict.fromkeys(WIDEST, _widest),
        REFUSED: _refused,
    }
    same = set(LOWER).intersection(cpus)
    return {
        name: policy
        for name, policy in policies.items()
        if name not in same and aten_overload(name) is not None
    }


class _Casts:
    """CUDA's autocast, in place as long as at least one thread records."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self._in_place = contextlib.ExitStack()
        self._kernels_in_place = False

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which this thread's `torch.autocast("cuda")` casts CPU tensors."""
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._in_place.enter_context(self._cuda_means_cpu())
            self._threads.append(thread)
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(thread)
                if not self._threads:
                    self._in_place.close()
                    self._kernels_in_place = False

    def as_cudas(self) -> None:
        """From now on the recording threads, and calls on fake tensors, get CUDA's casts."""
        with self._lock:
            if not self._kernels_in_place:
                self._in_place.enter_context(cpu_autocast_kernels(_kernels(), self._is_recorded))
                self._kernels_in_place = True

    def _is_recorded(self, args: Any, kwargs: Any) -> bool:
        if threading.get_ident() in self._threads:
            return True
        return any(isinstance(leaf, torch.Tensor) and is_fake(leaf) for leaf in tree_leaves((args, kwargs)))

    @contextlib.contextmanager
    def _cuda_means_cpu(self) -> Iterator[None]:
        kind: Any = torch.autocast
        init, clear, threads = kind.__init__, torch.clear_autocast_cache, self._threads

        @functools.wraps(init)
        def of_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
            if device_type == "cuda" and threading.get_ident() in threads:
                device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
            init(self, device_type, dtype, *args, **kwargs)

        @functools.wraps(clear)
        def clear_both() -> None:
            _cast_weights.clear()
            clear()

        kind.__init__, torch.clear_autocast_cache = of_cpu, clear_both
        try:
            yield
        finally:
            kind.__init__, torch.clear_autocast_cache = init, clear
            _cast_weights.clear()


CASTS = _Casts()
