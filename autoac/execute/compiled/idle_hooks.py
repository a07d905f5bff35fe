"""Hooks of transformers that do nothing in most calls, so that compiled code may leave them out of those.

NOTE [ Idle hooks ]
  1. The first call with `output_hidden_states=True` and its like has transformers put hooks on modules, for good. A
     hook records what its module returns in calls that ask for it, and does nothing in others: it is idle.
  2. A region with idle hooks only is compiled without them: Dynamo runs the hooks that are there when it traces, and
     does not check afterwards. In a call in which one is not idle, the region runs uncompiled.
  3. Whether a call asks for outputs is decided in the call of the model that the hooks were put on for. So in a region
     that holds such a model none is idle.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autoac.torch_private import hooked_inside, without_forward_hooks

_MODULE = "transformers.utils.output_capturing"
_HOOK, _KEY, _COLLECTOR = "output_capturing_hook", "key", "_active_collector"
"""The hook's function, its variable with the kind of output, and where those are that are recorded (5.24)."""
_HAS_HOOKS = "_output_capturing_hooks_installed"
"""Attribute of a model that hooks were put on for."""


def is_idle(hook: Any) -> bool:
    """Whether a hook is one of those, and records nothing now."""
    module = sys.modules.get(_MODULE)
    if (
        module is None
        or _COLLECTOR not in vars(module)
        or getattr(hook, "__globals__", None) is not vars(module)
    ):
        return False
    code = hook.__code__
    if code.co_name != _HOOK or _KEY not in code.co_freevars:
        return False
    return hook.__closure__[code.co_freevars.index(_KEY)].cell_contents not in _recorded()


def is_recording() -> bool:
    """Whether this call of a model of transformers records outputs of its modules."""
    return bool(_recorded())


def _recorded() -> Collection[str]:
    """The kinds of output that are recorded now."""
    collector = getattr(sys.modules.get(_MODULE), _COLLECTOR, None)
    return (None if collector is None else collector.get()) or ()


def busy_hooks_inside(module: torch.nn.Module, besides: Collection[str] = ()) -> str:
    """`hooked_inside`, without those that are idle."""
    return hooked_inside(module, besides, is_idle) if _may_be_idle(module) else hooked_inside(module, besides)


def without_idle_hooks(module: torch.nn.Module) -> AbstractContextManager[None]:
    """Context in which calls of modules in this one run no idle hooks."""
    return without_forward_hooks(module, is_idle) if _may_be_idle(module) else nullcontext()


def _may_be_idle(module: torch.nn.Module) -> bool:
    return _MODULE in sys.modules and not any(_HAS_HOOKS in vars(inside) for inside in module.modules())
