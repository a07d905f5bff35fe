"""Optimizers: hooks around the steps of all of them; the one inside of another library's wrapper."""

from __future__ import annotations

import functools
import inspect
import threading
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


class _Hooks:
    """Hooks of ours at one side of the steps of all optimizers, in the order in which they were put there.

    Torch iterates over its global hooks while it calls them, and ours may take long (a plan is made in one). If one was
    put there or taken off meanwhile, the step of another thread's optimizer would fail. So torch has one for all of
    ours, from the first on, and for good.

    A compiled step (`torch.compile(optimizer.step)`) calls ours outside of its graphs, which do not break without any.
    """

    def __init__(self, register: Callable[[Hook], Any]) -> None:
        self._register = register
        self._is_registered = False
        self._lock = threading.Lock()
        self._hooks: dict[object, Hook] = {}

    def put_on(self, hook: Hook) -> Callable[[], Any]:
        """Returns what takes it off; it may be called again, by the garbage collector too (so it takes no lock)."""
        key = object()
        self._hooks[key] = hook
        with self._lock:
            if not self._is_registered:
                self._register(self._for_torch())
                self._is_registered = True
        return functools.partial(self._hooks.pop, key, None)

    def _for_torch(self) -> Hook:
        call = disable_dynamo(
            functools.partial(self._call), "autoac looks at the optimizer before and after its step"
        )
        return lambda *args: call(*args) if self._hooks else None

    def _call(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Call all; those before a step may change its arguments, as torch allows it."""
        changed = None
        for hook in list(self._hooks.values()):
            result = hook(optimizer, args, kwargs)
            if result is not None:
                args, kwargs = changed = result
        return changed


_BEFORE = _Hooks(register_optimizer_step_pre_hook)
_AFTER = _Hooks(register_optimizer_step_post_hook)


def around_steps(before: Hook, after: Hook | None = None) -> Callable[[], None]:
    """Put hooks before and after the `step()` of all optimizers; returns what takes them off."""
    put = [_BEFORE.put_on(before)]
    if after is not None:
        put.append(_AFTER.put_on(after))

    def take_off() -> None:
        for hook in put:
            hook()

    return take_off


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
