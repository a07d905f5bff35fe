"""What the engines' bookkeeping costs on this machine, measured once a process on chains of tiny ops.

The plan pays for the dispatch mode and the hooks of a wrapped region whatever it decides there, and for each op that it
records. Where ops are short this is what decides whether a region is worth wrapping.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from autoac.engine import replay, sac
from autoac.engine.program import Program
from autoac_solver.devices import DeviceTable
from autoac_solver.profile import EngineCosts

_OPS = 48
_ROUNDS = 11


@functools.cache
def engine_costs(device: torch.device) -> EngineCosts:
    """The engines' own costs on this device, seconds."""
    tensor = torch.ones(4, device=device, requires_grad=True)
    ops = range(_OPS)
    sin, add = "aten.sin.default", "aten.add.Tensor"  # one saves its input for backward, the other nothing

    def saving(x: torch.Tensor) -> torch.Tensor:
        for _ in ops:
            x = torch.sin(x)
        return x

    def not_saving(x: torch.Tensor) -> torch.Tensor:
        for _ in ops:
            x = x + x
        return torch.sin(x)  # makes backward come for it, or sac would not run its second time

    def once(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    def program(name: str, recompute: bool, count: int = _OPS) -> Program:
        return Program("costs", [(name, recompute)] * count)

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
    program_saving = program(sin, False)
    program_not_saving = Program("costs", [(add, False)] * _OPS + [(sin, False)])
    program_all, program_once = program(sin, True), program(sin, False, 1)
    seconds = _interleaved(runs, tensor, device)
    op_s = _op_seconds(tensor, device)

    def extra(name: str, base: str) -> float:
        return max(0.0, seconds[name] - seconds[base])

    replay_op = extra("replay not saving", "not saving") / _OPS
    sac_op = extra("sac not saving", "not saving") / _OPS
    return EngineCosts(
        replay_op=replay_op,
        replay_record=max(0.0, extra("replay all", "replay saving") / _OPS - op_s),
        replay_saved=max(0.0, extra("replay saving", "saving") / _OPS - replay_op),
        replay_call=extra("replay once", "once"),
        sac_op=sac_op,
        sac_saved=max(0.0, extra("sac saving", "saving") / _OPS - sac_op),
        sac_call=extra("sac once", "once"),
    )


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


def _interleaved(
    runs: dict[str, Callable[[], torch.Tensor]], tensor: torch.Tensor, device: torch.device
) -> dict[str, float]:
    """Seconds of forward and backward of each; the lower quartile of rounds, since noise only ever adds."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            start = _now(device)
            torch.autograd.grad(run().sum(), tensor)
            samples[name].append(_now(device) - start)
    return {name: sorted(values)[len(values) // 4] for name, values in samples.items()}


def _op_seconds(tensor: torch.Tensor, device: torch.device) -> float:
    op, detached = torch.ops.aten.sin.default, tensor.detach()
    samples = []
    for _ in range(_ROUNDS):
        start = _now(device)
        for _ in range(_OPS):
            op(detached)
        samples.append((_now(device) - start) / _OPS)
    return sorted(samples)[len(samples) // 4]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
