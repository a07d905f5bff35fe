"""Measures one region at one point: bytes that forward keeps, and peak and time of forward and backward.

The region runs in isolation, with its arguments in the user's step. Gradients are computed by `torch.autograd.grad`,
which touches neither the model's own gradients nor hooks on them.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoac.calibrate.compiled.capture import Captured
from autoac.device import device_for
from autoac.execute.compiled.code import compiled, run_module
from autoac.measure import Taken, in_turn, measuring, present_storages, unique_storage_bytes
from autoac.step.restore import tensors_of
from autoac.torch_private import graphs_translated, key_of_storage, storage_ref
from autoac_solver.records.compiled import EAGER, CompiledPoint

_TIME_S = 10.0
"""Seconds for the rounds of all points of a region, without compilation, which takes longer than that."""
_ROUNDS = 5, 30
_SETTLES = 4
"""So many calls may be compiled for; then code is to serve the next ones. The third has changing integers as inputs."""

Run = Callable[..., Any]


def measured_points(
    region: Captured, points: Sequence[str], device: torch.device, tell: Callable[[str], None]
) -> tuple[CompiledPoint, ...]:
    """Compile and measure a region at some points, and measure it uncompiled.

    Args:
        points: names.
        tell: called with the point that is compiled next.

    Returns:
        The measured points in the same order, then `EAGER`. Points that do not fit on the device are left
        out.

    Raises:
        torch.OutOfMemoryError: no compiled one fits.
        RuntimeError: it is compiled anew at every call.
    """
    runs: dict[str, Run] = {}
    too_large = ""
    for name in [*points, EAGER]:
        tell(name)
        tail = bool(region.children)
        run = (
            run_module if name == EAGER else compiled(type(region.module), name, region.described, tail=tail)
        )
        try:
            _forward_and_backward(region, run, device)  # compiles
        except torch.OutOfMemoryError as error:
            too_large = str(error)
        else:
            if not runs and not tail:
                _check_compiled_once(region, run, device)
            runs[name] = run
            continue
        device_for(device).release_cache()
    if not runs.keys() - {EAGER}:
        raise torch.OutOfMemoryError(too_large)
    sizes = {name: _sizes(region, run, device) for name, run in runs.items()}
    once = {
        name: functools.partial(_forward_and_backward, region, run, device, _Launches())
        for name, run in runs.items()
    }
    round_s = sum(sum(run()) for run in once.values())
    rounds = min(max(int(_TIME_S / max(round_s, 1e-9)), _ROUNDS[0]), _ROUNDS[1])
    times = in_turn(once, rounds)
    return tuple(
        CompiledPoint(
            name,
            *sizes[name].bytes,
            forward_s=min(forward for forward, _ in times[name]),
            backward_s=min(backward for _, backward in times[name]),
            holds_output=sizes[name].holds_output,
            holds_inputs=sizes[name].holds_inputs,
        )
        for name in runs
    )


def _check_compiled_once(region: Captured, run: Run, device: torch.device) -> None:
    """Check that compiled code is used again: not so if the module's forward changes what it was compiled for."""
    for _ in range(_SETTLES):
        before = graphs_translated()
        _forward_and_backward(region, run, device)
        if graphs_translated() == before:
            return
    raise RuntimeError("torch compiles it anew at every call, as something in its forward changes each time")


@dataclass
class _Launches:
    """Host seconds of a run's last launches: an asynchronous device is kept busy for longer before the next ones.

    Otherwise kernels that are shorter than their launch would seem to take as long as that.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0


def _forward_and_backward(
    region: Captured, run: Run, device: torch.device, launches: _Launches | None = None
) -> tuple[float, float]:
    """Seconds of one forward and one backward, by the device's own clock."""
    launches = launches or _Launches()
    args, kwargs, results = region.arguments()
    with region.around(results):
        result, forward_s, launches.forward_s = _timed(
            lambda: run(region.module, args, kwargs), device, launches.forward_s
        )
    outputs = _outputs(region, result)
    gradients = [torch.ones_like(output) for output in outputs]
    _, backward_s, launches.backward_s = _timed(
        lambda: _backward(region, outputs, gradients), device, launches.backward_s
    )
    return forward_s, backward_s


def _timed(call: Callable[[], Any], device: torch.device, launching_s: float) -> tuple[Any, float, float]:
    """Result of a call, its seconds by the device's clock, and those of the host until it returned."""
    known = device_for(device)
    if launching_s:
        known.keep_busy(2 * launching_s)

    def timed_by_host() -> tuple[Any, float]:
        start = time.perf_counter()
        return call(), time.perf_counter() - start

    (result, host_s), seconds = known.timed(timed_by_host)
    return result, seconds, host_s


