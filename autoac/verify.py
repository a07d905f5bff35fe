"""Run a step with a plan and without from the same state, and compare everything a step leaves behind."""

from __future__ import annotations

import copy
import functools
import hashlib
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.compat import counted_writes, current_node
from autoac.measure import ONE_AT_A_TIME, measure_peak
from autoac.opinfo import op_info, tensors_in, written_tensors
from autoac.recorder import device_of
from autoac.step import is_whole_step, make_step
from autoac.uncompiled import uncompiled
from autoac.untouched import Seen, put_back, random_states, untouched
from autoac_solver.baselines import checkpointed
from autoac_solver.errors import ProfilingError
from autoac_solver.format import format_bytes
from autoac_solver.plan_record import PlanRecord


class AnyPlan(Protocol):
    """What `verify` asks of a plan."""

    @property
    def record(self) -> PlanRecord: ...
    @property
    def predicted_peak_bytes(self) -> int: ...
    @property
    def predicted_overhead(self) -> float: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    def applied(self, model: torch.nn.Module) -> Any: ...
    def gradient_at_start(self, tensor: torch.Tensor) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Report:
    """What `Plan.verify` found.

    Args:
        equal: loss, gradients, buffers and random states are equal to the bit; where the sample is a callable, the
            parameters after it and what its optimizers keep of them, too.
        first_difference: what differs first, "" if nothing does; where two steps without the plan differ as well, it
            says so, and nothing can be told of the plan.
        predicted_peak_bytes, measured_peak_bytes: of the planned step, resident bytes included.
        unplanned_peak_bytes: measured without the plan.
        profiled_peak_bytes: predicted without the plan, for the step that was profiled.
        budget_bytes: the plan's budget.
        time_ratio: median step time with the plan / without, from interleaved steps.
        predicted_overhead: what the plan predicts for `time_ratio - 1`.
    """

    equal: bool
    first_difference: str
    predicted_peak_bytes: int
    measured_peak_bytes: int
    unplanned_peak_bytes: int
    profiled_peak_bytes: int
    budget_bytes: int
    time_ratio: float
    predicted_overhead: float

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def is_larger_step(self) -> bool:
        """Whether the step takes, without the plan too, clearly more memory than the profile predicts."""
        return self.unplanned_peak_bytes > (1 + _ANOTHER_STEP) * self.profiled_peak_bytes

    @property
    def ok(self) -> bool:
        """Equal, and within the budget."""
        return self.equal and self.within_budget

    def __str__(self) -> str:
        peak = self.measured_peak_bytes
        lines = [
            "gradients, loss, buffers and random states: "
            + ("equal to the bit" if self.equal else f"DIFFERENT, first in {self.first_difference}"),
            f"measured peak {format_bytes(peak)}, predicted {format_bytes(self.predicted_peak_bytes)} "
            f"({peak / self.predicted_peak_bytes - 1:+.3%}), budget {format_bytes(self.budget_bytes)}"
            + ("" if self.within_budget else ": EXCEEDED"),
            f"measured peak without the plan {format_bytes(self.unplanned_peak_bytes)}",
            f"step time {self.time_ratio:.2f} x that without the plan, predicted {1 + self.predicted_overhead:.2f}",
        ]
        if self.is_larger_step:
            lines.append(
                f"without the plan the step takes more than the {format_bytes(self.profiled_peak_bytes)} that the "
                "profile predicts: another batch size or length than was profiled, or what the profile's notes name"
            )
        return "\n".join(lines)


_ANOTHER_STEP = 0.05
"""Share by which the peak without a plan may exceed the predicted one before a word is said."""
_TIMED_ROUNDS = 3


def verify(
    plan: AnyPlan, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None
) -> Report:
    """See `Plan.verify`."""
    # Where replay recomputes anything the step runs uncompiled; compiled it could differ in the last bits, plan or not.
    replays = plan.record.engine == "replay" and any(region.wrapped for region in plan.record.regions)
    with ONE_AT_A_TIME, uncompiled(model) if replays else nullcontext():
        return _verify(plan, model, sample, loss)


