"""What the engines' bookkeeping costs on this machine, measured on chains of tiny ops.

The plan pays for the dispatch mode and the hooks of a wrapped region whatever it decides there, and for each op that it
records. Where ops are short this is what decides whether a region is worth wrapping.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable

import torch

from autoac.compat import disable_dispatch_modes
from autoac.engine import replay, sac
from autoac.engine.program import Program
from autoac_solver.devices import DeviceTable
from autoac_solver.profile import EngineCosts

_OPS = 24
_ROUNDS = 11
_LEAST_BETWEEN_BYTES = 2**18
MOST_BETWEEN_BYTES = 2**22
"""Less between two ops leaves the interpreter in the cache; more makes no difference any more."""

_MOST_SLOWER = 12.0
"""Twice what was seen; more is noise."""

Seconds = dict[str, tuple[float, float]]
"""Of forward and backward, by name of a run."""


def engine_costs(device: torch.device, bytes_between: int = 0) -> EngineCosts:
    """The engines' own costs on this device, seconds.

    Args:
        bytes_between: what an op of the model reads and writes. On CPU the ops share the caches with the interpreter:
            between ops of some MB its bookkeeping takes several times as long as between tiny ones.
    """
    between = min(bytes_between, MOST_BETWEEN_BYTES)
    if device.type != "cpu" or between < _LEAST_BETWEEN_BYTES:
        return _engine_costs(device, 0)
    return _engine_costs(device, 2 ** round(math.log2(between)))


@functools.cache
def _engine_costs(device: torch.device, bytes_between: int) -> EngineCosts:
    warm = _warm_seconds(device)
    cold = _seconds(device, _evicting(bytes_between)) if bytes_between else warm

    def extra(name: str, base: str, seconds: Seconds, phase: int) -> float:
        return max(0.0, seconds[name][phase] - seconds[base][phase])

    def forward(name: str, base: str) -> float:
        return extra(name, base, cold, 0)

    # Nothing can be put between the ops of a backward: it is taken to slow down as forward does.
    warm_s = extra("replay not saving", "not saving", warm, 0)
    slower = (
        min(max(1.0, forward("replay not saving", "not saving") / warm_s), _MOST_SLOWER) if warm_s else 1.0
    )

    def whole(name: str, base: str) -> float:
        return forward(name, base) + slower * extra(name, base, warm, 1)

    # A link of the chains is an op and a view.
    replay_op = whole("replay not saving", "not saving") / (2 * _OPS)
    sac_op = whole("sac not saving", "not saving") / (2 * _OPS)
    op_s = _op_seconds(device)
    return EngineCosts(
        replay_op=replay_op,
        replay_record=max(0.0, whole("replay all", "replay saving") / _OPS - slower * op_s),
        replay_saved=max(0.0, whole("replay saving", "saving") / _OPS - 2 * replay_op),
        replay_call=whole("replay once", "once"),
        sac_op=sac_op,
        sac_saved=max(0.0, whole("sac saving", "saving") / _OPS - 2 * sac_op),
        sac_call=whole("sac once", "once"),
    )


@functools.cache
def _warm_seconds(device: torch.device) -> Seconds:
    return _seconds(device, lambda: None)


def _evicting(n_bytes: int) -> Callable[[], None]:
    """A matrix product that reads so many bytes, and that no engine sees."""
    size = math.isqrt(n_bytes // 4)
    left, right, out = (torch.ones(rows, size, dtype=torch.float32, device="cpu") for rows in (16, size, 16))

    def evict() -> None:
        with torch.no_grad(), disable_dispatch_modes():
            torch.mm(left, right, out=out)

    return evict


def _seconds(device: torch.device, between: Callable[[], None]) -> Seconds:
    """What chains of tiny ops take without and with the engines; the lower quartile, since noise only ever adds.

    Args:
        between: done before each op of forward.
    """
    tensor = torch.ones(4, device=device, requires_grad=True)
    sin, add = "aten.sin.default", "aten.add.Tensor"  # one saves its input for backward, the other nothing

    def saving(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            between()
            x = torch.sin(x).view(4)
        return x

    def not_saving(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_OPS):
            between()
            x = (x + x).view(4)
        return torch.sin(x)  # makes backward come for it, or sac would not run its second time

    def once(x: torch.Tensor) -> torch.Tensor:
        between()
        return torch.sin(x)

    def program(name: str, recompute: bool, count: int = _OPS) -> Program:
        return Program("costs", [(name, recompute)] * count)

    program_saving = program(sin, False)
    program_not_saving = Program("costs", [(add, False)] * _OPS + [(sin, False)])
    program_all, program_once = program(sin, True), program(sin, False, 1)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "saving": lambda: saving(tensor),
        "not saving": lambda: not_saving(tensor),
        "once": lambda: once(tensor),
        "replay not saving": lambda: replay.run(program_not_saving, not_saving, (tensor,), {}),
        "replay saving": lambda: replay.run(program_saving, saving, (tensor,), {}),
        "replay all": lambda: replay.run(program_all, saving, (tensor,), {}),
        "replay once": lambda: replay.run(program_once, once, (tensor,), {}),
        "sac not saving": lambda: sac.run(program_not_saving, not_saving, (tensor,), {}),
        "sac saving": lambda: sac.run(program_saving, saving, (tensor,), {}),
        "sac once": lambda: sac.run(program_once, once, (tensor,), {}),
    }
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = _now(device)
            loss = run().sum()
            middle = _now(device)
            torch.autograd.grad(loss, tensor)
            samples[name].append((middle - start, _now(device) - middle))
    return {
        name: (_quartile(f for f, _ in both), _quartile(b for _, b in both)) for name, both in samples.items()
    }


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
        start = _now(device)
        run()
        samples.append(_now(device) - start)
    return min(samples[1:])


def _op_seconds(device: torch.device) -> float:
    op, tensor = torch.ops.aten.sin.default, torch.ones(4, device=device)
    samples = []
    for _ in range(_ROUNDS):
        start = _now(device)
        for _ in range(_OPS):
            op(tensor)
        samples.append((_now(device) - start) / _OPS)
    return _quartile(samples)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
