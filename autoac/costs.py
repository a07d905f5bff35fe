"""What the engines' bookkeeping costs on this machine, measured on chains of tiny ops.

The plan pays for the dispatch mode and the hooks of a wrapped region whatever it decides there, and for each op that it
records. Where ops are short this is what decides whether a region is worth wrapping.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from autoac.compat import disable_dispatch_modes
from autoac.engine import replay, sac
from autoac.engine.attach import attach_pausing
from autoac.engine.program import Program
from autoac_solver.devices import DeviceTable
from autoac_solver.pauses import Pause
from autoac_solver.profile import EngineCosts

_OPS = 24
_ROUNDS = 11
_LEAST_BETWEEN_BYTES = 2**18
MOST_BETWEEN_BYTES = 2**24
"""Less between two ops leaves the interpreter in the cache; more would take seconds to measure."""
_AROUND = 4
"""In a real step more than the op goes through the caches before the same bookkeeping comes again. With plans that wrap
and record nothing it took 21 us between ops of 4 MB (T5), and 36 us between ops of 14 MB (GPT), where chains between
products that read as much took 8 and 25 us."""
_POOL_BYTES = 2**25
"""What is read between ops comes from so much, as that of a model does: the same 4 MB stay in a large cache."""

_MOST_SLOWER = 12.0
"""Twice what was seen; more is noise."""

_PAIRS = {
    "replay": [("replay not saving", "not saving"), ("replay saving", "saving")],
    "sac": [("sac not saving", "not saving"), ("sac saving", "saving")],
    "replay_record": [("replay all", "replay saving")],
}
"""By engine, and for what has a factor of its own by its name: runs with the bookkeeping, and the same without."""

Seconds = dict[str, list[tuple[float, float]]]
"""Of forward and backward in each round, by name of a run."""


def engine_costs(device: torch.device, bytes_between: int = 0) -> EngineCosts:
    """The engines' own costs on this device, seconds.

    Args:
        bytes_between: what an op of the model reads and writes. On CPU the ops share the caches with the interpreter:
            between ops of some MB its bookkeeping takes several times as long as between tiny ones.
    """
    between = min(_AROUND * bytes_between, MOST_BETWEEN_BYTES)
    if device.type != "cpu" or between < _LEAST_BETWEEN_BYTES:
        return _engine_costs(device, 0)
    return _engine_costs(device, 2 ** round(math.log2(between)))


@functools.cache
def _engine_costs(device: torch.device, bytes_between: int) -> EngineCosts:
    samples = _warm_seconds(device)
    # The lower quartile, since noise only ever adds.
    seconds = {
        name: tuple(_quartile(part) for part in zip(*runs, strict=True)) for name, runs in samples.items()
    }

    def extra(name: str, base: str) -> float:
        return max(0.0, sum(seconds[name]) - sum(seconds[base]))

    slower = dict.fromkeys(_PAIRS, 1.0)
    if bytes_between:
        names = {name for pairs in _PAIRS.values() for pair in pairs for name in pair}
        between = _seconds(device, _evicting(bytes_between), names)
        slower = {part: _slower(pairs, samples, between) for part, pairs in _PAIRS.items()}
    # A link of the chains is an op and a view.
    replay_op = extra("replay not saving", "not saving") / (2 * _OPS)
    sac_op = extra("sac not saving", "not saving") / (2 * _OPS)
    warm = EngineCosts(
        replay_op=replay_op,
        replay_record=max(0.0, extra("replay all", "replay saving") / _OPS - _op_seconds(device)),
        replay_saved=max(0.0, extra("replay saving", "saving") / _OPS - 2 * replay_op),
        replay_call=extra("replay once", "once"),
        replay_pause=max(0.0, extra("replay paused", "modules") - extra("replay once", "once")) / _OPS,
        sac_op=sac_op,
        sac_saved=max(0.0, extra("sac saving", "saving") / _OPS - 2 * sac_op),
        sac_call=extra("sac once", "once"),
    )
    costs = dataclasses.asdict(warm).items()
    return EngineCosts(**{n: slower.get(n, slower[n.split("_")[0]]) * cost for n, cost in costs})


def _slower(pairs: Sequence[tuple[str, str]], warm: Seconds, cold: Seconds) -> float:
    """How many times as long a part of the bookkeeping takes between ops that fill the caches.

    Of forward: nothing can be put between the ops of a backward. Pairs count together, for each by itself is a small
    difference. The median of the rounds: what the caches have kept of the interpreter differs from op to op.

    Args:
        pairs: runs with that part, and the same without.
    """

    def extra(seconds: Seconds, round_: int) -> float:
        return sum(seconds[name][round_][0] - seconds[base][round_][0] for name, base in pairs)

    rounds = len(warm[pairs[0][0]])
    warm_s, cold_s = (statistics.median(extra(s, i) for i in range(rounds)) for s in (warm, cold))
    return min(max(1.0, cold_s / warm_s), _MOST_SLOWER) if warm_s > 0 else 1.0


@functools.cache
def _warm_seconds(device: torch.device) -> Seconds:
    return _seconds(device, lambda: None)


def _evicting(n_bytes: int) -> Callable[[], None]:
    """A matrix product that reads so many bytes, others each time, and that no engine sees."""
    size = math.isqrt(n_bytes // 4)
    left, out = (torch.ones(16, size, dtype=torch.float32, device="cpu") for _ in range(2))
    pool = torch.ones(max(1, _POOL_BYTES // n_bytes), size, size, dtype=torch.float32, device="cpu")
    rights = itertools.cycle(pool.unbind())

    def evict() -> None:
        with torch.no_grad(), disable_dispatch_modes():
            torch.mm(left, next(rights), out=out)

    return evict


def _seconds(
    device: torch.device, between: Callable[[], None], names: Collection[str] | None = None
) -> Seconds:
    """What chains of tiny ops take without and with the engines.

    Args:
        between: done before each op of forward; its own time does not count, of which the noise is larger than what is
            measured here.
        names: of the chains; None for all.
    """
    not_counted_s = 0.0

    def pause() -> None:
        nonlocal not_counted_s
        start = time.perf_counter()
        between()
        not_counted_s += time.perf_counter() - start

    tensor = torch.ones(4, device=device, requires_grad=True)
    sin, add = "aten.sin.default", "aten.add.Tensor"  # one saves its input for backward, the other nothing

    def saving(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            pause()
            x = torch.sin(x).view(4)
        return x

    def not_saving(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            pause()
            x = (x + x).view(4)
        return torch.sin(x)  # makes backward come for it, or sac would not run its second time

    def once(x: torch.Tensor) -> torch.Tensor:
        pause()
        return torch.sin(x)

    class Link(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (x + x).view(4)
            pause()
            return x

    plain, pausing = ([Link() for _ in range(_OPS)] for _ in range(2))
    for index, link in enumerate(pausing):
        attach_pausing(link, str(index), "costs")

    def modules(links: list[Link], x: torch.Tensor) -> torch.Tensor:
        for link in links:
            pause()
            x = link(x)
        return torch.sin(x)

    def program(name: str, recompute: bool, count: int = _OPS) -> Program:
        return Program("costs", [(name, recompute)] * count)

    program_saving = program(sin, False)
    program_not_saving = Program("costs", [(add, False)] * _OPS + [(sin, False)])
    pauses = [Pause(str(index), index, index + 1) for index in range(_OPS)]
    program_paused = Program("costs", program_not_saving.names, pauses=pauses)
    program_all, program_once = program(sin, True), program(sin, False, 1)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "saving": lambda: saving(tensor),
        "not saving": lambda: not_saving(tensor),
        "once": lambda: once(tensor),
        "modules": lambda: modules(plain, tensor),
        "replay not saving": lambda: replay.run(program_not_saving, not_saving, (tensor,), {}),
        "replay saving": lambda: replay.run(program_saving, saving, (tensor,), {}),
        "replay all": lambda: replay.run(program_all, saving, (tensor,), {}),
        "replay paused": lambda: replay.run(program_paused, lambda x: modules(pausing, x), (tensor,), {}),
        "replay once": lambda: replay.run(program_once, once, (tensor,), {}),
        "sac not saving": lambda: sac.run(program_not_saving, not_saving, (tensor,), {}),
        "sac saving": lambda: sac.run(program_saving, saving, (tensor,), {}),
        "sac once": lambda: sac.run(program_once, once, (tensor,), {}),
    }
    chosen = {name: run for name, run in runs.items() if names is None or name in names}
    samples: Seconds = {name: [] for name in chosen}
    for _ in range(_ROUNDS):
        for name, run in chosen.items():
            not_counted_s = 0.0
            start = now(device)
            loss = run().sum()
            middle = now(device)
            torch.autograd.grad(loss, tensor)
            samples[name].append((middle - start - not_counted_s, now(device) - middle))
    return samples


def _quartile(samples: Iterable[float]) -> float:
    ordered = sorted(samples)
    return ordered[len(ordered) // 4]


@functools.cache
def device_rates(device: torch.device) -> DeviceTable:
    """Rates of this device, measured once a process in about a second, for ops that are not run."""
    size = 2**10 if device.type == "cpu" else 2**13
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = _least_seconds(functools.partial(torch.mm, left, right), device)
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    rates[""] = rates["float32"]
    block = torch.ones(2**25, device=device)
    copy = torch.empty_like(block)  # not a new one in each run: the system hands out its pages slowly
    tiny = torch.ones(1, device=device)
    bandwidth = 2 * block.nbytes / _least_seconds(functools.partial(torch.neg, block, out=copy), device)
    return DeviceTable(
        name=device.type,
        kind=device.type,
        title=str(device),
        memory_bytes=1,
        block_bytes=512 if device.type == "cuda" else 1,
        matrix_flops=rates,
        bandwidth=bandwidth,
        launch_s=_least_seconds(functools.partial(torch.neg, tiny), device),
        efficiency=(1.0, 1.0),
        source="measured",
        made={"torch": torch.__version__},
    )


def _least_seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    samples = []
    for _ in range(4):
        start = now(device)
        run()
        samples.append(now(device) - start)
    return min(samples[1:])


def _op_seconds(device: torch.device) -> float:
    op, tensor = torch.ops.aten.sin.default, torch.ones(4, device=device)
    samples = []
    for _ in range(_ROUNDS):
        start = now(device)
        for _ in range(_OPS):
            op(tensor)
        samples.append((now(device) - start) / _OPS)
    return _quartile(samples)


def now(device: torch.device) -> float:
    """Seconds by the wall clock, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
