"""Memory of the optimizer's state and of its `step()`, found without running the user's optimizer."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.info import tensors_in
from autoac.ops.signatures import Signature, flops_of
from autoac.price.engine_costs import device_rates
from autoac.price.isolated_ops import workspaces_on_scratch
from autoac.record.reachable import unchanged
from autoac.step.model import free_bytes, gradient_of
from autoac.step.optimizer import around_steps, inner_optimizer
from autoac.step.restore import tensors_of
from autoac.step.units import here
from autoac.torch_private import (
    DataDependentOutputException,
    DispatchMode,
    FakeTensorMode,
    compiler_off,
    fakes_as_parameters,
    is_wrapper_type,
    key_of_storage,
    local_part,
    schema_of,
    storage_key,
)
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import NEVER, OPTIMIZER_STEP, SCALAR_BYTES, Op, Profile, Storage

# The count of a late step. Optimizers may take another path from some step on, or in every k-th step: this number can
# be divided by 1 to 12, by 100 and by 1000, and float32 holds it exactly.
LATE_STEP = 1_386_000


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


@contextlib.contextmanager
def states_made() -> Iterator[list[torch.optim.Optimizer]]:
    """Context; the optimizers that make their state within, as most do in their first step."""
    without: list[torch.optim.Optimizer] = []
    found: list[torch.optim.Optimizer] = []

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not optimizer.state:
            without.append(optimizer)

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer.state and any(known is optimizer for known in without):
            found.append(optimizer)

    take_off = around_steps(before, after)
    try:
        yield found
    finally:
        take_off()


def with_optimizer(
    profile: Profile,
    optimizer: torch.optim.Optimizer,
    measure: bool = True,
    elsewhere: str = "",
    in_host_memory: bool = False,
    model: torch.nn.Module | None = None,
) -> Profile:
    """The profile of the step with this optimizer's `step()` at its end.

    The state counts as resident: it exists in every step but the first. A copy of the optimizer takes some steps on
    fake tensors, which allocates nothing and leaves the optimizer and the parameters untouched. If the optimizer's own
    state takes more (its parameters have another dtype while it steps), that counts. A value that it reads
    on the host (its count of steps, a norm to scale by) is taken to be 1 in the first two. If it reads any, or counts
    its steps in Python, late steps follow, with large values; the step that takes most counts.

    Args:
        measure: run its matrix products and mixed-dtype ops once in isolation, for their workspace.
        elsewhere: the kind of device that the profile stands for, if it is another than the model's: "cuda". There
            optimizers run other ops (`_foreach`, over all parameters at once) with larger temporaries.
        in_host_memory: the parameters and the optimizer are there, so that nothing of them is on the device.
        model: the one that it trains, see `_untrained`; None if all of the parameters that require gradients get some.

    Raises:
        ProfilingError: the optimizer cannot be run on fake tensors.
    """
    optimizer = inner_optimizer(optimizer)
    name, device = type(optimizer).__name__, torch.device(profile.device)
    if in_host_memory:
        return _with_step(profile, name, 0, 0, f"{name}.step() runs on the CPU, and its time is not counted")
    try:
        untrained = set() if model is None else _untrained(optimizer, model, profile)
        steps = _fake_steps(optimizer, device.type, elsewhere or device.type, untrained)
    except Exception as error:
        raise ProfilingError(
            f"{name} cannot be run on fake tensors, so its memory is not known ({error!r:.200}). "
            "Set headroom= to its state and the temporaries of its step, in place of optimizer=."
        ) from error
    step_bytes = steps.peak_bytes(_workspaces(steps, device) if measure else {})
    note = f"includes {name}.step(), whose time is not counted"
    if steps.looked_at_values:
        note += f"; it looks at values, for which 1 and {LATE_STEP} stood"
    if steps.failed_late:
        note += "; its late steps failed on fake tensors and are not counted"
    return _with_step(
        profile, name, max(steps.state_bytes, _present_bytes(optimizer, device.type)), step_bytes, note
    )


def _present_bytes(optimizer: torch.optim.Optimizer, device: str) -> int:
    """Bytes of the optimizer's state as it is now, without what it shares with its parameters and their gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [gradient for p in parameters if (gradient := gradient_of(p)) is not None]
    theirs = here([*parameters, *gradients])
    shared, own = _storage_sizes(theirs), _storage_sizes(state_tensors(optimizer, device))
    allocated = device_for(torch.device(device)).allocated_bytes
    return sum(allocated(size) for key, size in own.items() if key not in shared)


