"""Peak, gradients and step time of configurations of one model, measured independently of plans.

All configurations use the same modules. A strategy is installed once, as in training, and is active only while it is
examined or timed.
"""

from __future__ import annotations

import functools
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoac.check.equal import alike
from autoac.check.verify import COMPILED_TOLERANCE
from autoac.compare.quiet import MOST_STOLEN
from autoac.compare.strategies import Strategy
from autoac.compare.workload import Workload
from autoac.device import device_for
from autoac.measure import in_turn, measure_peak
from autoac.price.meters import Disturbance
from autoac.progress import Tell
from autoac.step.restore import tensors_of, untouched
from autoac.step.trial import OptimizerStates, trial
from autoac.torch_private import copied_hooks

SEED = 1
_ATTEMPTS = 4


@dataclass
class Configuration:
    """A strategy on a model, and its measurements.

    Args:
        peak_bytes: measured, resident bytes included.
        gradients_equal: to those without checkpointing, to the bit; see `Strategy.compiled`.
        buffers_equal: the same of the buffers after one step (running statistics).
        seconds: one sample a round: CPU time on CPU, event time on CUDA.
        wall_s: the same samples in wall-clock time.
        turns: when each was taken, counted over all configurations.
        error: why nothing was measured, "" if it was.
    """

    strategy: Strategy
    peak_bytes: int = 0
    gradients_equal: bool = False
    buffers_equal: bool = False
    seconds: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    error: str = ""


class Installed:
    """A strategy's changes to attributes of a model's modules, which can be put on and taken off.

    Args:
        model: left as it is.
        install: puts the strategy on a model.
    """

    def __init__(self, model: nn.Module, install: Callable[[nn.Module], object]) -> None:
        plain = [(module, dict(module.__dict__)) for module in model.modules()]
        with untouched(model, ()):
            for module, _ in plain:
                # The strategy's hooks go into dictionaries of their own.
                module.__dict__.update(copied_hooks(module))
            install(model)
            self._changes = [(module, *_changed(module, before)) for module, before in plain]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context in which the changes are on the model. Quick, as each timed step is in one: only they are undone."""
        for module, changed, _ in self._changes:
            module.__dict__.update(changed)
        try:
            yield
        finally:
            for module, changed, plain in self._changes:
                for name in changed.keys() - plain.keys():
                    module.__dict__.pop(name, None)
                module.__dict__.update(plain)  # in its place: the order stays


def _changed(module: nn.Module, before: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The attributes that were added or replaced, and their previous values."""
    changed = {k: v for k, v in module.__dict__.items() if k not in before or before[k] is not v}
    return changed, {k: before[k] for k in changed if k in before}


@contextmanager
def from_zero_grad(workload: Workload) -> Iterator[None]:
    """Context that starts without gradients and restores everything, including the previous gradients."""
    with untouched(workload.modules, workload.inputs, gradient=lambda leaf: None):
        yield


