"""Measures the engines' bookkeeping costs and a device's rates on this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from autoac.device import device_for
from autoac.execute.chains import Chains
from autoac.execute.engines import ENGINES
from autoac.measure import seconds_of
from autoac.step.autocast import autocast_off
from autoac_solver.records.devices import DeviceTable
from autoac_solver.records.profile import EngineCosts

_LEAST_BETWEEN_BYTES = 2**18
MOST_BETWEEN_BYTES = 2**24
"""Limits of the bytes between two ops: fewer leave the interpreter in the cache, more would take seconds to measure."""
_LONG_S = 0.01
"""A larger product is not tried if one takes so long: in half precision it would take seconds on many CPUs."""
_AROUND = 4
"""Bytes between two ops, as a multiple of what an op reads and writes.

In a real step more than one op goes through the caches before the same bookkeeping code runs again. With plans that
wrap and record nothing it took 21 us between ops of 4 MB (T5) and 36 us between ops of 14 MB (GPT); chains between
products that read as much took 8 and 25 us.
"""


def engine_costs(device: torch.device, bytes_between: int = 0) -> EngineCosts:
    """The engines' own costs on this device, seconds.

    Args:
        bytes_between: bytes that an op of the model reads and writes, see `Chains`.
    """
    between = min(_AROUND * bytes_between, MOST_BETWEEN_BYTES)
    if not device_for(device).on_hosts_processors or between < _LEAST_BETWEEN_BYTES:
        between = 0
    else:
        between = 2 ** round(math.log2(between))
    costs = {name: dataclasses.asdict(_costs_of(name, device, between)) for name in ENGINES}
    return {name: parts for name, parts in costs.items() if parts}


@functools.cache
def _costs_of(engine: str, device: torch.device, bytes_between: int) -> Any:
    """Costs measured once per process, of the type that the engine's model defines."""
    # In a loop within one autocast, a chain of engine sac would clear the cached casts, which the loop goes on with.
    with autocast_off():
        return ENGINES[engine].measure(Chains(device, bytes_between))


@functools.cache
def device_rates(device: torch.device) -> DeviceTable:
    """Rates of this device for ops that are not run; measured once per process, in about a second."""
    rates: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rates[str(dtype).removeprefix("torch.")] = _matrix_flops(dtype, device)
    rates[""] = rates["float32"]
    block = torch.ones(2**25, device=device)
    copy = torch.empty_like(block)  # not a new one per run: the system maps new pages slowly
    tiny = torch.ones(1, device=device)
    bandwidth = 2 * block.nbytes / _least_seconds(functools.partial(torch.neg, block, out=copy), device)
    return DeviceTable(
        name=device.type,
        kind=device.type,
        title=str(device),
        memory_bytes=1,
        block_bytes=device_for(device).block_bytes,
        matrix_flops=rates,
        bandwidth=bandwidth,
        launch_s=_least_seconds(functools.partial(torch.neg, tiny), device),
        efficiency=(1.0, 1.0),
        source="measured",
        made={"torch": torch.__version__},
    )


def _matrix_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product: a large one, but for types that a processor has no instructions for."""
    rate = 0.0
    for size in (2**8, 2**10) if device_for(device).on_hosts_processors else (2**13,):
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        seconds = _least_seconds(functools.partial(torch.mm, left, right), device)
        rate = 2 * size**3 / seconds
        if seconds > _LONG_S:
            break
    return rate


def _least_seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    return min(seconds_of(run, 4, device)[1:])  # the first run may set things up
