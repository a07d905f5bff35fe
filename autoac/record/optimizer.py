"""Memory of the optimizer's state and of its `step()`, found without running the user's optimizer."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.device import device_for
from autoac.measure import unique_storage_bytes
from autoac.ops.info import tensors_in
from autoac.ops.signatures import Signature, flops_of
from autoac.price.engine_costs import device_rates
from autoac.price.isolated_ops import workspaces_on_scratch
from autoac.step.model import free_bytes
from autoac.step.optimizer import inner_optimizer
from autoac.step.restore import tensors_of
from autoac.step.units import here
from autoac.torch_private import (
    DataDependentOutputException,
    FakeTensorMode,
    TorchDispatchMode,
    fakes_as_parameters,
    key_of_storage,
    local_part,
    schema_of,
    storage_key,
)
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import NEVER, OPTIMIZER_STEP, SCALAR_BYTES, Op, Profile, Storage


def state_tensors(optimizer: torch.optim.Optimizer, device: str) -> list[torch.Tensor]:
    """The optimizer's state tensors on one device type; some optimizers keep counters on the CPU."""
    found = here([tensor for entry in optimizer.state.values() for tensor in tensors_of(entry)])
    return [tensor for tensor in found if tensor.device.type == device]


def is_counted(profile: Profile) -> bool:
    """Whether the profile includes an optimizer, added by `with_optimizer`."""
    return any(op.name == OPTIMIZER_STEP for op in profile.tape)


def without_its_step(profile: Profile) -> Profile:
    """The profile with the optimizer's state, but without the temporaries of its `step()`."""
    tape = (replace(op, workspace_bytes=0) if op.name == OPTIMIZER_STEP else op for op in profile.tape)
    return replace(profile, tape=tuple(tape))


def with_optimizer(
    profile: Profile,
    optimizer: torch.optim.Optimizer,
    measure: bool = True,
    elsewhere: str = "",
) -> Profile:
    """The profile of the step with this optimizer's `step()` at its end.

    The state counts as resident: it exists in every step but the first. A copy of the optimizer takes two steps on
    fake tensors, which allocates nothing and leaves the optimizer and the parameters untouched. A value that it reads
    on the host (a norm, to scale by it) is taken to be 1.

    Args:
        measure: run its matrix products and mixed-dtype ops once in isolation, for their workspace.
        elsewhere: the kind of device that the profile stands for, if it is another than the model's: "cuda". There
            optimizers run other ops (`_foreach`, over all parameters at once) with larger temporaries.

    Raises:
        ProfilingError: the optimizer cannot be run on fake tensors.
    """
    optimizer = inner_optimizer(optimizer)
    device = torch.device(profile.device)
    try:
        state_bytes, live = _fake_steps(optimizer, device.type, elsewhere or device.type)
    except Exception as error:
        raise ProfilingError(
            f"{type(optimizer).__name__} cannot be run on fake tensors, so its memory is not known ({error!r:.200}). "
            "Set headroom= to its state and the temporaries of its step, in place of optimizer=."
        ) from error
    step_bytes = live.peak_with(_workspaces(live, device)) if measure and live.calls else live.peak_bytes
    note = f"includes {type(optimizer).__name__}.step(), whose time is not counted"
    if live.looked_at_values:
        note += "; it looks at values, for which 1 stood"
    state = Storage(state_bytes, NEVER, profile.end, "Optstate", type(optimizer).__name__)
    step = Op(OPTIMIZER_STEP, profile.end, NEVER, False, 0.0, (), (), (), workspace_bytes=step_bytes)
    at_end = profile.end + 1
    return replace(
        profile,
        end=at_end,
        tape=(*profile.tape, step),
        storage_table=(*(_survive(s, profile.end, at_end) for s in profile.storage_table), state),
        notes=(*profile.notes, note),
    )


def _survive(storage: Storage, end: int, new_end: int) -> Storage:
    return replace(storage, free=new_end) if storage.free == end else storage


