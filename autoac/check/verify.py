"""Run a step with a plan and without from the same state, and compare everything a step leaves behind."""

from __future__ import annotations

import copy
import functools
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autoac.check.any_plan import AnyPlan
from autoac.check.equal import alike, values_of
from autoac.check.first_op import first_op
from autoac.device import device_for
from autoac.execute.engines import ENGINES
from autoac.measure import ONE_AT_A_TIME, in_turn, measure_peak
from autoac.ops.info import is_collective
from autoac.price.meters import without_waiting
from autoac.step.failures import noted
from autoac.step.model import check_backwards_may_run, device_of
from autoac.step.restore import other_random_numbers, random_states
from autoac.step.step import TrainingStep
from autoac.step.trial import OptimizerStates, trial
from autoac.step.uncompiled import uncompiled
from autoac_solver.plan.baselines import checkpointed
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.format import format_bytes


@dataclass(frozen=True)
class Report:
    """The result of `Plan.verify`.

    Args:
        equal: whether loss, gradients, buffers and random states are bitwise equal; for a callable sample, also the
            parameters after the step and their optimizer states.
        first_difference: the first difference, "" if there is none.
        predicted_peak_bytes, measured_peak_bytes: of the planned step, resident bytes included.
        unplanned_peak_bytes: measured without the plan.
        profiled_peak_bytes: predicted without the plan, for the step that was profiled.
        budget_bytes: the plan's budget.
        budget_of: the memory that the budget limits. Only allocated memory is measured, so a budget of "reserved"
            memory counts as kept if the allocated memory is within it.
        time_ratio: median step time with the plan / without, from interleaved steps.
        predicted_overhead: the plan's prediction of `time_ratio - 1`.
        peaks_bytes: the measured peak of each planned step, of which `measured_peak_bytes` is the largest.
        repeats: whether the first step that differs from its planned one equals itself when it is run again without the
            plan. If not, `first_difference` is between these two, and nothing is known about the plan.
        tolerance: 0, or for engine compile the relative difference up to which floating-point values count as equal (in
            float32; proportionally more in dtypes with a larger epsilon). Its step is compared with the same regions
            compiled as torch does; peak and time without the plan are of that step.
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
    tolerance: float = 0.0
    peaks_bytes: tuple[int, ...] = ()
    repeats: bool = True
    budget_of: str = "allocated"

    @property
    def equality(self) -> str:
        """Whether the planned step equals the other, in words."""
        if self.equal:
            return f"equal within {self.tolerance:g}" if self.tolerance else "equal to the bit"
        if self.repeats:
            return f"DIFFERENT, first in {self.first_difference}"
        return (
            f"cannot be compared: two steps without the plan differ, first in {self.first_difference}. "
            "Some kernels sum in another order each time. For this comparison, use "
            "torch.use_deterministic_algorithms(True) or, on CPU, torch.set_num_threads(1); random numbers that do "
            "not come from torch's generators have to be the same in each step"
        )

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.measured_peak_bytes <= self.budget_bytes

    @property
    def is_larger_step(self) -> bool:
        """Whether the step takes clearly more memory than the profile predicts even without the plan."""
        return self.unplanned_peak_bytes > (1 + _ANOTHER_STEP) * self.profiled_peak_bytes

    @property
    def ok(self) -> bool:
        """Equal, and within the budget."""
        return self.equal and self.within_budget

    def __str__(self) -> str:
        peak = self.measured_peak_bytes
        lines = [
            f"gradients, loss, buffers and random states: {self.equality}",
            f"measured peak {format_bytes(peak)}, predicted {format_bytes(self.predicted_peak_bytes)} "
            f"({peak / self.predicted_peak_bytes - 1:+.3%}), budget {format_bytes(self.budget_bytes)}"
            + (" of reserved memory, which is not measured" if self.budget_of == "reserved" else "")
            + ("" if self.within_budget else ": EXCEEDED"),
            *self._spread(),
            f"measured peak without the plan {format_bytes(self.unplanned_peak_bytes)}",
            f"step time {self.time_ratio:.2f} x that without the plan, predicted {1 + self.predicted_overhead:.2f}",
        ]
        if self.is_larger_step and len(self.peaks_bytes) < 2:
            lines.append(
                f"without the plan the step takes more than the {format_bytes(self.profiled_peak_bytes)} that the "
                "profile predicts: another batch size or length than was profiled, or what the profile's notes name"
            )
        return "\n".join(lines)

    def _spread(self) -> list[str]:
        if len(self.peaks_bytes) < 2:
            return []
        over = sum(peak > self.budget_bytes for peak in self.peaks_bytes)
        return [
            f"that is the largest of {len(self.peaks_bytes)} steps with other random numbers; the least is "
            f"{format_bytes(min(self.peaks_bytes))}, and {over or 'none'} {'are' if over > 1 else 'is'} over the budget"
        ]


_ANOTHER_STEP = 0.05
"""Share by which the peak without a plan may exceed the predicted one before the report mentions it."""
_TIMED_ROUNDS = 3
_LOSS, _GRADIENT = "the loss", "the gradient of "


COMPILED_TOLERANCE = 1e-6
"""Relative tolerance for compiled code in float32: kernels that are fused differently sum in another order."""


def verify(plan: AnyPlan, step: TrainingStep, reference: AnyPlan | None = None, steps: int = 1) -> Report:
    """See `Plan.verify`.

    Args:
        reference: the plan that stands for "without a plan" if that is compiled, too.
        steps: number of steps to compare, each but the first with other random numbers.
    """
    # With a wrapped region of an eager-only engine, the step runs uncompiled; compiled, the last bits could differ.
    eager = ENGINES[plan.record.engine].eager_only and any(region.wrapped for region in plan.record.regions)
    named = noted(step, "in verify", plan.record.profile.sample)
    with ONE_AT_A_TIME, uncompiled(step.model) if eager else nullcontext(), named:
        return _verify(plan, step, reference, steps)


def _verify(plan: AnyPlan, step: TrainingStep, reference: AnyPlan | None, steps: int) -> Report:
    check_backwards_may_run(step.model)
    model, trains, optimizers = step.model, step.is_whole, OptimizerStates(copies=True)
    tolerance = 0.0 if reference is None else COMPILED_TOLERANCE
    unplanned = nullcontext if reference is None else functools.partial(reference.applied, model)
    with_others = any(is_collective(op.name) for op in plan.record.profile.tape)

    def run(planned: bool, measure: bool = False) -> _Outcome:
        with (
            trial(model, step.inputs, step.written, gradient=plan.gradient_at_start, optimizers=optimizers),
            plan.applied(model) if planned else unplanned(),
        ):
            outcome = _run(step, measure)
            if trains:
                outcome.values.update(_trained(model, optimizers))
            return outcome

    run(False)  # warm-up: lazy initialisation is not measured
    if reference is not None:
        run(True)  # nor is compilation
    without, with_plan = run(False, measure=True), run(True, measure=True)
    if trains and not without.tells_gradients and not optimizers.known:
        raise ProfilingError(
            "the step leaves nothing to compare: it returns no loss, its gradients are gone, and no optimizer was "
            "stepped. Have it return the loss and leave the gradients."
        )

    def compared(without: _Outcome, with_plan: _Outcome) -> tuple[str, bool]:
        """The first difference, and whether the step without the plan repeats."""
        difference = without.first_difference(with_plan, tolerance)
        if not difference:
            return "", True
        if with_others:  # other ranks see no difference, and would not run the same steps
            return difference, True
        by_itself = without.first_difference(run(False), tolerance)
        if by_itself:
            return by_itself, False
        if reference is not None:  # a dispatch mode does not see the ops of compiled code
            return difference, True
        return first_op(step, plan, optimizers, difference == _LOSS) or difference, True

    difference, repeats = compared(without, with_plan)
    unplanned_bytes, planned_bytes = [without.peak_bytes], [with_plan.peak_bytes]
    for seed in range(1, steps):
        with other_random_numbers(model, seed):
            without, with_plan = run(False, measure=True), run(True, measure=True)
            if not difference:
                difference, repeats = compared(without, with_plan)
        unplanned_bytes.append(without.peak_bytes)
        planned_bytes.append(with_plan.peak_bytes)
    del without, with_plan
    times = in_turn(
        {planned: lambda planned=planned: run(planned).seconds for planned in (False, True)}, _TIMED_ROUNDS
    )
    return Report(
        equal=not difference,
        first_difference=difference,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        measured_peak_bytes=plan.resident_bytes + max(planned_bytes),
        unplanned_peak_bytes=plan.resident_bytes + max(unplanned_bytes),
        profiled_peak_bytes=checkpointed(plan.record.profile, ()).peak_bytes,
        budget_bytes=plan.budget_bytes,
        time_ratio=statistics.median(times[True]) / statistics.median(times[False]),
        predicted_overhead=plan.predicted_overhead,
        tolerance=tolerance,
        peaks_bytes=tuple(plan.resident_bytes + peak for peak in planned_bytes),
        repeats=repeats,
        budget_of=plan.record.budget_of,
    )


@dataclass
class _Outcome:
    values: dict[str, Any]
    seconds: float
    peak_bytes: int = 0

    @property
    def tells_gradients(self) -> bool:
        """Whether there is a loss, or any gradient."""
        return any(v is not None for k, v in self.values.items() if k == _LOSS or k.startswith(_GRADIENT))

    def first_difference(self, other: _Outcome, tolerance: float = 0.0) -> str:
        for name, value in self.values.items():
            its = other.values.get(name)
            if not alike(value, its, tolerance):
                return name
        return ""


def _run(step: TrainingStep, measure: bool) -> _Outcome:
    model, device = step.model, device_of(step.model)
    peak, seconds = 0, 0.0
    if measure:
        measured = measure_peak(step.run, device)
        loss, peak = measured.result, measured.peak_above_start_bytes
    else:
        loss, seconds = without_waiting(lambda: device_for(device).timed(step.run), device)
    values: dict[str, Any] = {_LOSS: loss}
    for name, parameter in model.named_parameters():
        values[_GRADIENT + name] = parameter.grad
    for name, buffer in model.named_buffers():
        values[f"buffer {name}"] = values_of(buffer)
    for index, state in enumerate(random_states(model)):
        values[f"random state {index}"] = state
    return _Outcome(values, seconds, peak)


def _trained(model: torch.nn.Module, optimizers: OptimizerStates) -> dict[str, Any]:
    """The parameters after a step, and their optimizer states."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    values: dict[str, Any] = {
        f"{name} after the step": values_of(parameter) for parameter, name in names.items()
    }
    for optimizer in optimizers.known:
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if p in names):
            for key, value in optimizer.state.get(parameter, {}).items():
                what = f"{key} of {names[parameter]} in {type(optimizer).__name__}"
                values[what] = copy.deepcopy(value)
    return values
