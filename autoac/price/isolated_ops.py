"""Times and workspace of ops that were recorded but not run: each distinct op runs on scratch memory here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from autoac.device import device_for
from autoac.ops.info import op_info, tensors_in
from autoac.ops.private_results import REFUSALS, scratch_call, stands_made_up_values
from autoac.ops.signatures import Signature
from autoac.price.meters import OpTime, OpTimer, WorkspaceMeter, spread
from autoac.torch_private import storage_key

LONGEST_S = 0.5
"""An op that is estimated to take longer than this is not run."""

ALL_S = 20.0
"""Limit of the estimated time of all ops together; quick ops come first."""

_RUNS = 4
_EVICTED_BYTES = 2**26


@dataclass
class OnScratch:
    """Measurements by signature; an op without any was not run.

    Args:
        result_bytes: size of each storage that the op made, in order; some kernels take more than the shape says.
        failed: why ops could not be run on scratch memory.
    """

    times: dict[Signature, OpTime] = field(default_factory=dict)
    workspace_bytes: dict[Signature, int] = field(default_factory=dict)
    result_bytes: dict[Signature, list[int]] = field(default_factory=dict)
    failed: dict[Signature, str] = field(default_factory=dict)


def measure_on_scratch(
    signatures: Iterable[Signature],
    estimate_s: Callable[[Signature], float],
    device: torch.device,
    most_bytes: int,
    tell: Callable[[float], None] = lambda _: None,
) -> OnScratch:
    """Measure time and workspace of each distinct op on scratch memory.

    Unless the device is asynchronous, the caches are overwritten before each run: in a step an op's inputs are seldom
    in a cache.

    Args:
        estimate_s: estimates an op's time; ops that are estimated to take too long are left out.
        device: where to run; ops on other devices are left out.
        most_bytes: arguments and workspace of one op may take about this much.
        tell: called with the share that is done.
    """
    found = OnScratch()
    chosen = _affordable(signatures, estimate_s, device, most_bytes)
    # Gradients on, as in forward: oneDNN then makes a workspace for backward.
    with torch.enable_grad(), torch.random.fork_rng(devices=device_for(device).generator_devices()):
        found.workspace_bytes = _workspaces(chosen, found, device, tell)
        _measure_times(chosen, found, device, tell)
    return found


def workspaces_on_scratch(
    signatures: Iterable[Signature],
    estimate_s: Callable[[Signature], float],
    device: torch.device,
    most_bytes: int,
) -> dict[Signature, int]:
    """Workspace bytes by signature, from one run of each distinct op on scratch memory without gradients.

    Ops that are left out or refuse scratch values have no entry. Arguments as for `measure_on_scratch`.
    """
    chosen = _affordable(signatures, estimate_s, device, most_bytes)
    with torch.no_grad(), torch.random.fork_rng(devices=device_for(device).generator_devices()):
        return _workspaces(chosen, OnScratch(), device, lambda _: None)


def _workspaces(
    chosen: list[Signature], found: OnScratch, device: torch.device, tell: Callable[[float], None]
) -> dict[Signature, int]:
    meter = WorkspaceMeter(device)
    with meter.measuring():
        for index, signature in enumerate(chosen):
            tell(index / (2 * len(chosen)))
            with _failures(found, signature):
                args, kwargs = scratch_call(signature)
                result, _ = meter.run(signature.func, op_info(signature.func), args, kwargs)
                found.result_bytes[signature] = _new_bytes(result, (args, kwargs), device)
    return {s: size for s, size in meter.workspace_bytes.items() if s not in found.failed}


def _new_bytes(result: Any, given: Any, device: torch.device) -> list[int]:
    """Sizes of the storages in `result` that are not among those given; 0 for those that are not on the device."""
    old = {storage_key(tensor) for tensor in tensors_in(given)}
    new = {storage_key(tensor): tensor for tensor in tensors_in(result) if tensor.layout is torch.strided}
    return [
        tensor.untyped_storage().nbytes() if tensor.device.type == device.type else 0
        for key, tensor in new.items()
        if key not in old
    ]


def _measure_times(
    chosen: list[Signature], found: OnScratch, device: torch.device, tell: Callable[[float], None]
) -> None:
    timer = OpTimer(device)
    evicted = torch.empty(_EVICTED_BYTES // 4, dtype=torch.float32, device=device)
    for index, signature in enumerate(chosen):
        tell(0.5 + index / (2 * len(chosen)))
        if signature not in found.failed:
            with _failures(found, signature):
                found.times[signature] = _timed(signature, timer, evicted)


def _timed(signature: Signature, timer: OpTimer, evicted: torch.Tensor) -> OpTime:
    args, kwargs = scratch_call(signature)
    samples: list[float] = []
    host_s = 0.0
    if timer.known.asynchronous:
        timer.time(signature.func, args, kwargs, [])  # the first run of a shape may set things up
        host_s = timer.launching_s(signature.func, args, kwargs)
        samples = timer.launched(signature.func, args, kwargs, host_s)
    else:
        for _ in range(_RUNS):
            evicted.add_(1.0)
            timer.time(signature.func, args, kwargs, samples)
        del samples[0]
    samples.sort()
    time_s = samples[len(samples) // 2]
    return OpTime(time_s, spread(samples), time_s, host_s=host_s)


def _affordable(
    signatures: Iterable[Signature],
    estimate_s: Callable[[Signature], float],
    device: torch.device,
    most_bytes: int,
) -> list[Signature]:
    ordered = sorted(((estimate_s(s), i, s) for i, s in enumerate(dict.fromkeys(signatures))))
    chosen, left_s = [], ALL_S
    for seconds, _, signature in ordered:
        left_s -= seconds * (_RUNS + 1)
        here = all(spec.device.type == device.type for spec in signature.tensors)
        fits = signature.fits_in(most_bytes)
        if seconds < LONGEST_S and left_s > 0 and here and fits and stands_made_up_values(signature.func):
            chosen.append(signature)
    return chosen


@contextlib.contextmanager
def _failures(found: OnScratch, signature: Signature) -> Any:
    """Context: note an op that refuses scratch values; it is estimated instead."""
    try:
        yield
    except REFUSALS as error:
        found.failed[signature] = f"{type(error).__name__}: {error}".split("\n")[0]
