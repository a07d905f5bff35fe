"""Make a `Profile`: a warm-up step that measures workspace, then the recorded step that measures times."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from autoac.compat import is_compiled_wrapper, storage_key
from autoac.costs import engine_costs
from autoac.engine.attach import planned
from autoac.regions import lean_modules
from autoac.tape import Instrumented, Tape
from autoac.timing import OpTimer, WorkspaceMeter
from autoac.untouched import tensors_of, untouched
from autoac_solver.errors import ProfilingError
from autoac_solver.profile import Profile

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""


def record(
    model: torch.nn.Module,
    sample: Any,
    step: Callable[[], torch.Tensor | None],
    progress: Progress | None = None,
) -> Profile:
    """Run two steps and record the second one; the model and the sample are left as they were.

    Args:
        step: runs one whole step of the model on the sample.

    Raises:
        ProfilingError: the model is planned already, has no parameters that need a gradient, or the step runs no
            backward.
    """
    check_model(model)
    device = device_of(model)
    tell = progress or (lambda *_: None)
    fixed = [*model.parameters(), *model.buffers(), *tensors_of(sample if not callable(sample) else ())]
    with untouched(model, sample if not callable(sample) else ()):
        tell("warm-up step", 0.0)
        meter = WorkspaceMeter()
        if device.type == "cpu":
            with meter.measuring():
                _run(model, step, Tape(device, meter), fixed)
        else:
            _run(model, step, Tape(device, meter), fixed)
        for parameter in model.parameters():
            parameter.grad = None
        tell("recorded step", 0.3)
        tape = Tape(device, OpTimer(device))
        start = time.perf_counter()
        tables = _run(model, step, tape, fixed, meter.workspace_bytes, model_names=True)
        elapsed = time.perf_counter() - start
    tell("engine costs", 0.95)
    if not any(op.backward for op in tables["tape"]):
        raise ProfilingError(
            "the recorded step ran no backward: does the callable sample run forward, loss and backward of this model, "
            "with gradients on?"
        )
    if not tables["calls"]:
        raise ProfilingError(
            "the recorded step called no module of this model: does the callable sample train another one? (Modules of "
            "TorchScript are not seen.)"
        )
    return Profile(
        model=type(model).__name__,
        model_fingerprint=model_fingerprint(model),
        device=str(device),
        device_bytes=device_bytes(device),
        torch_version=torch.__version__,
        costs=engine_costs(device),
        measured_step_s=elapsed,
        **tables,
    )


def _run(
    model: torch.nn.Module,
    step: Callable[[], Any],
    tape: Tape,
    fixed: list[torch.Tensor],
    workspace: dict[Any, int] | None = None,
    model_names: bool = False,
) -> dict[str, Any]:
    for tensor in fixed:
        tape.storage_id(tensor)
    try:
        with (
            Instrumented(model, tape, lean_modules(model)),
            torch.autograd.graph.saved_tensors_hooks(tape.pack, tape.unpack),
            tape,
        ):
            step()
        return tape.finish(_names(model) if model_names else {}, workspace or {})
    finally:
        tape.restore()


def _names(model: torch.nn.Module) -> dict[int, tuple[str, str]]:
    """Kind and name of the storages that belong to the model, by key."""
    names: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            names.setdefault(storage_key(parameter.grad), ("Gradient", name))
        names.setdefault(storage_key(parameter), ("Parameter", name))
    for name, buffer in model.named_buffers():
        names.setdefault(storage_key(buffer), ("Buffer", name))
    return names


def check_model(model: torch.nn.Module) -> None:
    """Refuse what cannot be profiled, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise ProfilingError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    if any(planned(module) for module in model.modules()):
        raise ProfilingError(
            "this model has a plan applied: call plan.remove(model) before profiling it again."
        )
    if any(isinstance(p, torch.nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise ProfilingError("this model has lazy parameters that are not initialised: run it once first.")
    if not any(p.requires_grad for p in model.parameters()):
        raise ProfilingError(
            "no parameter of this model requires grad, so a training step has nothing to do."
        )
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ProfilingError(
            f"the model's parameters are on {sorted(map(str, devices))}; one device is supported."
        )


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module itself where `torch.compile` returned a wrapper of it."""
    return model._orig_mod if is_compiled_wrapper(model) else model  # type: ignore[return-value]


def device_of(model: torch.nn.Module) -> torch.device:
    """The device of the model's trained parameters."""
    return next(p.device for p in model.parameters() if p.requires_grad)


def device_bytes(device: torch.device) -> int:
    """The device's total memory in bytes, 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def model_fingerprint(model: torch.nn.Module) -> str:
    """Tells this model's structure from others: names and classes of modules, shapes and types of parameters."""
    lines = [f"{name}:{type(module).__name__}" for name, module in model.named_modules()]
    lines += [f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