@dataclass(frozen=True)
class _Sizes:
    """See `CompiledPoint`.

    Attributes:
        bytes: its `kept_bytes`, `forward_bytes`, `backward_bytes` and `sole_backward_bytes`.
    """

    bytes: tuple[int, int, int, int]
    holds_output: bool
    holds_inputs: bool


def _sizes(region: Captured, run: Run, device: torch.device) -> _Sizes:
    _forward_and_backward(region, run, device)
    args, kwargs, results = region.arguments()
    with contextlib.ExitStack() as measurement:
        before: list[torch.UntypedStorage] = []
        taken: list[Taken] = []

        def start() -> None:
            # What the module's code did before its tail is on the tape; nothing of it may be freed while this counts.
            before.extend(present_storages(device) if region.children else ())
            taken.append(measurement.enter_context(measuring(device)))

        if not region.children:
            start()
        with region.around(results, start):
            result = run(region.module, args, kwargs)
    [forward] = taken
    made = _made(result, (args, kwargs, results))
    kept = max(0, forward.end_above_start_bytes - unique_storage_bytes(made))
    del result, made
    held, holds_inputs = _held(region, run)
    if region.children:
        kept += held
    backward, sole = (_backward_bytes(region, run, device, is_sole) for is_sole in (False, True))
    return _Sizes((kept, forward.peak_above_start_bytes, backward, sole), held > 0, holds_inputs)


def _held(region: Captured, run: Run) -> tuple[int, bool]:
    """Bytes of the outputs that live as long as the graph behind them, and whether any input does."""
    given = region.arguments(own=True)
    args, kwargs, results = given
    with region.around(results):
        result = run(region.module, args, kwargs)
    outputs = list(tensors_of(result))
    graph = [output.grad_fn for output in outputs]
    made = {key_of_storage(o.untyped_storage()): o for o in _made(outputs, given)}
    refs = [(storage_ref(output), output.untyped_storage().nbytes()) for output in made.values()]
    inputs = [t for t in tensors_of(given) if not isinstance(t, torch.nn.Parameter)]
    of_inputs = [storage_ref(tensor) for tensor in inputs if _is_strided(tensor)]
    holds_inputs = len(of_inputs) < len(inputs)
    del given, args, kwargs, results, result, outputs, made, inputs
    held = sum(nbytes for ref, nbytes in refs if ref() is not None)
    holds_inputs |= any(ref() is not None for ref in of_inputs)
    del graph
    return held, holds_inputs


def _backward_bytes(region: Captured, run: Run, device: torch.device, is_sole: bool) -> int:
    """See `CompiledPoint`.

    Args:
        is_sole: nobody but the code holds its outputs and their gradients.
    """
    args, kwargs, results = region.arguments()
    with measuring(device) as taken:
        with region.around(results):
            result = run(region.module, args, kwargs)
        outputs = _outputs(region, result)
        gradients = [torch.ones_like(output) for output in outputs]
        if is_sole:
            outputs = [_Given.apply(gradients, *outputs)]
            gradients, result = [torch.ones_like(outputs[0])], None
        taken.start_here()
        _backward(region, outputs, gradients)
    return taken.peak_above_start_bytes


class _Given(torch.autograd.Function):
    """A number made of some tensors, of which it holds none, and whose gradients are then nobody's but theirs."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        ctx.gradients.clear()
        return None, *gradients


def _made(values: Any, given: Any) -> list[torch.Tensor]:
    """The strided tensors among some values whose storage is not one of what was given."""
    known = {key_of_storage(t.untyped_storage()) for t in tensors_of(given) if _is_strided(t)}
    return [
        t for t in tensors_of(values) if _is_strided(t) and key_of_storage(t.untyped_storage()) not in known
    ]


def _outputs(region: Captured, result: Any) -> list[torch.Tensor]:
    """The outputs that backward comes from: of a tail the loss alone, as in training loops.

    For its other outputs, compiled code makes gradients of zeros.
    """
    found = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
    losses = [tensor for tensor in found if tensor.dim() == 0]
    return losses if region.children and losses else found


def _backward(region: Captured, outputs: list[torch.Tensor], gradients: list[torch.Tensor]) -> Any:
    """Gradients of all inputs and parameters that need one, all alive at the end of the call."""
    given = [t for t in tensors_of(region.given) if t.requires_grad]
    wanted = [*given, *(p for p in region.module.parameters() if p.requires_grad)]
    unique = list({id(tensor): tensor for tensor in wanted}.values())
    return torch.autograd.grad(outputs, unique, gradients, allow_unused=True)


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided
