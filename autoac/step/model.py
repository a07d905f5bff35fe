"""Checks and properties of the user's model: whether it can be profiled, its device, its fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import cast

import torch
from torch.nn.parameter import is_lazy

from autoac.device import device_for
from autoac.step.carried import planned
from autoac.step.units import own_name
from autoac.torch_private import (
    compiled_attribute,
    counts_backwards,
    ddp_around,
    has_process_group,
    holds_unreduced_gradients,
    is_compiled_wrapper,
    is_ddp,
    is_fsdp1,
    is_unit,
    local_part,
    used_on,
    wrapped_module,
)
from autoac_solver.records.errors import ProfilingError


def check_model(model: torch.nn.Module) -> None:
    """Refuse a model that cannot be profiled, before anything runs."""
    if not isinstance(model, torch.nn.Module):
        raise ProfilingError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
    for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers()):
        if not is_unicode(name):
            raise ProfilingError(
                f"the name {name!r} in this model is no text (half of a surrogate pair): rename it."
            )
    if any(planned(module) for module in model.modules()):
        raise ProfilingError(
            "this model has a plan applied: call plan.remove(model) before profiling it again (or remove() on the "
            "handle of autoac.auto, if that has put it on)."
        )
    if any(map(is_fsdp1, model.modules())):
        raise ProfilingError(
            "this model is sharded by FullyShardedDataParallel (FSDP1), whose flat parameters are not planned for: "
            "shard it with torch.distributed.fsdp.fully_shard (FSDP2; fsdp_version: 2 in accelerate and Trainer)."
        )
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise ProfilingError(
            "this model has lazy parameters or buffers that are not initialised: run it once first."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ProfilingError(
            "no parameter of this model requires grad, so a training step has nothing to do. If its layers call "
            "modules outside of it that train (adapters that replace forwards), give one that holds both and calls it."
        )
    devices = {used_on(p) for p in model.parameters() if p.requires_grad}
    if len(devices) > 1:
        raise ProfilingError(
            f"the model's parameters are on {sorted(map(str, devices))}; one device is supported."
        )


def is_unicode(name: str) -> bool:
    """Whether a text can be encoded; one with a lone surrogate can be neither hashed, printed nor saved."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_gradients(model: torch.nn.Module) -> bool:
    """Whether any trained parameter has a gradient, or a unit of FSDP2 has one that it has not reduced."""
    if any(p.requires_grad and gradient_of(p) is not None for p in model.parameters()):
        return True
    return _has_unreduced_gradients(model)


def _has_unreduced_gradients(model: torch.nn.Module) -> bool:
    units = (module for module in model.modules() if is_unit(module)) if has_process_group() else ()
    return any(map(holds_unreduced_gradients, units))


def number_of_gradients(model: torch.nn.Module) -> int:
    """The number of trained parameters that have a gradient."""
    return sum(p.requires_grad and gradient_of(p) is not None for p in model.parameters())


@dataclass(frozen=True, slots=True)
class Trained:
    """The parameters that require grad.

    Args:
        elements, bytes: of all of them; of a sharded one, of its whole. One that FSDP2 has gathered, in a forward, may
            have another dtype.
        which: their places among all parameters.
        of_all: number of all parameters.
        gradient_bytes: of their gradients on this rank, on the device that they are used on. A sparse gradient counts
            as if it were dense.
    """

    elements: int = 0
    bytes: int = 0
    which: frozenset[int] = frozenset()
    of_all: int = 0
    gradient_bytes: int = 0


