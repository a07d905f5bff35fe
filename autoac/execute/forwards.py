"""Replace a module's `forward` by one of ours, and get the original back.

A planned module gets an instance attribute `forward`; parameters, buffers, hooks and `state_dict` stay as they are.
It is a `functools.partial`, which survives `copy.deepcopy` (a closure would make the copy share the original's
weights) and pickling (a `types.MethodType` is pickled by the function's name, and comes back as another function). A
shallow copy (`copy.copy`, the replicas of `nn.DataParallel`) has the very same partial: see `called_module`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from autoac.step.carried import REGION_KEY

_OURS: set[Callable[..., Any]] = set()


def planned_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for the functions that `put_forward` makes forwards; a model that was unpickled has them, too."""
    _OURS.add(function)
    return function


class Carried(Protocol):
    """Record stored on a module whose forward was replaced.

    Attributes:
        forward: the instance's own attribute `forward` if it had one (some libraries put theirs there), else None.
        plan_id: identifies the plan.
    """

    forward: Any
    plan_id: str


def put_forward(
    module: torch.nn.Module, function: Callable[..., Any], carried: Carried, key: str = REGION_KEY
) -> None:
    """Make `function(module, ...)` the module's forward."""
    bound = functools.partial(function, module)
    # For `inspect.signature`: transformers' Trainer asks a model's forward which columns of the data it takes.
    bound.__wrapped__ = carried.forward or types.MethodType(type(module).forward, module)  # type: ignore[attr-defined]
    module.__dict__[key] = carried
    module.__dict__["forward"] = bound


def original_forward(carried: Carried, module: torch.nn.Module) -> Callable[..., Any]:
    """The forward of the module that `carried` replaced.

    It may be another one of ours, bound to the module that this one is a shallow copy of.
    """
    found = carried.forward
    if found is None:
        return functools.partial(type(module).forward, module)
    if isinstance(found, functools.partial) and found.func in _OURS and found.args != (module,):
        return functools.partial(found.func, module)
    return found
