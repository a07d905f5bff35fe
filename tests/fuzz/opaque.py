"""Functions of random models that torch does not see into, or not in full.

Foreign kernels, also into older tensors, flags, a library's ops that draw random numbers, threads, `.data`, and ops
that raise where forward catches that.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


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


def _change(x: torch.Tensor, factor: float = 0.5) -> None:
    """A write in place by numpy that changes zeros, too: the profile sees no write that changes nothing."""
    values = x.detach().numpy()
    values[...] = values * np.float32(factor) + np.float32(0.37)


def _halved_by_numpy(x: torch.Tensor) -> torch.Tensor:
    """A write in place by numpy into half of a result, before anything has read it."""

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: torch.Tensor) -> torch.Tensor:
            out = t * 2.0
            _change(out[: len(out) // 2], 0.25)
            return out

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            scale = torch.full_like(gradients[0], 2.0)
            scale[: len(scale) // 2] = 0.5
            return gradients[0] * scale

    return Halved.apply(x)


# -- older tensors that numpy writes -----------------------------------------------------------------------------------


def _changed_after_use(x: torch.Tensor) -> torch.Tensor:
    """The value was read and saved, and is read again."""
    hidden = torch.tanh(x)
    result = hidden.sin()
    _change(hidden)
    return result + hidden


def _changed_at_last(x: torch.Tensor) -> torch.Tensor:
    """Nothing but backward reads the value after the write."""
    hidden = torch.sigmoid(x)
    result = hidden * x
    _change(hidden)
    return result.tanh()


def _argument_changed(x: torch.Tensor) -> torch.Tensor:
    """The value is older than the function, and maybe than its module."""
    result = x.sin()
    _change(x)
    return result


SCRATCH = torch.zeros(32, 1)
"""Numpy fills it, or adds to it, in each call of the following functions."""


@np.errstate(invalid="ignore", over="ignore")
def _fill(x: torch.Tensor, keep: float = 0.0) -> None:
    values = SCRATCH.numpy()
    values[...] = keep * values + x.detach().numpy().std(1, keepdims=True)


def _scratch_added(x: torch.Tensor) -> torch.Tensor:
    _fill(x)
    return (x * 0.5 + SCRATCH).sin()


def _scratch_saved(x: torch.Tensor) -> torch.Tensor:
    """Autograd saves it, and so reads its last values."""
    _fill(x)
    return (x * SCRATCH).sin()


def scratch_averaged(x: torch.Tensor) -> torch.Tensor:
    _fill(x, keep=0.5)
    return (x - SCRATCH).cos()


def _scratch_averaged_twice(x: torch.Tensor) -> torch.Tensor:
    """Once in a step is a known limit, see `test_found`."""
    return scratch_averaged(x) + scratch_averaged(x.sin())


# -- random numbers ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("autoac_fuzz::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Dropout, not declared random."""
    return x * (torch.rand(x.shape) < 0.7)


@torch.library.custom_op("autoac_fuzz::numpy_mask", mutates_args=())
def numpy_mask(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(*x.shape) < 0.7)


@torch.library.custom_op("autoac_fuzz::mask_now_and_then", mutates_args=())
def mask_now_and_then(x: torch.Tensor) -> torch.Tensor:
    """Draws Python's random numbers in some calls only."""
    draws = bool(x[0, 0] > 0)
    return x * torch.tensor([float(random.random() < 0.7) if draws else 1.0 for _ in range(x.shape[-1])])


@torch.library.custom_op("autoac_fuzz::add_noise_", mutates_args=("x",))
def add_noise_(x: torch.Tensor) -> None:
    x.add_(torch.from_numpy(np.random.rand(*x.shape).astype(np.float32)))


def _with_noise(x: torch.Tensor) -> torch.Tensor:
    hidden = x * 0.5
    with torch.no_grad():
        add_noise_(hidden)
    return hidden.sin()


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (output,) = ctx.saved_tensors
    return gradient * (output != 0)


