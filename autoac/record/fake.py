"""Replaces parameters, buffers and the sample by fake tensors while a step is recorded.

A fake tensor has a shape, strides, a dtype and a device, and no data (torch's `FakeTensorMode`). So a model that does
not fit, or that was built on the meta device and never had values, runs its step without allocations.

Integer and boolean tensors that have values stay real: token ids, masks and positions are small, and code branches on
them on the host ("is anything masked?"). It then takes the same branch as in the real step.
"""

from __future__ import annotations

import contextlib
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.info import op_info, written_tensors
from autoac.record.single_draws import known
from autoac.step.failures import sample_of
from autoac.step.step import TrainingStep
from autoac.torch_private import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    UnsupportedOperatorException,
    as_group_norms_kernel,
    is_fake,
    own_tensors,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map_only,
    unset_fake_temporarily,
)
from autoac_solver.records.errors import ProfilingError


@dataclass(frozen=True)
class Faked:
    """The fake tensors that replace the model's.

    Args:
        mode: to be entered below all recording modes.
        step: the step with fake tensors in its sample.
        tensors: the fake parameters, buffers and tensors of the sample.
        gradients: fake tensors with their gradients before the step.
    """

    mode: FakeTensorMode
    step: TrainingStep
    tensors: list[torch.Tensor]
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]]

    def sharded(self, shard: Callable[[], None]) -> Faked:
        """The fake tensors of the model once it is sharded.

        Args:
            shard: shards the model.
        """
        with self.mode:
            shard()
        model = self.step.model
        parameters, others = list(model.parameters()), [*model.buffers(), *self.step.inputs]
        gradients = [(parameter, parameter.grad) for parameter in (*parameters, *others)]
        return Faked(self.mode, self.step, [*parameters, *others], gradients)

    def start_anew(self) -> None:
        """Reset the fake tensors to their state before a step: earlier gradients, no graph."""
        for tensor, gradient in self.gradients:
            tensor.grad = gradient
            if not tensor.is_leaf:  # a step has written it in place
                tensor.detach_()

    @contextlib.contextmanager
    def active(self, above: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        """Context in which the step runs.

        Args:
            above: a dispatch mode that sees the results of the fake implementations.
        """
        with self.mode, above, _RealWholeNumbers():
            yield


def fake_model(step: TrainingStep, device: torch.device) -> Faked:
    """Replace the model's parameters and buffers by fake tensors; the originals are not kept here.

    Tensors that share a storage share one afterwards, and tied parameters stay tied.

    Args:
        step: of a model on any device, meta included. A callable sample is left alone: it makes its own tensors.
        device: the device that all fake tensors report.

    Raises:
        ProfilingError: a tensor is of a kind that has no fake counterpart.
    """
    mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    converter = _Converter(mode, device)
    for name, module in step.model.named_modules():
        for kind in own_tensors(module):
            for key, tensor in list(kind.items()):
                if tensor is not None:
                    setattr(module, key, converter.fake(tensor, f"{name}.{key}".lstrip(".")))
    if step.is_whole:
        return Faked(mode, step, converter.made, converter.gradients)
    sample = step.sample
    if not isinstance(sample, (torch.Tensor, tuple, list, dict)):
        sample = dict(sample)  # a library's own mapping type
    faked = tree_map_only(torch.Tensor, lambda tensor: converter.fake(tensor, "the sample"), sample)
    return Faked(mode, step.of(step.model, faked), converter.made, converter.gradients)


class _Converter:
    def __init__(self, mode: FakeTensorMode, device: torch.device):
        self.mode = mode
        self.device = device
        self.made: list[torch.Tensor] = []
        self.gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._tensors: dict[int, torch.Tensor] = {}
        self._storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []  # so that no `id` is reused

    def fake(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The fake counterpart of a tensor, always the same one."""
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)]
        if not _has_fractions(tensor.dtype) and tensor.device == self.device:
            self._tensors[id(tensor)] = tensor
            self.made.append(tensor)
            return tensor
        parameter = isinstance(tensor, torch.nn.Parameter)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        if not plain or tensor.layout is not torch.strided:
            raise ProfilingError(
                f"{name} is a {type(tensor).__name__} of layout {tensor.layout}, for which there is no fake tensor. "
                'Profile with mode="real" (a sharded model, on its ranks; for other ranks, with parallel= before it is '
                "sharded), or before the model is quantised."
            )
        with self.mode, torch.no_grad():
            whole = self._storage(tensor)
            fake = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).detach()
            if parameter:
                fake = torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
            else:
                fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)
            if tensor.grad is not None:
                fake.grad = torch.empty_like(fake)
                self.made.append(fake.grad)
            self.gradients.append((fake, fake.grad))
        self._tensors[id(tensor)] = fake
        self._alive.append(tensor)
        self.made.append(fake)
        return fake

    def _storage(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor that spans a tensor's whole storage; one per storage and dtype."""
        key = (storage_key(tensor), tensor.dtype)
        if key not in self._storages:
            size = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
            self._storages[key] = torch.empty(size, dtype=tensor.dtype, device=self.device)
        return self._storages[key]


class _RealWholeNumbers(DispatchMode):
    """Mode that runs an op on real data if its tensors are integers or booleans, or known single numbers.

    See `single_draws` for the latter.
    """

    def __init__(self) -> None:
        super().__init__()
        # Real storages that an op with fake arguments has written: allocated, but their values are unknown.
        self.unknown: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        if any(map(is_fake, given)):
            return self._with_fakes(func, args, kwargs)
        fractions = [tensor for tensor in given if _has_fractions(tensor.dtype)]
        if not all(map(_is_known, fractions)):
            return func(*args, **kwargs)
        unknown = any(tensor.untyped_storage() in self.unknown for tensor in given)
        # In-place ops and host reads allocate nothing. Any other op runs on fake tensors first, for its result's size.
        result = func(*args, **kwargs) if _makes_tensors(func) else None
        made = _tensors(result)
        too_large = sum(tensor.numel() for tensor in made) > _MOST_NUMBERS
        elsewhere = any(
            tensor.device.type == "meta" or not _is_here(tensor.device) for tensor in (*given, *made)
        )
        unlike = not fractions and any(_has_fractions(tensor.dtype) for tensor in made)
        if too_large or elsewhere or unlike or (fractions and any(tensor.numel() != 1 for tensor in made)):
            return result
        if unknown and not _makes_tensors(func) and not _writes(func):
            raise DataDependentOutputException(func)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
        if unknown:
            self.unknown.update(tensor.untyped_storage() for tensor in _tensors(result))
        if fractions:
            known.update(tensor.untyped_storage() for tensor in _tensors(result))
        return result

    def _with_fakes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that has a fake argument; a real tensor that it writes stays real."""
        result = as_group_norms_kernel(func, args, func(*args, **kwargs))
        if not _writes(func):
            return result
        for target in written_tensors(op_info(func), args, kwargs):
            if not is_fake(target):
                self.unknown.add(target.untyped_storage())
                result = target if isinstance(result, torch.Tensor) else result
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


_MOST_NUMBERS = 2**24


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_known(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage() in known


def _writes(func: Any) -> bool:
    return isinstance(func, OpOverload) and schema_of(func).is_mutable


def _makes_tensors(func: Any) -> bool:
    returns = schema_of(func).returns if isinstance(func, OpOverload) else ()
    return not _writes(func) and any("Tensor" in str(result.type) for result in returns)


def _is_here(device: torch.device) -> bool:
    return device_for(device).is_here()


@contextlib.contextmanager
def explained(step: TrainingStep, failed_at: Callable[[], tuple[str, str] | None]) -> Iterator[None]:
    """Context: turn failures of fake tensors into errors that name the op, the module and the sample.

    Args:
        step: the one that is recorded.
        failed_at: returns the op and the module at which the step failed, None if it failed outside of any op.

    Raises:
        ProfilingError: an op refused its fake arguments.
    """
    try:
        yield
    except Exception as error:
        where = failed_at()
        if where is None:
            raise  # the model's own error, no op's
        op, module = where
        raise ProfilingError(
            f"the step cannot be recorded on fake tensors: {op} {_why(error)}, in {module}{_line_of(error)}. "
            f'{_if_the_sample_is_right(error, step)} with mode="real" on a machine where the step fits, or change the '
            "model so that its shapes and its path do not depend on values (masks instead of selected rows, no "
            ".item(), no `if tensor:`)."
        ) from error


def _why(error: Exception) -> str:
    if isinstance(error, UnsupportedOperatorException):
        return "has no fake implementation"
    if isinstance(error, DynamicOutputShapeException):
        return "makes a result whose shape depends on values"
    if isinstance(error, DataDependentOutputException):
        return "reads a value on the host"
    message = str(error).split("\n")[0]
    return f"refuses them ({type(error).__name__}: {message:.200})"


def _if_the_sample_is_right(error: Exception, step: TrainingStep) -> str:
    """The beginning of the advice; where an op refuses its arguments, it may refuse real ones, too."""
    of_fakes = (UnsupportedOperatorException, DynamicOutputShapeException, DataDependentOutputException)
    shapes = "" if isinstance(error, of_fakes) else sample_of(step)
    return f"Does the step run by itself, with the sample {shapes}? Then profile" if shapes else "Profile"


def _line_of(error: BaseException) -> str:
    """The last line of the user's code, outside of torch and of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    own = ("/torch/", "/autoac/", "<")
    for frame in reversed(frames):
        if not any(part in frame.filename for part in own):
            return f" ({frame.filename.rpartition('/')[2]}, line {frame.lineno}: {frame.line})"
    return ""
