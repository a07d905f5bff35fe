"""Finds the module of a call of a `forward` attribute, which torch's `Module.__call__` does not pass on; and hooks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_post_hooks",
    "_load_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
)
"""Attributes of a module that hold its hooks."""


def called_module(bound: torch.nn.Module) -> torch.nn.Module:
    """The module that is called, for a function that is its `forward` through `functools.partial(function, bound)`.

    That is `bound`, or a shallow copy of it: copies share the partial, but have weights of their own. To be called
    from that function itself: the next frame on the stack is then `Module.__call__`, whose `self` is the module.

    Source: `Module._call_impl` in torch/nn/modules/module.py.
    """
    if torch.compiler.is_compiling():
        return bound
    caller = sys._getframe(2).f_locals.get("self")
    if caller is bound or not isinstance(caller, torch.nn.Module):
        return bound
    forward = caller.__dict__.get("forward")
    copied = isinstance(forward, functools.partial) and forward.args and forward.args[0] is bound
    return caller if copied else bound


def remove_forward_pre_hooks(module: torch.nn.Module, kind: type | tuple[type, ...]) -> None:
    """Remove the forward pre-hooks of a class, or of several.

    They are found on the module, because its copies have the hooks as well, but no handles for them. Source:
    `Module.register_forward_pre_hook` (torch/nn/modules/module.py).
    """
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, kind):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def remove_forward_hooks(module: torch.nn.Module, kind: type) -> None:
    """Remove the forward hooks of a class; see `remove_forward_pre_hooks`.

    Source: `Module.register_forward_hook` (torch/nn/modules/module.py).
    """
    for key, hook in list(module._forward_hooks.items()):
        if isinstance(hook, kind):
            del module._forward_hooks[key]
            module._forward_hooks_with_kwargs.pop(key, None)
            module._forward_hooks_always_called.pop(key, None)


def hooked_inside(
    module: torch.nn.Module,
    besides: Collection[str] = (),
    may_skip: Callable[[Any], bool] = lambda hook: False,
) -> str:
    """Name of a module inside this one that has hooks on its calls, "" if none has.

    Hooks of ours with an attribute `compiled_code_may_skip` do not count.

    Args:
        besides: names of modules that are left out, with what is in them.
        may_skip: whether a forward hook does not count, either.

    Compiled code runs the hooks that it was compiled with, and does not check whether any were added since.

    Source: `Module._forward_hooks` and its like (torch/nn/modules/module.py), `skip_nnmodule_hook_guards`
    (torch/_dynamo/config.py).
    """
    for name, inside in module.named_modules():
        if any(name == other or name.startswith(f"{other}.") for other in besides):
            continue
        found = (*inside._forward_hooks.values(), *inside._forward_pre_hooks.values())
        hooks = [
            hook for hook in found if not (getattr(hook, "compiled_code_may_skip", False) or may_skip(hook))
        ]
        if name and (hooks or inside._backward_hooks or inside._backward_pre_hooks):
            return name
    return ""


@contextlib.contextmanager
def without_forward_hooks(module: torch.nn.Module, which: Callable[[Any], bool]) -> Iterator[None]:
    """Context in which calls of a module, and of those inside, do not run some of their forward hooks.

    Source: as for `copied_hooks`.
    """
    before = {inside: inside._forward_hooks for inside in module.modules() if inside._forward_hooks}
    for inside, hooks in before.items():
        inside._forward_hooks = OrderedDict((key, hook) for key, hook in hooks.items() if not which(hook))
    try:
        yield
    finally:
        for inside, hooks in before.items():
            inside._forward_hooks = hooks


@contextlib.contextmanager
def without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Context in which calls of a module run no hooks.

    Source: as for `copied_hooks`.
    """
    hooks = {name: module.__dict__[name] for name in HOOKS if name in module.__dict__}
    module.__dict__.update({name: OrderedDict() for name in hooks})
    try:
        yield
    finally:
        module.__dict__.update(hooks)


def copied_hooks(module: torch.nn.Module) -> dict[str, Any]:
    """Copies of the dictionaries in which a module holds its hooks, by the attribute's name.

    Registering a hook writes into these. Put into `module.__dict__`, the copies take the writes, and the earlier
    dictionaries keep the earlier hooks.

    Source: `Module.__init__` (torch/nn/modules/module.py), all attributes in `HOOKS`.
    """
    return {name: module.__dict__[name].copy() for name in HOOKS if name in module.__dict__}