def _untrained(optimizer: torch.optim.Optimizer, model: torch.nn.Module, profile: Profile) -> set[int]:
    """`id` of the parameters that got no gradient so far: those of a teacher in the model, or of an unused head.

    An optimizer that has stepped has no state for these. Others may be trained in a later step, and count as trained:
    those of modules that the step called with gradients on (of several heads, only one gives the loss), and of modules
    that it did not call beside one of the same class that is trained (experts, dropped layers).

    Args:
        profile: of a step; it names the gradients that it made.
    """
    if not optimizer.state:
        return set()
    parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
    made = {row.name for row in profile.storage_table if row.kind == "Gradient"}
    without = {
        name: parameter
        for name, parameter in parameters.items()
        if gradient_of(parameter) is None and name not in made and not optimizer.state.get(parameter)
    }

    def places(name: str) -> set[tuple[str, type]]:
        return {(above.rpartition(".")[0], type(modules[above])) for above in _modules_above(name)}

    trained = set[tuple[str, type]]().union(*map(places, parameters.keys() - without.keys()))
    called, called_at_all = profile.called, {call.fqn for call in profile.calls}
    return {
        id(parameter)
        for name, parameter in without.items()
        if (owner := name.rpartition(".")[0]) not in called
        and (owner in called_at_all or trained.isdisjoint(places(name)))
    }


def _modules_above(name: str) -> Iterator[str]:
    """Names of the modules that a parameter is in, without the model's own."""
    while name := name.rpartition(".")[0]:
        yield name


def _storage_sizes(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    strided = (tensor for tensor in tensors if tensor.layout is torch.strided)
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in strided}


def _with_step(profile: Profile, name: str, state_bytes: int, step_bytes: int, note: str) -> Profile:
    state = Storage(state_bytes, NEVER, profile.end, "Optstate", name)
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


def _fake_steps(
    optimizer: torch.optim.Optimizer, here: str, device: str, untrained: Collection[int] = ()
) -> _FakeSteps:
    """Steps of a copy of the optimizer, whose state is empty, on fake tensors.

    Args:
        untrained: `id` of parameters that get no gradients, though they require some.
        here: the type of device that the parameters are on.
        device: the type that they are to be on. Fake CUDA tensors need no CUDA: gradients are off.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    n_taken = _largest_count(optimizer)
    own_state, hooks = (
        ("state", "param_groups"),
        "_optimizer_",
    )  # the copy has states of its own, and no hooks
    shared = [
        v for name, v in vars(optimizer).items() if name not in own_state and not name.startswith(hooks)
    ]
    shared += [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    with (
        unchanged(shared, {kind.__module__ for kind in type(optimizer).__mro__} - {"builtins"}),
        compiler_off(),
        fakes_as_parameters(parameters),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        fake = copy.copy(optimizer)
        groups = [
            {
                name: _fake_parameters(value, here, device, optimizer.state, untrained)
                if name == "params"
                else value
                for name, value in group.items()
            }
            for group in optimizer.param_groups
        ]
        # Not by setting attributes: a wrapper class may forward that to the original optimizer. torch's copy leaves out
        # what a class of one's own has set; `step` on the instance is a scheduler's, bound to the original.
        own = {name: value for name, value in vars(optimizer).items() if name not in vars(fake)}
        own.pop("step", None)
        vars(fake).update(
            {name: copy.copy(v) if issubclass(type(v), (dict, list)) else v for name, v in own.items()}
        )
        vars(fake).update(state=defaultdict(dict), param_groups=groups)
        steps = _FakeSteps(fake, device)
        steps.take_early_and_late(n_taken)
        stand_ins = {storage_key(p) for group in groups for p in group["params"] if p.requires_grad}
        if steps.given.isdisjoint(stand_ins):
            raise TypeError("its step uses none of its own parameters: does it wrap another optimizer?")
    return steps


def _largest_count(optimizer: torch.optim.Optimizer) -> int:
    """The number of steps that the optimizer has taken by its state, or zero."""
    counts = [entry["step"] for entry in optimizer.state.values() if "step" in entry]
    numbers = (
        c for c in counts if isinstance(c, (int, float)) or (isinstance(c, torch.Tensor) and c.numel() == 1)
    )
    return int(max(map(float, numbers), default=0))


class _FakeSteps:
    """Steps of an optimizer on fake tensors.

    Attributes:
        state_bytes: of the state after the steps.
        given: keys of the storages that ops were given.
        looked_at_values: whether a step read a tensor's value on the host.
        failed_late: whether a late step ended in an error, such as that of a schedule which is over by then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: str):
        self.optimizer = optimizer
        self.device = device
        self.state_bytes = 0
        self.given: set[int] = set()
        self.failed_late = False
        self._allocated = device_for(torch.device(device)).allocated_bytes
        self._kept: list[tuple[int, _LiveBytes]] = []  # with the bytes of the state before the step

    @property
    def looked_at_values(self) -> bool:
        return any(live.looked_at_values for _, live in self._kept)

    @property
    def calls(self) -> dict[Signature, tuple[int, int, int]]:
        """The calls of all steps, see `_LiveBytes.calls`."""
        found: dict[Signature, tuple[int, int, int]] = {}
        for _, live in self._kept:
            for call, work in live.calls.items():
                found[call] = max(found.get(call, work), work)
        return found

    def peak_bytes(self, workspace_bytes: dict[Signature, int]) -> int:
        """The most that a step takes above the state, if these ops have these workspaces."""
        # A state that only late steps make counts as resident, and not a second time in the step that makes it.
        peaks = (state + live.peak_with(workspace_bytes) for state, live in self._kept)
        return max(0, max(peaks) - self.state_bytes)

    def take(self, value: int, keep: bool = True) -> None:
        """One step, in which `value` stands for what it reads on the host."""
        live = _LiveBytes(self.device, value, state_tensors(self.optimizer, self.device))
        if keep:
            self._kept.append((self.state_bytes, live))
        try:
            with live:
                self.optimizer.step()
        finally:
            sizes = _storage_sizes(state_tensors(self.optimizer, self.device))
            self.state_bytes = sum(map(self._allocated, sizes.values()))
            self.given |= live.given

    def take_early_and_late(self, n_taken: int) -> None:
        """The first two steps, late ones, and the one that comes next after `n_taken` steps.

        The memory of the first does not count: it makes the state, and is not a step like the others.
        """
        self.take(1, keep=False)
        before = {(id(place), name): number for place, name, number in _numbers(self.optimizer)}
        self.take(1)
        counters = [
            (place, name)
            for place, name, number in _numbers(self.optimizer)
            if number > before.get((id(place), name), number)
        ]
        if not counters and not self.looked_at_values:
            return
        # A count is looked at before or after the step has increased it.
        for count in [*([n_taken] if n_taken else []), LATE_STEP - 1, *([LATE_STEP] if counters else [])]:
            known_bytes = self.state_bytes
            self._take_at(count, counters)
            if self.state_bytes > known_bytes:
                self._take_at(count, counters)  # with all of that state from its beginning

    def _take_at(self, count: int, counters: list[tuple[dict[Any, Any], Any]]) -> None:
        """One step after `count` steps."""
        for place, name in counters:
            old = place[name]
            is_tensor = isinstance(old, torch.Tensor)
            place[name] = torch.tensor(count, dtype=old.dtype, device=old.device) if is_tensor else count
        try:
            self.take(count + 1)
        except Exception:
            self.failed_late = True


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[Any, Any], Any, float]]:
    """Numbers among the optimizer's attributes, settings and state: where each is, its name and its value."""
    own = [value for value in vars(optimizer).values() if isinstance(value, dict)]
    for place in [vars(optimizer), *own, *optimizer.param_groups, *optimizer.state.values()]:
        for name, value in place.items():
            if type(value) is int:
                yield place, name, value
            elif isinstance(value, torch.Tensor) and value.dim() == 0:
                with contextlib.suppress(
                    DataDependentOutputException
                ):  # a fake tensor of constants has a value
                    yield place, name, value.item()


