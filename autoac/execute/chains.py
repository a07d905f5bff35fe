"""Chains of tiny ops, on which engines measure their own bookkeeping.

The plan pays for the dispatch mode and the hooks of a wrapped region whatever it decides there, and for each op that it
records. Where ops are short this is what decides whether a region is worth wrapping.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoac.device import device_for
from autoac.measure import in_turn
from autoac.torch_private import disable_dispatch_modes

LINKS = 24
"""Links of a chain; each is an op and a view."""
_ROUNDS = 11
_POOL_BYTES = 2**25
"""What is read between ops comes from so much, as that of a model does: the same 4 MB stay in a large cache."""
_MOST_SLOWER = 12.0
"""Twice what was seen; more is noise."""

Run = Callable[[], torch.Tensor]
Seconds = Mapping[str, Sequence[tuple[float, float]]]
"""Of forward and backward in each round, by name of a run."""
Pair = tuple[str, str]
"""Names of a run with some bookkeeping, and of the same without."""

SAVES, SAVES_NOT = "aten.sin.default", "aten.add.Tensor"
"""The op of a chain whose links save their input for backward, and of one whose links save nothing."""


class Chains:
    """The chains on a device, without an engine, and what they take.

    Args:
        device: where the ops run.
        bytes_between: read before each op of forward by something that no engine sees and that is not counted; 0 for
            nothing. On CPU the ops share the caches with the interpreter: between ops of some MB its bookkeeping takes
            several times as long as between tiny ones.

    Attributes:
        plain: the runs without an engine, by name: "saving", "not saving", "once".
        tensor: what a chain begins with.
    """

    def __init__(self, device: torch.device, bytes_between: int = 0):
        self.device = device
        self.bytes_between = bytes_between
        self.tensor = torch.ones(4, device=device, requires_grad=True)
        self._between: Callable[[], None] = lambda: None
        self._not_counted_s = 0.0
        self.plain: dict[str, Run] = {
            "saving": lambda: self.saving(self.tensor),
            "not saving": lambda: self.not_saving(self.tensor),
            "once": lambda: self.once(self.tensor),
        }

    def saving(self, x: torch.Tensor) -> torch.Tensor:
        """Each link saves its input for backward."""
        for _ in range(LINKS):
            self._pause()
            x = torch.sin(x).view(4)
        return x

    def not_saving(self, x: torch.Tensor) -> torch.Tensor:
        """Only one op more after the links saves something: backward has to come, or there is no second run."""
        for _ in range(LINKS):
            self._pause()
            x = (x + x).view(4)
        return torch.sin(x)

    def once(self, x: torch.Tensor) -> torch.Tensor:
        """A single op."""
        self._pause()
        return torch.sin(x)

    def measured(self, runs: Mapping[str, Run], *pairs: Pair) -> Measured:
        """What these take and the plain ones.

        Args:
            runs: chains with an engine, by name.
            pairs: those between whose ops is to be read too, in `Measured.slower`.
        """
        runs = {**self.plain, **runs}
        warm = self._seconds(runs)
        if not self.bytes_between:
            return Measured(warm, warm)
        self._between = evicting(self.bytes_between)
        try:
            cold = self._seconds({name: runs[name] for pair in pairs for name in pair})
        finally:
            self._between = lambda: None
        return Measured(warm, cold)

    def op_s(self) -> float:
        """Seconds that the op itself of a link that saves takes, without autograd."""
        op, tensor, now = torch.ops.aten.sin.default, self.tensor.detach(), device_for(self.device).now
        samples = []
        for _ in range(_ROUNDS):
            start = now()
            for _ in range(LINKS):
                op(tensor)
            samples.append((now() - start) / LINKS)
        return _quartile(samples)

    def _pause(self) -> None:
        start = time.perf_counter()
        self._between()
        self._not_counted_s += time.perf_counter() - start

    def _seconds(self, runs: Mapping[str, Run]) -> Seconds:
        now = device_for(self.device).now

        def taken(run: Run) -> tuple[float, float]:
            self._not_counted_s = 0.0
            start = now()
            loss = run().sum()
            middle = now()
            torch.autograd.grad(loss, self.tensor)
            return middle - start - self._not_counted_s, now() - middle

        return in_turn({name: functools.partial(taken, run) for name, run in runs.items()}, _ROUNDS)


@dataclass(frozen=True)
class Measured:
    """What runs took.

    Args:
        warm: with nothing between their ops.
        cold: some of them, with as many bytes read between their ops as was asked for.
    """

    warm: Seconds
    cold: Seconds

    @functools.cached_property
    def _quartiles(self) -> dict[str, float]:
        """The lower quartile of forward and of backward, since noise only ever adds."""
        return {
            name: sum(_quartile(part) for part in zip(*rounds, strict=True))
            for name, rounds in self.warm.items()
        }

    def extra(self, name: str, base: str) -> float:
        """Seconds that a run takes longer than another one, not below 0."""
        return max(0.0, self._quartiles[name] - self._quartiles[base])

    def slower(self, *pairs: Pair) -> float:
        """How many times as long a part of the bookkeeping takes between ops that fill the caches.

        Of forward: nothing can be put between the ops of a backward. Pairs count together, for each by itself is a
        small difference. The median of the rounds: what the caches have kept of the interpreter differs from op to op.
        """

        def extra(seconds: Seconds, round_: int) -> float:
            return sum(seconds[name][round_][0] - seconds[base][round_][0] for name, base in pairs)

        rounds = len(self.warm[pairs[0][0]])
        warm_s, cold_s = (
            statistics.median(extra(s, i) for i in range(rounds)) for s in (self.warm, self.cold)
        )
        return min(max(1.0, cold_s / warm_s), _MOST_SLOWER) if warm_s > 0 else 1.0


def evicting(n_bytes: int) -> Callable[[], None]:
    """A matrix product that reads so many bytes, others each time, and that no engine sees."""
    size = math.isqrt(n_bytes // 4)
    left, out = (torch.ones(16, size, dtype=torch.float32, device="cpu") for _ in range(2))
    pool = torch.ones(max(1, _POOL_BYTES // n_bytes), size, size, dtype=torch.float32, device="cpu")
    rights = itertools.cycle(pool.unbind())

    def evict() -> None:
        with torch.no_grad(), disable_dispatch_modes():
            torch.mm(left, next(rights), out=out)

    return evict


def _quartile(samples: Iterable[float]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 4]
