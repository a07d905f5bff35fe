"""Train a small GPT with and without a plan, side by side, and compare.

Two copies of one model start from the same weights. In each step they see the same batch and the same random numbers;
one trains as it is, the other under a plan for half of the first one's peak. Their steps take turns, so that noise of
the machine affects both; every gradient of every step is compared.

A measured step is forward, loss and backward from the zero_grad(set_to_none=True) state. The optimizer is plain SGD,
which holds no memory of its own and works in place, outside the measured part. A peak is the allocator's peak above the
start of the step plus the resident bytes: parameters, buffers and the batch.
"""

from __future__ import annotations

import copy
import functools
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autoac
from autoac.check.equal import same
from autoac.demo.gpt import BATCH, BLOCKS, CONTEXT, DROPOUT, GPT, Batch, Text
from autoac.demo.report import DemoReport, Side, mb
from autoac.device import device_for
from autoac.measure import in_turn, measure_peak, unique_storage_bytes
from autoac.step.model import device_of

LEARNING_RATE = 0.1
SEED = 0

Progress = Callable[[str], None]


class Run:
    """One copy of the model in training, with its own stream of random numbers and its own records."""

    def __init__(self, model: nn.Module, rng_state: torch.Tensor) -> None:
        self.model = model
        self.device = device_for(device_of(model))
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.rng_state = rng_state
        self.losses: list[float] = []
        self.step_times_s: list[float] = []
        self.measured_peak_bytes = 0

    def step(self, batch: Batch, *, measure: bool) -> None:
        """Forward, loss and backward: with the peak measured, or timed without, because measuring takes time."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(self.rng_state)

        def forward_and_backward() -> float:
            loss = self.model(*batch)
            loss.backward()
            return loss.item()

        if measure:
            before_bytes = resident_bytes(self.model, batch)
            measurement = measure_peak(forward_and_backward)
            self.losses.append(measurement.result)
            peak_bytes = before_bytes + measurement.peak_above_start_bytes
            self.measured_peak_bytes = max(self.measured_peak_bytes, peak_bytes)
        else:
            loss, seconds = self.device.timed(forward_and_backward)
            self.losses.append(loss)
            self.step_times_s.append(seconds)
        self.rng_state = torch.get_rng_state()

    def result(self) -> Side:
        return Side(self.measured_peak_bytes, statistics.median(self.step_times_s), self.losses)


def resident_bytes(model: nn.Module, batch: Batch) -> int:
    """Bytes alive before a step: parameters, buffers and the batch."""
    return unique_storage_bytes([*model.parameters(), *model.buffers(), *batch])


def run(steps: int, progress: Progress) -> DemoReport:
    """Measure, plan, train both ways and compare.

    Args:
        steps: training steps, at least 3: the first and the last are measured, those between are timed.
        progress: called with a line about the next stage.
    """
    started = time.perf_counter()
    torch.manual_seed(SEED)
    text = Text(SEED)
    model = GPT(len(text.alphabet))
    parameters = sum(p.numel() for p in model.parameters())
    progress(
        f"GPT of {BLOCKS} blocks, {parameters / 1e6:.1f} M parameters, on {len(text.ids):,} characters of"
        f" Python's language reference; {BATCH} x {CONTEXT} characters a step, dropout {DROPOUT},"
        f" {torch.get_num_threads()} threads"
    )

    progress("Measuring the peak of a step without a plan ...")
    batch = text.batch()
    peak_bytes = _peak_of_one_step(model, batch)
    half_bytes = peak_bytes // 2
    progress(f"It is {mb(peak_bytes)}. Planning for half of it, {mb(half_bytes)} ...")
    plain = copy.deepcopy(model)
    plan, planning_time_s = _plan(model, batch, half_bytes, progress)
    plan.apply(model)

    progress(f"Training {steps} steps without and with the plan, in turn ...")
    rng_state = torch.get_rng_state()
    runs = Run(plain, rng_state), Run(model, rng_state)
    compared, different = _train(*runs, text, steps, progress)
    return DemoReport(
        parameters=parameters,
        steps=steps,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        without_plan=runs[0].result(),
        with_plan=runs[1].result(),
        budget_bytes=plan.budget_bytes,
        half_is_feasible=plan.budget_bytes == half_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_overhead=plan.predicted_overhead,
        planning_time_s=planning_time_s,
        gradients_compared=compared,
        gradients_different=different,
        losses_equal=runs[0].losses == runs[1].losses,
        random_numbers_equal=torch.equal(runs[0].rng_state, runs[1].rng_state),
        weights_equal=all(map(same, plain.parameters(), model.parameters())),
        total_time_s=time.perf_counter() - started,
    )


def _peak_of_one_step(model: nn.Module, batch: Batch) -> int:
    """The peak of a step after a warm-up; leaves no gradients and does not change the weights."""
    rehearsal = Run(model, torch.get_rng_state())
    rehearsal.step(batch, measure=False)
    rehearsal.step(batch, measure=True)
    rehearsal.optimizer.zero_grad(set_to_none=True)
    return rehearsal.measured_peak_bytes


def _plan(model: nn.Module, batch: Batch, budget_bytes: int, progress: Progress) -> tuple[Any, float]:
    """A plan for the budget, or for the least feasible one above it, and the seconds it took."""
    started = time.perf_counter()
    try:
        plan = autoac.plan(model, batch, budget=budget_bytes)
    except autoac.InfeasibleBudgetError as error:
        least_bytes = error.minimum_bytes
        progress(f"No plan gets there. The least feasible budget is {mb(least_bytes)}; planning for that ...")
        plan = autoac.plan(model, batch, budget=least_bytes)
    return plan, time.perf_counter() - started


def _train(plain: Run, planned: Run, text: Text, steps: int, progress: Progress) -> tuple[int, list[str]]:
    """Train both in lockstep; returns how many gradients were compared and which differed."""
    different: list[str] = []
    batches = [text.batch() for _ in range(steps)]
    names = [name for name, _ in plain.model.named_parameters()]

    def step(side: Run) -> None:
        index = len(side.losses)
        side.step(batches[index], measure=index in (0, steps - 1))

    def after_both(done: int) -> None:
        for name in names:
            expected, actual = (side.model.get_parameter(name).grad for side in (plain, planned))
            if not _equal(expected, actual):
                different.append(f"step {done}: {name}")
        plain.optimizer.step()
        planned.optimizer.step()
        losses = f"{plain.losses[-1]:.4f} without and {planned.losses[-1]:.4f} with the plan"
        progress(f"  step {done:2}: loss {losses}")

    # In random order, because the second finds warmer caches.
    runs = {index: functools.partial(step, side) for index, side in enumerate((plain, planned))}
    in_turn(runs, steps, shuffle=random.Random(SEED), after_round=after_both)
    return steps * len(names), different


def _equal(expected: torch.Tensor | None, actual: torch.Tensor | None) -> bool:
    return expected is actual if expected is None or actual is None else same(expected, actual)
