"""Unwraps an optimizer that another library has wrapped."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoac.torch_private import disable_dynamo
from autoac_solver.records.errors import ProfilingError

Hook = Callable[..., Any]

_HELD_AS = {
    "AcceleratedOptimizer": "optimizer",
    "LightningOptimizer": "_optimizer",
    "_FabricOptimizer": "_optimizer",
}
"""Classes of accelerate and Lightning that wrap another optimizer, and the attribute that holds it.

By name: neither library is imported here.
"""


def around_steps(before: Hook, after: Hook | None = None) -> list[Any]:
    """Put hooks before and after the `step()` of all optimizers; returns the handles that take them off.

    A compiled step (`torch.compile(optimizer.step)`) calls them, too, outside of its graphs: no bound methods, which
    take no attributes.
    """
    reason = "autoac looks at the optimizer before and after its step"
    hooks = [register_optimizer_step_pre_hook(disable_dynamo(before, reason))]
    if after is not None:
        hooks.append(register_optimizer_step_post_hook(disable_dynamo(after, reason)))
    return hooks


def real_optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of accelerate and Lightning.

    Raises:
        ProfilingError: it is no optimizer, has no parameter of this model, or wraps another one in an unknown way.
    """
    optimizer = inner_optimizer(optimizer)
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ProfilingError("the optimizer has no parameter of this model: pass the one that trains it.")
    return optimizer


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of wrappers, as `real_optimizer`, whatever it trains.

    Raises:
        ProfilingError: it is no optimizer, or wraps another one in an unknown way.
    """
    _check_is_optimizer(optimizer)
    while (attribute := _holds_another(optimizer)) is not None:
        optimizer = getattr(optimizer, attribute)
        _check_is_optimizer(optimizer)
    _check_is_no_proxy(optimizer)
    return optimizer


def _check_is_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, type) or not hasattr(optimizer, "param_groups"):
        shown = " ".join(repr(optimizer).split())  # a model's has many lines
        raise ProfilingError(f"optimizer is {shown:.80}: pass the optimizer object that trains the model.")


def _holds_another(optimizer: Any) -> str | None:
    return next(
        (_HELD_AS[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _HELD_AS), None
    )


def _check_is_no_proxy(optimizer: Any) -> None:
    """Refuse an optimizer that keeps its state in another one: a copy of it would write there."""
    own = getattr(optimizer, "__dict__", {})
    passed_on = [
        name for name in ("param_groups", "state") if name not in own or _is_property(optimizer, name)
    ]
    inner = next(
        (name for name, value in own.items() if issubclass(type(value), torch.optim.Optimizer)), None
    )
    if not passed_on and inner is None:
        return
    why = (
        f"its {' and '.join(passed_on)} are another object's"
        if passed_on
        else f"it holds another one, .{inner}"
    )
    raise ProfilingError(
        f"optimizer is a {type(optimizer).__name__}, which wraps another optimizer ({why}): its memory cannot be found "
        "without touching that one. Pass the optimizer inside of it."
    )


def _is_property(optimizer: Any, name: str) -> bool:
    found = inspect.getattr_static(type(optimizer), name, None)
    return found is not None and hasattr(type(found), "__set__")
