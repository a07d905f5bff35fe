"""Runs modules that were compiled by `module.compile()` or `torch.compile(module)` uncompiled.

The compiler chooses the values that a compiled module saves for backward and the memory of its kernels, and no dispatch
mode sees all of it. So a step is recorded with every module uncompiled, and a plan that names the ops to recompute
needs these ops to run in the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from autoac.step.model import unwrapped
from autoac.step.restore import Restorer
from autoac.torch_private import compiled_attribute, is_compiled_wrapper, put_compiled_back, wrapped_module

_KEY = "_autoac_uncompiled"


class _Compiled:
    """Mark on a module that runs uncompiled, with the attribute to restore.

    A copy has no such attribute, as torch does not copy it either: a copied module is not compiled, and a copied
    wrapper compiles anew, around the regions in it.
    """

    def __init__(self, value: Any = None, plan_id: str = ""):
        self.value = value
        self.plan_id = plan_id

    def __reduce__(self) -> Any:
        return _Compiled, (None, self.plan_id)


def compiled_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The compiled modules by name; the model itself is not looked for inside of a wrapper of it."""
    return {name: module for name, module in model.named_modules() if compiled_attribute(module)}


def to_uncompile(compiled: Iterable[str], regions: Iterable[str], *, eager_only: bool) -> list[str]:
    """Names of the compiled modules that have to run uncompiled for a plan to hold.

    These are the ones inside a region that does not run compiled as a whole: torch's compiler traces a compiled region
    with its policy, but a policy outside of compiled code does not see the ops in it.

    Args:
        compiled: names of all compiled modules.
        regions: names of the regions in which something is recomputed.
        eager_only: return all of them if there is any region: the engine reruns ops one by one, and the bytes must be
            those of the record.
    """
    compiled, regions = list(compiled), list(regions)
    if eager_only:
        return compiled if regions else []
    eager = [region for region in regions if not any(is_inside(region, name) for name in compiled)]
    return [name for name in compiled if any(is_inside(name, region) for region in eager)]


def is_inside(name: str, outer: str) -> bool:
    """Whether a module is another one, or inside of it, by their names."""
    return not outer or name == outer or name.startswith(outer + ".")


def uncompile(module: torch.nn.Module, plan_id: str = "") -> None:
    """Make a compiled module run uncompiled, until `recompile`."""
    attribute = compiled_attribute(module)
    assert attribute is not None
    module.__dict__[_KEY] = _Compiled(module.__dict__.pop(attribute), plan_id)
    if is_compiled_wrapper(module):
        module.__dict__["forward"] = wrapped_module(module)


def uncompile_around(model: torch.nn.Module, plan_id: str) -> None:
    """Make the wrappers of `torch.compile` around a model run uncompiled, until `recompile_all`."""
    inner = unwrapped(model)
    while model is not inner:
        if is_compiled_wrapper(model):
            uncompile(model, plan_id)
            model = wrapped_module(model)
        else:
            model = cast("torch.nn.Module", model.module)  # of DDP


@contextlib.contextmanager
def uncompiled_below(model: torch.nn.Module) -> Iterator[None]:
    """Context in which the wrappers of `torch.compile` that other wrappers of a model (DDP) hold run uncompiled."""
    inner = unwrapped(model)
    with Restorer() as restorer:
        while model is not inner:
            model = cast(
                "torch.nn.Module", wrapped_module(model) if is_compiled_wrapper(model) else model.module
            )
            if is_compiled_wrapper(model):
                restorer.later(_recompile_if_uncompiled, model)
                uncompile(model)
        yield


def recompile_all(model: torch.nn.Module, plan_id: str) -> None:
    """Undo `uncompile` on all modules that were uncompiled with this `plan_id`."""
    for module in model.modules():
        if uncompiled_by(module) == plan_id:
            recompile(module)


def recompile(module: torch.nn.Module) -> None:
    """Undo `uncompile`, unless the module was compiled anew since."""
    carried: _Compiled = module.__dict__[_KEY]
    if carried.value is not None:
        if is_compiled_wrapper(module):
            module.__dict__["forward"] = carried.value
        else:
            put_compiled_back(module, carried.value)
    del module.__dict__[_KEY]  # last: until then, this can be called again


def uncompiled_by(module: torch.nn.Module) -> str | None:
    """The `plan_id` with which the module was uncompiled, None if it was not."""
    carried: _Compiled | None = module.__dict__.get(_KEY)
    return None if carried is None else carried.plan_id


@contextlib.contextmanager
def uncompiled(model: torch.nn.Module) -> Iterator[None]:
    """Context in which all modules of the model run uncompiled."""
    with Restorer() as restorer:
        for module in compiled_modules(model).values():
            restorer.later(_recompile_if_uncompiled, module)
            uncompile(module)
        yield


def _recompile_if_uncompiled(module: torch.nn.Module) -> None:
    if uncompiled_by(module) is not None:
        recompile(module)
