"""Peak, gradients and step time of configurations of one model, by rulers that know nothing of plans.

Every configuration lives on a copy of the model's modules that shares its parameters and buffers, so a plan is put
on once, as in training, and all configurations work on the same memory.
"""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from autoac.measure import measure_peak, unique_storage_bytes
from benchmarks.models import Workload
from benchmarks.quiet import tell
from benchmarks.strategies import Strategy

SEED = 1


@dataclass
class Configuration:
    """A strategy on a model, and what was measured of it.

    Args:
        peak_bytes: measured, resident bytes included.
        gradients_equal: to those without checkpointing, to the bit.
        buffers_equal: the same of the buffers after one step (running statistics).
        seconds: one sample a round: CPU time on CPU, event time on CUDA.
        wall_s: the same samples by the clock on the wall.
        error: why there is nothing measured, "" if there is.
    """

    strategy: Strategy
    peak_bytes: int = 0
    gradients_equal: bool = False
    buffers_equal: bool = False
    seconds: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    error: str = ""


class Bench:
    """Measures configurations of one workload."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.clock = _cuda_clock if device.type == "cuda" else _cpu_clock
        self.resident_bytes = unique_storage_bytes(workload.tensors)
        self.steps: dict[str, Callable[[], object]] = {}
        self.reference: _Outcome | None = None

    def examine(self, strategy: Strategy) -> Configuration:
        """Peak and gradients of a strategy; the first one's gradients are what the others' are compared with."""
        if strategy.error:
            return Configuration(strategy, error=strategy.error)
        try:
            return self._examine(strategy)
        except (
            Exception
        ) as error:  # a strategy that fails on this model is a row of the table, not the end of it
            message = f"{type(error).__name__}: {error}".split("\n")[0]
            return Configuration(strategy, error=message)
        finally:
            self._forget()

    def _examine(self, strategy: Strategy) -> Configuration:
        model = _sharing_copy(self.workload.model)
        strategy.install(model)
        step = self.workload.step(model)
        if self.reference is None:
            with self._kept_buffers():
                step()  # what torch sets up once is not to count
        with self._kept_buffers():
            self._prepare()
            measured = measure_peak(step, self.device)
            outcome = _Outcome.of(self.workload.model)
        self.reference = self.reference or outcome
        self.steps[strategy.name] = step
        return Configuration(
            strategy,
            peak_bytes=self.resident_bytes + measured.peak_above_start_bytes,
            gradients_equal=_equal(outcome.gradients, self.reference.gradients),
            buffers_equal=_equal(outcome.buffers, self.reference.buffers),
        )

    def time(self, configurations: Sequence[Configuration], rounds: int) -> None:
        """Time one step of each configuration a round, in another order every round."""
        able = [c for c in configurations if not c.error]
        order = random.Random(SEED)
        gc.collect()
        gc.freeze()  # what is here stays; collecting before each step is cheap then
        start = time.perf_counter()
        try:
            for done in range(rounds):
                order.shuffle(able)
                for configuration in able:
                    self._prepare()
                    seconds, wall_s = self.clock(self.steps[configuration.strategy.name])
                    configuration.seconds.append(seconds)
                    configuration.wall_s.append(wall_s)
                    self._forget()
                left_s = (time.perf_counter() - start) / (done + 1) * (rounds - done - 1)
                tell(f"  round {done + 1} of {rounds}, {left_s:.0f} s left")
        finally:
            gc.unfreeze()

    def _prepare(self) -> None:
        self._forget()
        gc.collect()
        torch.manual_seed(SEED)

    def _forget(self) -> None:
        for parameter in self.workload.model.parameters():
            parameter.grad = None

    @contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        buffers = list(self.workload.model.buffers())
        values = [buffer.clone() for buffer in buffers]
        yield
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)


@dataclass(frozen=True)
class _Outcome:
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]

    @classmethod
    def of(cls, model: nn.Module) -> _Outcome:
        return cls([p.grad for p in model.parameters()], [b.clone() for b in model.buffers()])


def _equal(some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def _sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules on the same parameters and buffers."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def _cpu_clock(step: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.process_time() - cpu, time.perf_counter() - wall


def _cuda_clock(step: Callable[[], object]) -> tuple[float, float]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    wall = time.perf_counter()
    start.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3, time.perf_counter() - wall
