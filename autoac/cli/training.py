"""Train some steps with a plan on the model, and measure them."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from autoac.cli.target import Target
from autoac.device import device_for
from autoac.measure import measure_peak, unique_storage_bytes
from autoac.plans import Plan
from autoac.progress import Tell
from autoac.record.optimizer import is_counted, state_tensors
from autoac.step.failures import noted
from autoac.step.model import device_of, unwrapped
from autoac.step.restore import tensors_of
from autoac.step.step import TrainingStep, is_whole_step
from autoac_solver.records.profile import NEVER, Profile


@dataclass(frozen=True)
class Training:
    """Results of a few training steps.

    Args:
        optimizer: description of the optimizer.
        losses: losses of all steps; None if the user's step returns none.
        step_times_s: forward, loss and backward of the steps between the first and the last.
        measured_peak_bytes: of the last step, resident bytes included; with the optimizer's step if the user gave one
            or the plan counts one.
        optimizer_state_bytes: the part of the peak that is the state of the user's optimizer.
    """

    optimizer: str
    losses: list[float | None]
    step_times_s: list[float]
    measured_peak_bytes: int
    optimizer_state_bytes: int

    @property
    def step_time_s(self) -> float:
        """Median of the step times."""
        return statistics.median(self.step_times_s)


def train(target: Target, plan: Plan, steps: int, learning_rate: float, tell: Tell) -> Training:
    """Train with the plan on the model, and take it off again.

    Args:
        steps: at least 3: the first warms up, the last is measured, those between are timed.
        learning_rate: of plain SGD, if the user gave no optimizer and the sample is not a callable step.

    Raises:
        ProfilingError: the optimizer is not this model's.
        Exception: whatever the user's step raises, with a note on the sample and the one that was planned for.
    """
    device = device_of(unwrapped(target.model))
    one_step = TrainingStep(target.model, target.sample, target.loss, target.optimizer)
    update, name = _update(target, learning_rate)
    with_update = target.optimizer is not None or is_counted(plan.record.profile)

    def whole_step() -> Any:
        loss = one_step.run()
        if with_update:
            update()
        return loss

    losses: list[float | None] = []
    times_s: list[float] = []
    peak_bytes = state_bytes = 0
    with plan.applied(target.model):
        for index in range(steps):
            tell(f"step {index + 1} of {steps}", index / steps)
            target.model.zero_grad(set_to_none=True)
            with noted(
                one_step, f"in step {index + 1} of training", plan.record.profile.sample, is_restored=False
            ):
                if index == steps - 1:
                    state_bytes = unique_storage_bytes(_state(target, device))
                    resident_bytes = _resident_bytes(plan.record.profile, target, device)
                    measured = measure_peak(whole_step, device)
                    loss, peak_bytes = measured.result, resident_bytes + measured.peak_above_start_bytes
                else:
                    loss, seconds = device_for(device).timed(one_step.run)
                    update()
                    times_s += [seconds] if index else []
            losses.append(None if loss is None else float(loss))
            del loss  # the next step begins without it, as the profiled one did
    return Training(name, losses, times_s, peak_bytes, state_bytes)


def _state(target: Target, device: torch.device) -> list[torch.Tensor]:
    """The state of the user's optimizer."""
    return [] if target.optimizer is None else state_tensors(target.optimizer, device.type)


def _resident_bytes(profile: Profile, target: Target, device: torch.device) -> int:
    """Resident bytes before a step, counted as in a profile, for model, sample and optimizer as they are now.

    On CPU, constants of a loss and the like are found only by recording a step: they count as in the profile.
    """
    if device_for(device).counts_memory:
        gc.collect()  # as `measure_peak` does before it starts to count
        return device_for(device).memory_allocated()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        ours = (t for t in tensors if t.layout is torch.strided and t.device.type == device.type)
        return unique_storage_bytes(ours)

    model = unwrapped(target.model)
    found = sum(s.bytes for s in profile.storage_table if s.alloc == NEVER and s.kind == "Input")
    inputs = max(found, size(tensors_of(target.sample)))  # the sample may be larger than the profiled one
    return size([*model.parameters(), *model.buffers(), *_state(target, device)]) + inputs


def _update(target: Target, learning_rate: float) -> tuple[Callable[[], Any], str]:
    """The function that updates the weights after a step, and its description."""
    if target.optimizer is not None:
        return target.optimizer.step, type(target.optimizer).__name__
    if is_whole_step(target.sample):
        return lambda: None, "the sample's own step"
    trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=learning_rate).step, f"SGD, learning rate {learning_rate:g}"
