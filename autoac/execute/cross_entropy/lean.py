"""Cross entropy whose backward needs one buffer of the logits' size less than torch's, equal to the bit.

NOTE [ The lean loss ]
  1. Cross entropy with class indices is `_log_softmax`, then `nll_loss` (`cross_entropy_loss` in
     aten/src/ATen/native/LossNLL.cpp). In backward, torch holds the log-probabilities, their gradient, and the gradient
     of the logits, each as large as the logits. The peak of a step often lies there.
  2. The gradient of the log-probabilities is made there and used nowhere else. The gradient of the logits overwrites
     it, by the same kernel with that tensor as its `out`. So the bits are torch's.
  3. In a planned model's forward, a torch function mode replaces torch's cross entropy by this one. The mode is active
     only from the end of the last submodule before the loss, so little else of the model runs under it. While a step is
     recorded, it is active at the same place, so that the tape matches a planned step.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from autoac.device import device_for
from autoac.execute.cross_entropy.chunked import can_be_chunked, chunked_cross_entropy, have_rows
from autoac.execute.cross_entropy.delayed import Delayed, may_delay
from autoac.torch_private import (
    DispatchMode,
    being_jit_traced,
    being_traced,
    disable_dispatch_modes,
    function_modes,
    in_function_transform,
    is_device_mode,
    is_fake_type,
    is_transformed,
    put_function_mode_on,
    take_function_mode_off,
    top_saved_tensors_hooks,
    torchs_cross_entropy,
)

_ATEN = torch.ops.aten
_TORCHS = torchs_cross_entropy or F.cross_entropy
_HALF = torch.float16, torch.bfloat16
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_CLASSES = 1  # the dimension of the classes


def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` that takes less memory: the same loss and gradients to the bit.

    Its backward overwrites the gradient of the log-probabilities with the result, where torch's allocates a second
    tensor: one buffer of the logits' size less. A planned model uses it automatically where its forward calls torch's;
    it is public for losses that are computed outside the model. Cases without a lean form fall back to torch's:
    probabilities as targets, label smoothing, logits of other than 2 or 4 dimensions, devices other than CPU and CUDA.

    Args, Raises: as for `torch.nn.functional.cross_entropy`.

    Returns:
        The loss: a scalar, or of the target's shape with reduction "none".
    """
    # The mode intercepts only torch's function, not this one. Of several modes, the last would be the first to see it.
    lean = [mode for mode in function_modes() if isinstance(mode, LeanLosses)]
    return lean_cross_entropy(
        *(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing),
        chunked=bool(lean) and lean[-1].chunks(),
    )


def lean_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    chunked: bool,
    upcast: bool = False,
) -> torch.Tensor:
    """As `cross_entropy`; over chunks of rows if `chunked` and possible; of the logits cast to float32 if `upcast`."""
    lean = (
        size_average is None
        and reduce is None
        and label_smoothing == 0.0
        and isinstance(reduction, str)
        and reduction in _REDUCTIONS
        and type(ignore_index) is int
        and _is_lean(input, target, weight)
    )
    if not lean:
        input = input.float() if upcast else input
        return _TORCHS(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    if torch.is_autocast_enabled(input.device.type):
        if not upcast and not _is_cast_first(input, target):
            return _TORCHS(input, target, weight, ignore_index=ignore_index, reduction=reduction)
        weight = None if weight is None else _in_float32(weight)
        upcast = input.dtype in _HALF
    if chunked and can_be_chunked(input, weight):
        dtype = torch.float32 if upcast else input.dtype
        return chunked_cross_entropy(input, target, _REDUCTIONS[reduction], ignore_index, dtype)
    if upcast:
        input = _in_float32(input, marked=have_rows(input, weight))
        if chunked and can_be_chunked(input, weight):  # the cast has ordered the rows
            return chunked_cross_entropy(input, target, _REDUCTIONS[reduction], ignore_index)
    return _CrossEntropy.apply(input, target, weight, _REDUCTIONS[reduction], ignore_index)[0]


def _is_cast_first(input: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether the autocast that is on has torch's cross entropy cast these logits to float32 before anything else.

    On CPU it does. On CUDA that depends on torch: the softmax may be computed in half precision, or read half precision
    and write float32 in one kernel.
    """
    if input.dtype not in _HALF:
        return True
    if is_fake_type(type(input)):
        return _tried_cast(input, target)
    kind = input.device.type
    return _found_cast(kind, input.dtype, torch.get_autocast_dtype(kind), input.device)


@functools.cache
def _found_cast(kind: str, dtype: torch.dtype, autocast: torch.dtype, device: torch.device) -> bool:
    """As `_is_cast_first`; tried once for each combination, under autocast."""
    with disable_dispatch_modes(), torch.no_grad():
        input = torch.zeros(1, 2, dtype=dtype, device=device)
        target = torch.zeros(1, dtype=torch.int64, device=device)
    return _tried_cast(input, target)


def _tried_cast(input: torch.Tensor, target: torch.Tensor) -> bool:
    with torch.no_grad(), _Softmaxes() as seen:
        _TORCHS(input.new_zeros(1, 2), target.new_zeros(1))
    return seen.dtypes == [torch.float32]


class _Softmaxes(DispatchMode):
    """Mode that notes the types that `_log_softmax` reads; no other mode sees the ops."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN._log_softmax.default:
            self.dtypes.append(args[0].dtype)
        with disable_dispatch_modes():
            return func(*args, **(kwargs or {}))


def _in_float32(tensor: torch.Tensor, marked: bool = False) -> torch.Tensor:
    """Cast half precision to float32.

    Args:
        marked: the cast can be told from the user's own on a tape, by its memory format (`CAST` in
            `autoac_solver.build.losses.cross_entropy`).
    """
    if tensor.dtype not in _HALF:
        return tensor
    if marked:
        return _ATEN._to_copy.default(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
    return tensor.float()


def _is_lean(logits: Any, target: Any, weight: Any) -> bool:
    """Whether the lean form supports these arguments; torch's function handles or refuses all others."""
    if torch.compiler.is_compiling() or being_traced() or being_jit_traced() or in_function_transform():
        return False
    if not all(map(_is_plain, (logits, target, *((weight,) if weight is not None else ())))):
        return False
    return (
        torch.is_grad_enabled()
        and logits.requires_grad
        and logits.is_floating_point()
        and logits.dim() in (2, 4)
        and logits.numel() > 0
        and target.dtype == torch.int64
        and target.shape == (logits.shape[0], *logits.shape[2:])
        and target.device == logits.device
        and (weight is None or not weight.requires_grad)
        and device_for(logits.device).known
        and (is_fake_type(type(logits)) or same_in_place(logits.device.type, logits.dtype))
    )


def _is_plain(tensor: Any) -> bool:
    kind = type(tensor)
    return (
        kind in (torch.Tensor, torch.nn.Parameter) or is_fake_type(kind)
    ) and tensor.layout is torch.strided


@functools.cache
def same_in_place(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device's kernel gives the same bits when it overwrites its input; tried once per dtype."""
    # There are different kernels for few classes, many classes, and non-contiguous classes.
    shapes = (7, 33), (3, 4099), (2, 5, 3, 7), (2, 1031, 2, 3)
    with disable_dispatch_modes(), torch.no_grad():
        return all(_same_for(torch.Size(shape), torch.device(device_type), dtype) for shape in shapes)


def _same_for(shape: torch.Size, device: torch.device, dtype: torch.dtype) -> bool:
    values = torch.arange(shape.numel(), dtype=torch.float32, device="cpu").view(shape)
    output = values.sin().mul(3).log_softmax(_CLASSES).to(device, dtype)
    gradient = values.add(0.5).cos().to(device, dtype)
    beside = _ATEN._log_softmax_backward_data.default(gradient, output, _CLASSES, dtype)
    return torch.equal(_over(gradient, output), beside)


def _over(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The gradient of the logits, written over that of the log-probabilities."""
    return _ATEN._log_softmax_backward_data.out(gradient, output, _CLASSES, output.dtype, out=gradient)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy by the ops of `cross_entropy_loss` (ATen's LossNLL.cpp).

    The log-probabilities are an output so that they can be differentiated again; callers do not get them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignore_index: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probabilities = _ATEN._log_softmax.default(logits, _CLASSES, False)
        forward = _ATEN.nll_loss_forward if logits.dim() == 2 else _ATEN.nll_loss2d_forward
        loss, total_weight = forward.default(log_probabilities, target, weight, reduction, ignore_index)
        ctx.save_for_backward(log_probabilities, target, weight, total_weight)
        ctx.set_materialize_grads(False)
        ctx.options = reduction, ignore_index
        return loss, log_probabilities

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        loss_gradient, gradient = gradients
        log_probabilities, target, weight, total_weight = ctx.saved_tensors
        if loss_gradient is not None:
            backward = _ATEN.nll_loss_backward if target.dim() == 1 else _ATEN.nll_loss2d_backward
            of_loss = backward.default(
                loss_gradient, log_probabilities, target, weight, *ctx.options, total_weight
            )
            gradient = of_loss if gradient is None else gradient + of_loss
        if gradient is None:
            return None, None, None, None, None
        if loss_gradient is not None and not torch.is_grad_enabled() and not is_transformed(gradient):
            # Made right here, so nothing else holds it, and no double-backward graph needs it.
            result = _over(gradient, log_probabilities)
        else:
            dtype = log_probabilities.dtype
            result = _ATEN._log_softmax_backward_data.default(gradient, log_probabilities, _CLASSES, dtype)
        return result, None, None, None, None


class LeavesLosses(TorchFunctionMode):
    """Base of our own function modes under which cross entropy may be replaced."""


class LeanLosses(LeavesLosses):
    """Mode that replaces torch's cross entropy by ours, over chunks of rows if `chunked`.

    Not under saved-tensor hooks other than `hooks`, those active where the module's own code begins. An example is a
    user's own checkpoint: its second run would lack this mode, and must save the same tensors as the first.
    """

    def __init__(self, chunked: bool) -> None:
        super().__init__()
        self.hooks = top_saved_tensors_hooks()
        self.chunked = chunked
        self.delayed = Delayed()

    def is_like(self, mode: Any) -> bool:
        """Whether a mode does the same as this one."""
        return type(mode) is LeanLosses and (mode.hooks, mode.chunked) == (self.hooks, self.chunked)

    def chunks(self) -> bool:
        """Whether a lean loss computed now goes over chunks of rows."""
        return self.chunked and top_saved_tensors_hooks() == self.hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        is_delayed = bool(args) and args[0] in self.delayed
        if func is F.cross_entropy:
            # If other code has replaced `F.cross_entropy`, then `func` is the replacement, which has run already.
            if top_saved_tensors_hooks() == self.hooks:
                return lean_cross_entropy(*args, **kwargs, chunked=self.chunked, upcast=is_delayed)
            args = (args[0].float(), *args[1:]) if is_delayed else args
            return _TORCHS(*args, **kwargs)
        if func is torch.Tensor.float and self._delays(*args) and may_delay(sys._getframe(1)):
            return self.delayed.add(args[0].view_as(args[0]))
        result = func(*args, **kwargs)
        return self.delayed.add(result) if is_delayed and func is torch.Tensor.view else result

    def _delays(self, logits: torch.Tensor) -> bool:
        """Whether a cast of logits to float32 may be left to their lean loss."""
        return (
            logits.dtype in _HALF
            and logits.requires_grad
            and torch.is_grad_enabled()
            and logits.is_contiguous()
            and _is_plain(logits)
            and top_saved_tensors_hooks() == self.hooks
            and not (being_traced() or being_jit_traced() or in_function_transform())
        )


@dataclass(frozen=True)
class Side:
    """A module's role in computing lean losses.

    Args:
        computes: a loss is computed in this module's own code.
        at_once: the loss may be computed before any submodule has run.
        opens: the code that calls this module may compute a loss next.
        chunked: its losses are computed over chunks of rows.
    """

    computes: bool
    at_once: bool
    opens: bool
    chunked: bool = False


EVERYWHERE = Side(computes=True, at_once=True, opens=False)


def sides(losses: Mapping[str, Collection[str | None]], chunked: bool = False) -> dict[str, Side]:
    """The sides of all modules that have a role, by name.

    Args:
        losses: by name of each module whose own code computes losses, the names of the submodules that run last before
            the first loss of each of its calls; None if no submodule does.
        chunked: the losses are computed over chunks of rows.
    """
    opening = {name for names in losses.values() for name in names if name is not None}
    return {
        fqn: Side(fqn in losses, None in losses.get(fqn, ()), fqn in opening, chunked)
        for fqn in losses.keys() | opening
    }


def run_with_losses(side: Side, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a module's forward with lean losses."""
    if side.computes and torch.is_grad_enabled():
        with _Window(side):
            result = original(*args, **kwargs)
    else:
        result = original(*args, **kwargs)
    loss_may_follow(side)
    return result


def loss_may_follow(side: Side) -> None:
    """After a call of a module that runs last before a loss: losses of the module around it are lean from here on."""
    if side.opens and (window := getattr(_running, "window", None)) is not None:
        window.open()


class _Window:
    """Context of one call of a module: once opened, `LeanLosses` is active for the rest of the call.

    Args:
        side: the module's side. The window opens at the start of the call, or after the submodule that precedes the
            loss.
    """

    def __init__(self, side: Side):
        self.mode = LeanLosses(side.chunked)
        self.at_once = side.at_once
        self.is_open = False

    def __enter__(self) -> None:
        self.outer = getattr(_running, "window", None)
        _running.window = self
        self.below = function_modes()
        if self.at_once:
            self.open()

    def __exit__(self, *_: Any) -> None:
        _running.window = self.outer
        if self.is_open:
            take_function_mode_off(self.mode)

    def open(self) -> None:
        """Activate the mode, unless another mode must see torch's loss, or code in between will pop the topmost one."""
        if self.is_open or torchs_cross_entropy is None:
            return
        modes = function_modes()
        if modes and self.mode.is_like(modes[-1]):
            return  # an enclosing module's mode suffices; one per level would use up the interpreter's stack
        if modes == self.below and all(
            isinstance(mode, LeavesLosses) or is_device_mode(mode) for mode in modes
        ):
            self.is_open = True
            put_function_mode_on(self.mode)


_running = threading.local()