for masking in (noisy, numpy_mask, mask_now_and_then):
    masking.register_fake(torch.empty_like)
    masking.register_autograd(_backward, setup_context=_keep)


# -- flags and threads -------------------------------------------------------------------------------------------------


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


# -- values assigned to `.data` ----------------------------------------------------------------------------------------


def _data_of_a_value(x: torch.Tensor) -> torch.Tensor:
    hidden = x.tanh()
    result = hidden + 1.0
    hidden.data = hidden.data * 0.5
    return result * 0.5 + hidden


class Averaging(nn.Module):
    """A running average that is assigned to a buffer's `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = (x + self.mean).sin()
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return before + (x - self.mean).cos()


class Moved(nn.Module):
    """A weight that has its values while it is used only, as where hooks offload weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.kept: torch.Tensor
        self.register_buffer("kept", self.linear.weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        weight.data = self.kept.clone()
        result = self.linear(x).tanh()
        if result.requires_grad:
            result.register_hook(lambda _: setattr(weight, "data", self.kept.clone()))
        weight.data = torch.zeros_like(self.kept)
        return result


# -- ops that raise where forward catches that -------------------------------------------------------------------------


def _falls_to_another_op(x: torch.Tensor) -> torch.Tensor:
    """The same op comes later, with a result of another shape."""
    hidden = x.tanh()
    try:
        hidden = hidden @ torch.ones(3, 3)
    except RuntimeError:
        hidden = hidden.cos()
    return hidden @ torch.full((32, 32), 0.02)


def _falls_in_place(x: torch.Tensor) -> torch.Tensor:
    hidden = x.sin()
    try:
        return hidden.add_(torch.ones(3, 3))
    except RuntimeError:
        return hidden * hidden


def _falls_between_views(x: torch.Tensor) -> torch.Tensor:
    try:
        return x.exp().view(7, -1)
    except RuntimeError:
        return x.tanh().reshape(-1, 32) * 2


@torch.library.custom_op("autoac_fuzz::draws_and_raises", mutates_args=())
def draws_and_raises(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    raise ValueError("on purpose")


def _falls_having_drawn(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ValueError):
        draws_and_raises(x.detach())
    return F.dropout(x.sin(), 0.2)


OPAQUE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "numpy_into_zeros": lambda t: _Foreign.apply(t, torch.zeros_like, _by_numpy),
    "numpy_into_a_copy": lambda t: _Foreign.apply(t, torch.clone, _by_numpy),
    "dlpack_into_zeros": lambda t: _Foreign.apply(t, torch.zeros_like, _by_dlpack),
    "address_of_empty": lambda t: _Foreign.apply(t, torch.empty_like, _by_address),
    "written_twice": _written_twice,
    "halved_by_numpy": _halved_by_numpy,
    "changed_after_use": _changed_after_use,
    "changed_at_last": _changed_at_last,
    "argument_changed": _argument_changed,
    "scratch_added": _scratch_added,
    "scratch_saved": _scratch_saved,
    "scratch_averaged_twice": _scratch_averaged_twice,
    "noisy": noisy,
    "numpy_mask": numpy_mask,
    "mask_now_and_then": mask_now_and_then,
    "with_noise": _with_noise,
    "without_onednn": _flagged(_without_onednn),
    "deterministic": _flagged(_deterministic),
    "beside_forward": _drawn_beside_forward,
    "beside_backward": _drawn_beside_backward,
    "data_of_a_value": _data_of_a_value,
    "falls_to_another_op": _falls_to_another_op,
    "falls_in_place": _falls_in_place,
    "falls_between_views": _falls_between_views,
    "falls_having_drawn": _falls_having_drawn,
}
OPAQUE_LAYERS: dict[str, Callable[[], nn.Module]] = {"averaging": Averaging, "moved": Moved}