def _fake_steps(optimizer: torch.optim.Optimizer, here: str, device: str) -> tuple[int, _LiveBytes]:
    """Bytes of the state, and the live bytes of a step above everything that stays.

    Args:
        here: the type of device that the parameters are on.
        device: the type that they are to be on. Fake CUDA tensors need no CUDA: gradients are off.
    """
    allocated = device_for(torch.device(device)).allocated_bytes
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with fakes_as_parameters(parameters), FakeTensorMode(allow_non_fake_inputs=True):
        fake = copy.copy(optimizer)
        groups = [
            {
                name: _fake_parameters(value, here, device, optimizer.state) if name == "params" else value
                for name, value in group.items()
            }
            for group in optimizer.param_groups
        ]
        # Not by setting attributes: a wrapper class may forward that to the original optimizer. torch's copy leaves out
        # what a class of one's own has set; `step` on the instance is a scheduler's, bound to the original.
        own = {name: value for name, value in vars(optimizer).items() if name not in vars(fake)}
        own.pop("step", None)
        vars(fake).update(
            {name: copy.copy(v) if isinstance(v, (dict, list)) else v for name, v in own.items()}
        )
        vars(fake).update(state=defaultdict(dict), param_groups=groups)
        with _LiveBytes(device) as first:
            fake.step()
        stand_ins = {storage_key(p) for group in groups for p in group["params"] if p.requires_grad}
        if first.given.isdisjoint(stand_ins):
            raise TypeError("its step uses none of its own parameters: does it wrap another optimizer?")
        storages = {storage_key(tensor): tensor for tensor in state_tensors(fake, device)}.values()
        state_bytes = sum(allocated(unique_storage_bytes([tensor])) for tensor in storages)
        with _LiveBytes(device) as live:
            fake.step()
    return state_bytes, live


def _workspaces(live: _LiveBytes, device: torch.device) -> dict[Signature, int]:
    rates = device_rates(device)
    estimate_s = {call: rates.roofline_s(call.dtype, *work) for call, (_, *work) in live.calls.items()}
    return workspaces_on_scratch(live.calls, estimate_s.__getitem__, device, free_bytes(device) // 4)


def _fake_parameters(
    parameters: list[torch.Tensor], here: str, device: str, states: Mapping[torch.Tensor, Any]
) -> list[torch.Tensor]:
    """Fake parameters, with gradients if trained; one with optimizer state counts as trained even if frozen now."""
    fakes = []
    for whole in parameters:
        real = local_part(whole)
        moves = real.is_meta or (real.device.type == here and here != device)
        place = torch.device(device) if moves else real.device
        empty = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=place)
        is_trained = whole.requires_grad or bool(states.get(whole))
        fake = torch.nn.Parameter(empty, requires_grad=is_trained)
        if is_trained:
            fake.grad = torch.empty_like(empty)
        fakes.append(fake)
    return fakes


class _LiveBytes(TorchDispatchMode):
    """Mode that counts the bytes of the storages that ops make, above those at the start.

    Attributes:
        calls: ops that may take workspace: the most live bytes before or after one, its floating-point operations and
            the bytes it moves.
        looked_at_values: whether the step read a tensor's value on the host.
    """

    def __init__(self, device: str):
        super().__init__()
        self.device = device
        self._allocated = device_for(torch.device(device)).allocated_bytes
        self.live_bytes = self.peak_bytes = 0
        self.calls: dict[Signature, tuple[int, int, int]] = {}
        self.looked_at_values = False
        self.given: set[int] = set()  # storages that ops were given
        self._known: dict[int, Any] = {}

    def peak_with(self, workspace_bytes: dict[Signature, int]) -> int:
        """The peak if these ops have these workspaces."""
        return max([self.peak_bytes, *(self.calls[op][0] + size for op, size in workspace_bytes.items())])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        for tensor in given:
            self.given.add(storage_key(tensor))
            if storage_key(tensor) not in self._known:
                self._watch(tensor.untyped_storage(), 0)
        before = self.live_bytes
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            self.looked_at_values = True
            return 1.0 if args[0].is_floating_point() else 1
        for tensor in self._made(result):
            storage = tensor.untyped_storage()
            size = self._allocated(storage.nbytes())
            self.live_bytes += size
            self._watch(storage, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self._numbers(func, args, given))
        flops = flops_of(func, args, kwargs, result)
        if flops or len({tensor.dtype for tensor in given if tensor.dim()}) > 1:
            self._note(Signature.of(func, args, kwargs), max(before, self.live_bytes), flops)
        return result

    def _numbers(self, func: Any, args: Any, given: Sequence[torch.Tensor]) -> int:
        """Bytes of the tensors that stand for Python numbers while an op on CPU runs: the number, and its cast."""
        if self.device != "cpu":
            return 0
        total = 0
        for argument, value in zip(schema_of(func).arguments, args, strict=False):
            if isinstance(value, (int, float)) and str(argument.type) == "Tensor":
                own = torch.float64 if isinstance(value, float) else torch.int64
                dtype = given[0].dtype if given else own
                total += SCALAR_BYTES + (0 if dtype is own else dtype.itemsize)
        return total

    def _made(self, result: Any) -> Iterator[torch.Tensor]:
        for tensor in tensors_in(result):
            if storage_key(tensor) not in self._known and tensor.device.type == self.device:
                yield tensor

    def _note(self, call: Signature, around: int, flops: int) -> None:
        known = self.calls.get(call, (0, 0, 0))[0]
        self.calls[call] = max(known, around), flops, call.moved_bytes(())

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = key_of_storage(storage)

        def died(_: Any) -> None:
            self.live_bytes -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, died)