class Bench:
    """Measures configurations of one workload.

    Args:
        resident_bytes: alive before a step; peaks are measured above that.
    """

    def __init__(self, workload: Workload, device: torch.device, resident_bytes: int) -> None:
        self.workload = workload
        self.model = workload.modules
        self.device = device
        self.clock = device_for(device).step_seconds
        self.resident_bytes = resident_bytes
        self.step = workload.step()
        self.installed: dict[str, Installed] = {}
        self.reference: _Outcome | None = None
        self.compiled: dict[str, _Outcome] = {}
        self.order = random.Random(SEED)
        self.turns = 0
        self.taken_again = 0
        self._optimizers = OptimizerStates(copies=True)  # copied in a warm-up, which is not measured

    @property
    def tells_gradients(self) -> bool:
        """Whether there is any gradient to compare with; true before a strategy has run."""
        return self.reference is None or any(g is not None for g in self.reference.gradients)

    def examine(self, strategy: Strategy) -> Configuration:
        """Peak and gradients of a strategy; gradients are compared with those of the first strategy that ran.

        Those of compiled strategies are compared as `Strategy.compiled` says. Model, gradients, random
        states and the states of optimizers that step are restored, whatever happens.
        """
        if strategy.error:
            return Configuration(strategy, error=strategy.error)
        try:
            return self._examine(strategy)
        except Exception as error:
            # A strategy that fails on this model is a row of the table, not the end of it.
            message = f"{type(error).__name__}: {error}".split("\n")[0]
            return Configuration(strategy, error=message)

    def _examine(self, strategy: Strategy) -> Configuration:
        device_for(self.device).release_cache()  # fragments left by a strategy that ran out of memory
        installed = Installed(self.model, strategy.install)
        with self._optimizers:  # around both steps: the first one sets up new states as well
            if self.reference is None or strategy.compiled or self.workload.runs_itself:
                with self._kept(), installed.applied():
                    self.step()  # warm-up: one-time setup and compilation are not measured
            with self._kept(), installed.applied():
                self._prepare()
                measured = measure_peak(self.step, self.device)
                buffers = [buffer.clone() for buffer in self.model.buffers()]
                outcome = _Outcome([leaf.grad for leaf in self._leaves()], buffers)
        self.reference = self.reference or outcome
        reference, tolerance = self.reference, 0.0
        if strategy.compiled:
            reference, tolerance = self.compiled.setdefault(strategy.compiled, outcome), COMPILED_TOLERANCE
        self.installed[strategy.name] = installed
        return Configuration(
            strategy,
            peak_bytes=self.resident_bytes + measured.peak_above_start_bytes,
            gradients_equal=_equal(outcome.gradients, reference.gradients, tolerance),
            buffers_equal=_equal(outcome.buffers, reference.buffers, tolerance),
        )

    def time(self, configurations: Sequence[Configuration], rounds: int, tell: Tell) -> None:
        """Time one step of each configuration per round, in another order every round; appends the samples.

        If the host of a virtual machine has stolen CPU time from a sample, the sample is taken again, a few times;
        `taken_again` counts that. The attempt with the least stolen time counts.
        """
        able = [c for c in configurations if not c.error]
        gc.collect()
        freezes = not gc.get_freeze_count()  # `unfreeze` would undo what the caller has frozen
        if freezes:
            gc.freeze()  # existing objects stay; collecting before each step is cheap then
        start = time.perf_counter()

        def told(done: int) -> None:
            left_s = (time.perf_counter() - start) / done * (rounds - done)
            tell(f"round {done} of {rounds}, {left_s:.0f} s left", done / rounds)

        try:
            with self._optimizers, self._kept():
                runs = {number: functools.partial(self._time, one) for number, one in enumerate(able)}
                in_turn(runs, rounds, shuffle=self.order, after_round=told)
        finally:
            if freezes:
                gc.unfreeze()

    def _time(self, configuration: Configuration) -> None:
        attempts: list[tuple[float, float, float]] = []
        with self.installed[configuration.strategy.name].applied():
            while len(attempts) < _ATTEMPTS and (not attempts or attempts[-1][0] > MOST_STOLEN):
                self._prepare()
                disturbance = Disturbance()
                seconds, wall_s = self.clock(self.step)
                attempts.append((disturbance.stolen_share, seconds, wall_s))
        self.taken_again += len(attempts) - 1
        _, seconds, wall_s = min(attempts, key=lambda attempt: attempt[0])
        configuration.seconds.append(seconds)
        configuration.wall_s.append(wall_s)
        configuration.turns.append(self.turns)
        self.turns += 1
        self._forget()

    def _prepare(self) -> None:
        self._forget()
        gc.collect()
        torch.manual_seed(SEED)

    def _forget(self) -> None:
        """Drop the gradients that a step leaves."""
        for tensor in self._leaves():
            tensor.grad = None

    def _leaves(self) -> list[torch.Tensor]:
        inputs = tensors_of(self.workload.inputs)
        return [*self.model.parameters(), *(tensor for tensor in inputs if tensor.is_leaf)]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Context that starts without gradients and restores all but the optimizers' states, even if a step fails."""
        trained = self.model.parameters() if self.workload.runs_itself else ()
        written = (*self.model.buffers(), *trained)
        inputs = self.workload.inputs
        with trial(self.model, inputs, written, gradient=lambda leaf: None, optimizers=nullcontext()):
            yield


@dataclass(frozen=True)
class _Outcome:
    gradients: list[torch.Tensor | None]
    buffers: list[torch.Tensor]


def _equal(
    some: Sequence[torch.Tensor | None], others: Sequence[torch.Tensor | None], tolerance: float
) -> bool:
    pairs = zip(some, others, strict=True)
    return all(a is b if a is None or b is None else alike(b, a, tolerance) for a, b in pairs)
