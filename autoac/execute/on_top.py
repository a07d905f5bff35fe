"""A forward on top of a model's current one, which hands each call to its owner."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from autoac.step.uncompiled import uncompiled_below
from autoac.torch_private import is_compiled_wrapper, wrapped_module
from autoac.torch_private.called import called_module

_KEY = "_autoac_on_top"


class Owner(Protocol):
    """The object that handles the model's calls.

    Attributes:
        takes_turns: it attaches and detaches plans between calls, so that no other plan may be put on the model.
    """

    takes_turns: bool

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the model: return its output, from `OnTop.run`."""


class _Carried:
    """Record stored on a model that has our forward on top.

    A copied or unpickled model has no owner: it is trained on its own.

    Args:
        owner: handles the calls; None in a copy.
        below: the previous instance attribute `forward`, None if there was none.
    """

    def __init__(self, owner: Owner | None, below: Any):
        self.owner = owner
        self.below = below

    def __deepcopy__(self, memo: dict[int, Any]) -> _Carried:
        return _Carried(None, copy.deepcopy(self.below, memo))

    def __reduce__(self) -> Any:
        return _Carried, (None, self.below)


def on_top_forward(bound: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a model that has an owner."""
    module = called_module(bound)
    carried: _Carried | None = module.__dict__.get(_KEY)
    if carried is None:  # ours is aside
        return type(module).forward(module, *args, **kwargs)
    if module is bound and carried.owner is not None and not torch.compiler.is_compiling():
        return carried.owner.called(args, kwargs)
    below = carried.below
    if isinstance(below, functools.partial) and below.args and below.args[0] is bound:
        # With the copy's own weights.
        below = functools.partial(below.func, module, *below.args[1:], **below.keywords)
    return (below or functools.partial(type(module).forward, module))(*args, **kwargs)


def owner_of(model: torch.nn.Module) -> Owner | None:
    """The owner of the model's forward on top, None if it has none."""
    carried: _Carried | None = model.__dict__.get(_KEY)
    return None if carried is None else carried.owner


_MODELS: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models that our forward was put on."""


def owned_with(model: torch.nn.Module) -> torch.nn.Module | None:
    """A model that has an owner, and which this one is, holds or is held by; None if there is none."""
    inside = {id(module) for module in model.modules()}
    for other in _MODELS:
        if owner_of(other) is not None:
            held = any(module is model for module in other.modules())
            if held or id(other) in inside:
                return other
    return None


class OnTop:
    """Our forward on top of a model's.

    Args:
        model: the model.
        owner: handles the calls.
    """

    def __init__(self, model: torch.nn.Module, owner: Owner):
        self.model = model
        self.owner = owner

    def put_on(self) -> None:
        """Put our forward on the model.

        One without an owner is there in a copy, or where other code had replaced it when its owner was done: the former
        is taken off, the latter is given to the new owner.
        """
        carried: _Carried | None = self.model.__dict__.get(_KEY)
        _MODELS.add(self.model)
        if carried is not None and self._is_covered():
            carried.owner = self.owner
            return
        self.take_off()
        below = self.model.__dict__.get("forward")
        bound = functools.partial(on_top_forward, self.model)
        # For `inspect.signature`, as in `execute.forwards`.
        bound.__wrapped__ = below or types.MethodType(type(self.model).forward, self.model)  # type: ignore[attr-defined]
        self.model.__dict__[_KEY] = _Carried(self.owner, below)
        self.model.__dict__["forward"] = bound

    def take_off(self) -> None:
        """Restore the model; if other code has replaced our forward since, it stays, and ours only passes calls on."""
        carried: _Carried | None = self.model.__dict__.get(_KEY)
        if carried is None:
            return
        if self._is_covered():
            carried.owner = None
            return
        self._expose(carried)

    def _expose(self, carried: _Carried) -> None:
        """Put the forward below ours in the place of the model's."""
        del self.model.__dict__[_KEY]
        if carried.below is None:
            del self.model.__dict__["forward"]
        else:
            self.model.__dict__["forward"] = carried.below

    def _is_covered(self) -> bool:
        return getattr(self.model.__dict__.get("forward"), "func", None) is not on_top_forward

    def run(self, args: Any, kwargs: Any, uncompiled: bool = False) -> Any:
        """Call the model's forward below ours.

        Args:
            uncompiled: call what is in a wrapper of `torch.compile` instead, which with `fullgraph=True` refuses to run
                where nothing can be compiled, as in a recorded step.
        """
        if uncompiled:
            with uncompiled_below(self.model):
                is_wrapper = is_compiled_wrapper(self.model)
                return wrapped_module(self.model)(*args, **kwargs) if is_wrapper else self.run(args, kwargs)
        carried: _Carried | None = self.model.__dict__.get(_KEY)
        below = self.model.__dict__.get("forward") if carried is None else carried.below
        return (below or functools.partial(type(self.model).forward, self.model))(*args, **kwargs)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Context without our forward: what is put on the model in it, is below ours afterwards.

        If other code has put a forward over ours since (accelerate does), that is aside as well.
        """
        carried: _Carried | None = self.model.__dict__.get(_KEY)
        if carried is not None and "forward" in self.model.__dict__ and self._is_covered():
            above = self.model.__dict__["forward"]
            self._expose(carried)
            try:
                yield
            finally:
                self.take_off()  # ours, if another context within this one has put it on
                carried.below = self.model.__dict__.get("forward")
                self.model.__dict__.update({_KEY: carried, "forward": above})
            return
        self.take_off()
        try:
            yield
        finally:
            self.put_on()
