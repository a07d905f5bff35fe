"""Some steps of training with a plan on the model, measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoac.cli.target import Target
from autoac.measure import measure_peak
from autoac.optimizer import OPTIMIZER_STEP
from autoac.plans import Plan
from autoac.recorder import device_of, unwrapped
from autoac.step import make_step


@dataclass(frozen=True)
class Training:
    """What a few steps came to.

    Args:
        optimizer: what trained the model, in words.
        losses: of every step; None where the user's step returns none.
        step_times_s: forward, loss and backward of the steps between the first and the last.
        measured_peak_bytes: of the last step, what was there before it included; with the optimizer's step if the plan
            counts that.
    """

    optimizer: str
    losses: list[float | None]
    step_times_s: list[float]
    measured_peak_bytes: int

    @property
    def step_time_s(self) -> float:
        """The median."""
        return statistics.median(self.step_times_s)


def train(
    target: Target, plan: Plan, steps: int, learning_rate: float, tell: Callable[[str, float], None]
) -> Training:
    """Train with the plan on the model, and take it off again.

    Args:
        steps: at least 3: the first warms up, the last is measured, those between are timed.
        learning_rate: of plain SGD, where the user gave no optimizer and the sample is no step of its own.
    """
    device = device_of(unwrapped(target.model))
    forward_and_backward = make_step(target.model, target.sample, target.loss)
    update, name = _update(target, learning_rate)
    is_counted = any(op.name == OPTIMIZER_STEP for op in plan.record.profile.tape)

    def whole_step() -> Any:
        loss = forward_and_backward()
        if is_counted:
            update()
        return loss

    losses: list[float | None] = []
    times_s: list[float] = []
    peak_bytes = 0
    with plan.applied(target.model):
        for index in range(steps):
            tell(f"step {index + 1} of {steps}", index / steps)
            target.model.zero_grad(set_to_none=True)
            if index == steps - 1:
                measured = measure_peak(whole_step, device)
                loss, peak_bytes = measured.result, plan.resident_bytes + measured.peak_above_start_bytes
            else:
                loss, seconds = _timed(forward_and_backward, device)
                update()
                times_s += [seconds] if index else []
            losses.append(None if loss is None else float(loss))
    return Training(name, losses, times_s, peak_bytes)


def _update(target: Target, learning_rate: float) -> tuple[Callable[[], Any], str]:
    """What changes the weights after a step, and what it is called."""
    if target.optimizer is not None:
        return target.optimizer.step, type(target.optimizer).__name__
    if callable(target.sample) and not isinstance(target.sample, torch.Tensor):
        return lambda: None, "the sample's own step"
    trained = [parameter for parameter in target.model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=learning_rate).step, f"SGD, learning rate {learning_rate:g}"


def _timed(step: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    start = time.perf_counter()
    result = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start