def trained_parameters(model: torch.nn.Module) -> Trained:
    """The parameters that require grad, from one walk over the model, which every call of a planned model makes."""
    elements = n_bytes = gradient_bytes = of_all = 0
    which = []
    for place, parameter in enumerate(model.parameters()):
        of_all += 1
        if parameter.requires_grad:
            size = parameter.numel()
            elements += size
            n_bytes += size * parameter.element_size()
            which.append(place)
            if (gradient := gradient_of(parameter)) is not None:
                part = local_part(gradient)
                if part.device.type == used_on(parameter).type:
                    gradient_bytes += part.numel() * part.element_size()
    return Trained(elements, n_bytes, frozenset(which), of_all, gradient_bytes)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """A parameter's gradient; those of `torch.func.functional_call` are no leaves and have none."""
    return parameter.grad if parameter.is_leaf else None


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside the wrappers of `torch.compile` and `DistributedDataParallel`."""
    while True:
        if is_compiled_wrapper(model):
            model = wrapped_module(model)
        elif is_ddp(model):
            model = cast("torch.nn.Module", model.module)
        else:
            return model


def own_checkpointing(model: torch.nn.Module) -> tuple[str, str]:
    """The name of a transformers or diffusers model's own checkpointing, and the method that turns it off, by its path.

    Such as "gradient_checkpointing" and "unet.disable_gradient_checkpointing" for a part of the model; two "" if it is
    not on.
    """
    for fqn, module in model.named_modules():
        # Before transformers 5.23 there is only the second name; later versions warn about it.
        new = hasattr(type(module), "is_activation_checkpointing") or hasattr(
            module, "activation_checkpointing_disable"
        )
        name = "activation_checkpointing" if new else "gradient_checkpointing"
        if getattr(module, f"is_{name}", False):
            for method in (f"{name}_disable", f"disable_{name}"):
                if hasattr(module, method):
                    return name, f"{fqn}.{method}" if fqn else method
    return "", ""


def checkpointing_switches(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules whose `gradient_checkpointing` says whether a model's own checkpointing is on there.

    Source: `_set_gradient_checkpointing` in transformers/modeling_utils.py and diffusers/models/modeling_utils.py.
    """
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


def runs_compiled(model: torch.nn.Module) -> bool:
    """Whether the model is compiled as a whole, inside or outside of `DistributedDataParallel`."""
    while compiled_attribute(model) is None:
        if not is_ddp(model):
            return False
        model = cast("torch.nn.Module", model.module)
    return True


def check_backwards_may_run(model: torch.nn.Module) -> None:
    """Refuse a model that steps of ours would disturb in a way that is not put back, before any of them runs.

    Raises:
        ProfilingError: it is in a `DistributedDataParallel` with a static graph that has seen no backward yet, or units
            of FSDP2 have gradients that they have not reduced.
    """
    if _has_unreduced_gradients(model):
        raise ProfilingError(
            "units of FSDP2 in this model have gradients that they have not reduced, after a backward without "
            "gradient synchronisation: a recorded step would add to them and reduce them. Plan before the first "
            "micro-batch of a step. Nothing was run."
        )
    ddp = ddp_around(model)
    if ddp is not None and counts_backwards(ddp):
        raise ProfilingError(
            "this model is in a DistributedDataParallel with static_graph=True that has not seen its first backward: "
            "it would take those of the recorded steps for it, and then never reduce gradients as it should. Plan "
            "before wrapping (plan, plan.apply(model), DistributedDataParallel(model, static_graph=True)), or after "
            "the first training step. Nothing was run."
        )


def device_of(model: torch.nn.Module) -> torch.device:
    """The device that the model's trained parameters are used on."""
    return next(used_on(p) for p in model.parameters() if p.requires_grad)


def device_bytes(device: torch.device) -> int:
    """The device's total memory in bytes, 0 if unknown."""
    return device_for(device).total_bytes()


def free_bytes(device: torch.device) -> int:
    """The device's free memory in bytes; its total where the system does not report it, as on macOS."""
    return device_for(device).free_bytes()


def model_fingerprint(model: torch.nn.Module) -> str:
    """Hash of the model's structure: names and classes of modules; shapes, dtypes and `requires_grad` of parameters."""
    lines = [f"{name}:{own_name(module)}" for name, module in model.named_modules()]
    lines += [f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