def _workspaces(steps: _FakeSteps, device: torch.device) -> dict[Signature, int]:
    calls = steps.calls
    if not calls:
        return {}
    rates = device_rates(device)
    estimate_s = {call: rates.roofline_s(call.dtype, *work) for call, (_, *work) in calls.items()}
    return workspaces_on_scratch(calls, estimate_s.__getitem__, device, free_bytes(device) // 4)


def _fake_parameters(
    parameters: list[torch.Tensor],
    here: str,
    device: str,
    states: Mapping[torch.Tensor, Any],
    untrained: Collection[int],
) -> list[torch.Tensor]:
    """Fake parameters, with gradients if trained; one with optimizer state counts as trained even if frozen now."""
    fakes = []
    for whole in parameters:
        real = local_part(whole)
        moves = real.is_meta or (real.device.type == here and here != device)
        place = torch.device(device) if moves else real.device
        empty = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=place)
        is_trained = (whole.requires_grad and id(whole) not in untrained) or bool(states.get(whole))
        fake = torch.nn.Parameter(empty, requires_grad=is_trained)
        if is_trained:
            fake.grad = torch.empty_like(empty)
        fakes.append(fake)
    return fakes


class _LiveBytes(DispatchMode):
    """Mode that counts the bytes of the storages that ops make, above those at the start.

    Args:
        value: stands for every value that is read on the host. A truth value is true if this is 1.
        state: tensors that the step may replace.

    Attributes:
        calls: ops that may take workspace: the most live bytes before or after one, its floating-point operations and
            the bytes it moves.
        looked_at_values: whether the step read a tensor's value on the host.
    """

    def __init__(self, device: str, value: int, state: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.device = device
        self.value = value
        self._allocated = device_for(torch.device(device)).allocated_bytes
        self.live_bytes = self.peak_bytes = 0
        self.calls: dict[Signature, tuple[int, int, int]] = {}
        self.looked_at_values = False
        self.given: set[int] = set()  # storages that ops were given
        self._known: dict[int, Any] = {}
        for tensor in {storage_key(t): t for t in state if t.layout is torch.strided}.values():
            storage = tensor.untyped_storage()
            self._watch(storage, self._allocated(storage.nbytes()))

    def peak_with(self, workspace_bytes: dict[Signature, int]) -> int:
        """The peak if these ops have these workspaces."""
        own = (live + workspace_bytes.get(op, 0) for op, (live, *_) in self.calls.items())
        return max(self.peak_bytes, max(own, default=0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper_type, types)):
            return NotImplemented  # its own dispatch is next; the ops that it runs on its parts come here
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
            if args[0].dtype == torch.bool:
                return self.value == 1
            return float(self.value) if args[0].is_floating_point() else self.value
        for tensor in self._made(result):
            storage = tensor.untyped_storage()
            size = self._allocated(storage.nbytes())
            self.live_bytes += size
            self._watch(storage, size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + self._number_bytes(func, args, given))
        flops = flops_of(func, args, kwargs, result)
        if flops or len({tensor.dtype for tensor in given if tensor.dim()}) > 1:
            self._note(Signature.of(func, args, kwargs), max(before, self.live_bytes), flops)
        return result

    def _number_bytes(self, func: Any, args: Any, given: Sequence[torch.Tensor]) -> int:
        """Bytes of the tensors that stand for Python numbers while an op on CPU runs: the number, and its cast."""
        if self.device != "cpu":
            return 0
        total = 0
        schema = schema_of(func)
        # On CPU these call an op for each tensor, which makes a tensor of a number that they pass on.
        for_each = schema.name.startswith("aten::_foreach_")
        for argument, value in zip(schema.arguments, args, strict=False):
            is_tensor = str(argument.type) == "Tensor" or (for_each and str(argument.type) == "number")
            if isinstance(value, (int, float)) and is_tensor:
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
