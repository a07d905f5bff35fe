"""Functions of random models that torch does not see into: foreign kernels, flags, random ops of a library, threads."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


@np.errstate(invalid="ignore")  # infinite where the model's values are
def _cosine(x: torch.Tensor) -> np.ndarray:
    return np.cos(x.numpy())


def _by_numpy(out: torch.Tensor, x: torch.Tensor) -> None:
    out.numpy()[...] = _cosine(x)


def _by_dlpack(out: torch.Tensor, x: torch.Tensor) -> None:
    torch.from_dlpack(out).numpy()[...] = _cosine(x)


def _by_address(out: torch.Tensor, x: torch.Tensor) -> None:
    values = _cosine(x)
    ctypes.memmove(out.data_ptr(), values.ctypes.data, values.nbytes)


class _Foreign(torch.autograd.Function):
    """A cosine that no op has written, into a tensor that an op has made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Any, write: Any) -> torch.Tensor:
        x = x.contiguous()
        out = make(x)
        write(out, x)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return -gradients[0] * x.sin(), None, None


def _written_twice(x: torch.Tensor) -> torch.Tensor:
    """Made by an op, written by numpy, read, written by an op, and written by numpy again."""
    found = _Foreign.apply(x, torch.zeros_like, _by_numpy)
    return _Foreign.apply(found.sin() * 0.5, torch.clone, _by_address) + found


def _halved_by_numpy(x: torch.Tensor) -> torch.Tensor:
    """A write in place by numpy into half of a result, before anything has read it."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            out = t * 2.0
            out.numpy()[: len(out) // 2] *= np.float32(0.25)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            scale = torch.full_like(gradients[0], 2.0)
            scale[: len(scale) // 2] = 0.5
            return gradients[0] * scale

    return Halved.apply(x)


@torch.library.custom_op("autoac_fuzz::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Dropout, not declared random."""
    return x * (torch.rand(x.shape) < 0.7)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (output,) = ctx.saved_tensors
    return gradient * (output != 0)


noisy.register_autograd(_backward, setup_context=_keep)


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    # What `torch.backends.mkldnn.flags(enabled=False)` does, without its warning of Intel's GPUs.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _flagged(around: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def convolution(x: torch.Tensor) -> torch.Tensor:
        images = x.reshape(1, 4, 16, -1)
        weight = images.detach()[:, :, :3, :3].expand(4, 4, 3, 3) * 0.2
        with around():
            return F.conv2d(images, weight, padding=1).reshape(x.shape)

    return convolution


def _in_another_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def _drawn_beside_forward(x: torch.Tensor) -> torch.Tensor:
    _in_another_thread(lambda: torch.rand(3))
    return F.dropout(x, 0.3)


def _drawn_beside_backward(x: torch.Tensor) -> torch.Tensor:
    result = F.dropout(x, 0.3)
    if result.requires_grad:

        def hook(gradient: torch.Tensor) -> None:
            _in_another_thread(lambda: torch.rand(3))

        result.register_hook(hook)
    return result.sin()


OPAQUE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy_into_zeros": lambda t: _Foreign.apply(t, torch.zeros_like, _by_numpy),
    "numpy_into_a_copy": lambda t: _Foreign.apply(t, torch.clone, _by_numpy),
    "dlpack_into_zeros": lambda t: _Foreign.apply(t, torch.zeros_like, _by_dlpack),
    "address_of_empty": lambda t: _Foreign.apply(t, torch.empty_like, _by_address),
    "written_twice": _written_twice,
    "halved_by_numpy": _halved_by_numpy,
    "noisy": noisy,
    "without_onednn": _flagged(_without_onednn),
    "deterministic": _flagged(_deterministic),
    "beside_forward": _drawn_beside_forward,
    "beside_backward": _drawn_beside_backward,
}