def _verify(
    plan: AnyPlan, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None
) -> Report:
    step = make_step(model, sample, loss)
    fixed = sample if not callable(sample) else ()
    device, optimizers, trains = device_of(model), KeptOptimizers(), is_whole_step(sample)

    def run(planned: bool, measure: bool = False) -> _Outcome:
        with (
            untouched(model, fixed, plan.gradient_at_start),
            Kept(model),
            optimizers,
            plan.applied(model) if planned else nullcontext(),
        ):
            outcome = _run(model, step, device, measure)
            if trains:
                outcome.values.update(_trained(model, optimizers))
            return outcome

    run(False)  # lazy initialisation is not to count
    without, with_plan = run(False, measure=True), run(True, measure=True)
    if trains and not without.tells_gradients and not optimizers.known:
        raise ProfilingError(
            "the step leaves nothing to compare: it returns no loss, its gradients are gone, and no optimizer was "
            "stepped. Have it return the loss and leave the gradients."
        )
    difference = without.first_difference(with_plan)
    if difference:
        by_itself = without.first_difference(run(False))
        if by_itself:
            difference = f"{by_itself}, which differs between two steps without a plan, too"
        else:
            in_forward = difference == _LOSS
            difference = _first_op(model, step, fixed, plan, optimizers, in_forward) or difference
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_TIMED_ROUNDS):
        for planned in (False, True):
            times[planned].append(run(planned).seconds)
    return Report(
        equal=not difference,
        first_difference=difference,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=plan.resident_bytes + with_plan.peak_bytes,
        unplanned_peak_bytes=plan.resident_bytes + without.peak_bytes,
        profiled_peak_bytes=checkpointed(plan.record.profile, ()).peak_bytes,
        budget_bytes=plan.budget_bytes,
        time_ratio=statistics.median(times[True]) / statistics.median(times[False]),
        predicted_overhead=plan.predicted_overhead,
    )


class Kept:
    """Context that puts parameters and buffers back: steps of a callable sample may write them."""

    def __init__(self, model: torch.nn.Module):
        self.tensors = [*model.parameters(), *model.buffers()]

    def __enter__(self) -> None:
        self.seen = [Seen.of(t) for t in self.tensors if t.layout is torch.strided]
        self.copies = [t.detach().clone() for t in self.tensors]

    def __exit__(self, *_: Any) -> None:
        def write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
            with torch.no_grad():
                if not torch.equal(tensor, copy):
                    tensor.copy_(copy)

        pairs = zip(self.tensors, self.copies, strict=True)
        put_back(
            [
                *(seen.put_back for seen in self.seen),
                *(functools.partial(write, *pair) for pair in pairs),
            ]
        )


class KeptOptimizers:
    """Context that puts back what a callable step does to its optimizers: their states, their groups' options.

    An optimizer is known from its first step on, in this context or in one before. A learning rate's scheduler is not.
    """

    def __init__(self) -> None:
        self._known: list[tuple[torch.optim.Optimizer, dict[Any, Any], list[Any]]] = []

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped."""
        return [optimizer for optimizer, _, _ in self._known]

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._look)

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known, _, _ in self._known):
            rows = {parameter: (row, _copies(row)) for parameter, row in optimizer.state.items()}
            groups = [(group, _copies(group)) for group in optimizer.param_groups]
            self._known.append((optimizer, rows, groups))

    def __exit__(self, *_: Any) -> None:
        self._hook.remove()
        put_back(functools.partial(self._restore, *known) for known in self._known)

    @staticmethod
    def _restore(optimizer: torch.optim.Optimizer, rows: dict[Any, Any], groups: list[Any]) -> None:
        optimizer.state.clear()
        for parameter, (row, copies) in rows.items():
            _put(row, copies)
            optimizer.state[parameter] = row
        for group, copies in groups:
            _put(group, copies)


def _copies(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What is there, and a copy of it; a group's parameters are the model's, and kept elsewhere."""
    return {name: (v, v if name == "params" else copy.deepcopy(v)) for name, v in values.items()}


def _put(values: dict[str, Any], copies: dict[str, tuple[Any, Any]]) -> None:
    values.clear()
    for name, (value, kept) in copies.items():
        if isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(kept)
            values[name] = value
        else:
            values[name] = value if name == "params" else copy.deepcopy(kept)


@dataclass
class _Outcome:
    values: dict[str, Any]
    seconds: float
    peak_bytes: int = 0

    @property
    def tells_gradients(self) -> bool:
        """Whether there is a loss, or any gradient."""
        return any(v is not None for k, v in self.values.items() if k == _LOSS or k.startswith(_GRADIENT))

    def first_difference(self, other: _Outcome) -> str:
        for name, value in self.values.items():
            if not same(value, other.values.get(name)):
                return name
        return ""


def same(a: Any, b: Any) -> bool:
    """Equal to the bit: a NaN equals itself, and -0.0 is not 0.0."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
            return False
        return torch.equal(_bits(a), _bits(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "shape"):
        return bool((a == b).all())
    return a == b


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _run(model: torch.nn.Module, step: Callable[[], Any], device: torch.device, measure: bool) -> _Outcome:
    peak = 0
    start = time.perf_counter()
    if measure:
        measured = measure_peak(step, device)
        loss, peak = measured.result, measured.peak_above_start_bytes
    else:
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    values: dict[str, Any] = {_LOSS: loss}
    for name, parameter in model.named_parameters():
        values[_GRADIENT + name] = parameter.grad
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = buffer.detach().clone()
    for index, state in enumerate(random_states(model)):
        values[f"random state {index}"] = state
    return _Outcome(values, seconds, peak)


def _trained(model: torch.nn.Module, optimizers: KeptOptimizers) -> dict[str, Any]:
    """The parameters after a step, and what its optimizers keep of them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {
        f"{name} after the step": parameter.detach().clone() for parameter, name in names.items()
    }
    for optimizer in optimizers.known:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in names):
            for key, value in optimizer.state.get(parameter, {}).items():
                what = f"{key} of {names[parameter]} in {type(optimizer).__name__}"
                values[what] = copy.deepcopy(value)
    return values


class _Trace(TorchDispatchMode):
    """Records what ops compute, by a checksum of their results.

    `rows` has the words for each op, and what it is to be compared by: in a planned model the node of a cross entropy
    has another name, and writes its result in place.

    Args:
        forward: of forward as well, not only of backward.
    """

    supports_higher_order_operators = True

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.forward = forward
        self.rows: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        with counted_writes(written_tensors(info, args, kwargs) if info.writes_lists else []):
            result = func(*args, **kwargs)
        node = current_node()
        if not info.ignored and (self.forward or node is not None):
            words = f"forward op {info.name}" if node is None else f"backward op {info.name} in {node.name()}"
            self.rows.append((words, (info.name.rpartition(".")[0], *map(_digest, tensors_in(result)))))
        return result


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(_bits(tensor).cpu().numpy().tobytes()).digest()


_LOSS, _GRADIENT = "the loss", "the gradient of "
_OF_LOSSES = (
    *("NllLossBackward0", "LogSoftmaxBackward0", "_CrossEntropyBackward"),
    *("forward op aten._log_softmax.default", "forward op aten.nll_loss_forward.default"),
)
"""The nodes and ops of cross entropies, torch's and the lean one."""


def _first_op(
    model: torch.nn.Module,
    step: Callable[[], Any],
    fixed: Any,
    plan: AnyPlan,
    optimizers: KeptOptimizers,
    in_forward: bool,
) -> str:
    """The first op whose result differs, of backward or from forward on, "" if none can be told."""
    traces = []
    for planned in (False, True):
        context = plan.applied(model) if planned else nullcontext()
        with (
            untouched(model, fixed, plan.gradient_at_start),
            Kept(model),
            optimizers,
            context,
            _Trace(in_forward) as trace,
        ):
            step()
        traces.append(trace.rows)
    plain, planned_rows = traces
    if in_forward or plan.record.chunked_losses:  # lean losses run other ops, chunked ones by some rows
        plain = [row for row in plain if not row[0].endswith(_OF_LOSSES)]
    remaining = iter([key for _, key in planned_rows])  # with replayed ops, so plain's must be a subsequence
    for words, key in plain:
        if key not in remaining:
            return words
    return ""
