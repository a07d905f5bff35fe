"""The engine that "auto" stands for, and the reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoac.device import device_for
from autoac.execute.engines import default_engine
from autoac.step.model import device_of, runs_compiled, unwrapped
from autoac.step.uncompiled import compiled_modules
from autoac.torch_private import compiled_attribute, has_own_compile_settings, is_compiled_by_inductor
from autoac_solver.build.engines import engine_model
from autoac_solver.records.engines import COMPILE


def engine_for(model: torch.nn.Module, engine: str) -> tuple[str, str]:
    """The engine for a step that was recorded without compiling anything, and the reason for it."""
    if engine != "auto":
        return engine, "asked for"
    if runs_compiled(model) or _compiled(model):
        return default_engine(compiled=True), "auto: the model is compiled"
    return default_engine(compiled=False), "auto: eager mode"


def engine_to_plan_with(model: torch.nn.Module, engine: str, asked: Mapping[str, str]) -> tuple[str, str]:
    """The engine for a step that is recorded next, and the reason for it.

    A model counts as compiled if it is compiled itself, or if most of its parameters are in compiled modules.

    Args:
        asked: arguments that not every engine supports, as from `asked_for`.

    Raises:
        RuntimeError: the torch of this process cannot run that engine.
    """
    compiled = _compiled(model)
    if engine != "auto" or not compiled:
        return engine_for(model, engine)
    unsupported = engine_model(COMPILE).unsupported
    against = next((written for name, written in asked.items() if name in unsupported), "")
    if not all(map(is_compiled_by_inductor, compiled)):
        against = against or "code of another compiler than inductor, or compiled with fullgraph=True"
    elif any(map(has_own_compile_settings, compiled)):
        against = against or "settings of your own (mode=, options=)"
    elif not device_for(device_of(unwrapped(model))).known:
        against = against or f"{device_of(unwrapped(model)).type} by itself yet: ask for it to have it"
    if not against:
        return COMPILE, "auto: the model is compiled"
    otherwise, _ = engine_for(model, engine)
    return otherwise, f"auto: the model is compiled, and engine compile is not for {against}"


def _compiled(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The compiled modules, if the model is one of them or most of its parameters are in them."""
    if compiled_attribute(model) is not None:
        return [model]
    found = list(compiled_modules(model).values())
    inside = {p for module in found for p in module.parameters()}
    return found if 2 * sum(p.numel() for p in inside) > sum(p.numel() for p in model.parameters()) else []
