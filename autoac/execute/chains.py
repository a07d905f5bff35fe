"""Chains of tiny ops on which engines measure the cost of their own bookkeeping.

A wrapped region pays for its dispatch mode and hooks whatever is recomputed in it, and for each recorded op. If ops are
short, this cost decides whether the region is worth wrapping.
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
from autoac.measure import in_turn, seconds_of
from autoac.torch_private import disable_dispatch_modes

LINKS = 24
"""Links of a chain; each is an op and a view."""
_ROUNDS, _COLD_ROUNDS = 11, 5
"""Rounds of the runs; those with bytes between the ops take seconds each for a model of large ops."""
_POOL_BYTES = 2**25
"""Size of the pool that reads between ops cycle through; a single 4 MB buffer would stay in a large cache."""
_MOST_SLOWER = 12.0
"""Upper limit of `LinkTimes.slower`: twice the value observed; more is noise."""

Run = Callable[[], torch.Tensor]
Seconds = Mapping[str, Sequence[tuple[float, float]]]
"""Seconds of forward and of backward in each round, by the run's name."""
Pair = tuple[str, str]
"""Names of a run with some bookkeeping, and of the same run without it."""

SAVES, SAVES_NOT = "aten.sin.default", "aten.add.Tensor"
"""The op of a chain whose links save their input for backward, and of a chain whose links save nothing."""


class Chains:
    """The chains on one device, and their timing with and without an engine.

    Args:
        device: where the ops run.
        bytes_between: bytes read before each forward op, unseen by engines and not timed; 0 for none. On CPU, ops share
            the caches with the interpreter: bookkeeping between ops of some MB takes several times as long as between
            tiny ones.

    Attributes:
        plain: the runs without an engine, by name: "saving", "not saving", "once".
        tensor: input of the chains.
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
        """A chain whose links save nothing; only an extra op after them does, so that there is a second run."""
        for _ in range(LINKS):
            self._pause()
            x = (x + x).view(4)
        return torch.sin(x)

    def once(self, x: torch.Tensor) -> torch.Tensor:
        """A single op."""
        self._pause()
        return torch.sin(x)

    def measured(self, runs: Mapping[str, Run], *pairs: Pair) -> LinkTimes:
        """Time these runs and the plain ones.

        Args:
            runs: chains with an engine, by name.
            pairs: runs to time also with `bytes_between` read between their ops, for `LinkTimes.slower`.
        """
        runs = {**self.plain, **runs}
        warm = self._seconds(runs)
        if not self.bytes_between:
            return LinkTimes(warm, warm)
        self._between = evicting(self.bytes_between)
        try:
            cold = self._seconds({name: runs[name] for pair in pairs for name in pair}, _COLD_ROUNDS)
        finally:
            self._between = lambda: None
        return LinkTimes(warm, cold)

    def op_s(self) -> float:
        """Seconds of the op alone of a saving link, without autograd."""
        op, tensor = torch.ops.aten.sin.default, self.tensor.detach()

        def chain() -> None:
            for _ in range(LINKS):
                op(tensor)

        return _quartile(seconds_of(chain, _ROUNDS, self.device)) / LINKS

    def _pause(self) -> None:
        start = time.perf_counter()
        self._between()
        self._not_counted_s += time.perf_counter() - start

    def _seconds(self, runs: Mapping[str, Run], rounds: int = _ROUNDS) -> Seconds:
        now = device_for(self.device).now

        def taken(run: Run) -> tuple[float, float]:
            self._not_counted_s = 0.0
            start = now()
            loss = run().sum()
            middle = now()
            torch.autograd.grad(loss, self.tensor)
            return middle - start - self._not_counted_s, now() - middle

        return in_turn({name: functools.partial(taken, run) for name, run in runs.items()}, rounds)


@dataclass(frozen=True)
class LinkTimes:
    """Times of runs.

    Args:
        warm: with nothing between their ops.
        cold: the runs of `pairs`, with `bytes_between` read before each forward op.
    """

    warm: Seconds
    cold: Seconds

    @functools.cached_property
    def _quartiles(self) -> dict[str, float]:
        """Lower quartile of forward plus that of backward, since noise only adds."""
        return {
            name: sum(_quartile(part) for part in zip(*rounds, strict=True))
            for name, rounds in self.warm.items()
        }

    def extra(self, name: str, base: str) -> float:
        """Extra seconds of a run over another one, at least 0."""
        return max(0.0, self._quartiles[name] - self._quartiles[base])

    def slower(self, *pairs: Pair) -> float:
        """Slowdown of some bookkeeping between ops that fill the caches, at least 1.

        Forward only: nothing can be inserted between the ops of a backward. Pairs are summed, because each difference
        alone is small. Medians over the rounds, because the part of the interpreter that stays cached varies from op to
        op.
        """

        def extra(seconds: Seconds, round_: int) -> float:
            return sum(seconds[name][round_][0] - seconds[base][round_][0] for name, base in pairs)

        warm_s, cold_s = (
            statistics.median(extra(seconds, round_) for round_ in range(len(seconds[pairs[0][0]])))
            for seconds in (self.warm, self.cold)
        )
        return min(max(1.0, cold_s / warm_s), _MOST_SLOWER) if warm_s > 0 else 1.0


def evicting(n_bytes: int) -> Callable[[], None]:
    """A matrix product that reads `n_bytes`, of different memory each time, unseen by engines."""
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
