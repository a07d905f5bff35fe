"""Dispatch modes and the ops that they see. `TorchDispatchMode` is in torch/utils/_python_dispatch.py."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from autoac.torch_private.compiler import untraced

OpOverload = torch._ops.OpOverload
"""An op's overload, such as `torch.ops.aten.add.Tensor`.

Source: torch/_ops.py.
"""

HigherOrderOperator = torch._ops.HigherOrderOperator
"""An op that takes functions, such as `torch.cond`.

Source: torch/_ops.py.
"""

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""An overload's schema: its arguments and results, and which of them it writes.

Source: `OpOverload._schema` (torch/_ops.py), a `FunctionSchema` (aten/src/ATen/core/function_schema.h).
"""


class DispatchMode(TorchDispatchMode):
    """A dispatch mode under which functions of `torch.compile` are compiled, and run compiled.

    Dynamo skips a function that it meets under any other mode, from then on and for good; with `fullgraph=True` that is
    an error.

    Source: `TorchDispatchMode.ignore_compile_internals` in torch/utils/_python_dispatch.py, `CatchErrorsWrapper` in
    torch/_dynamo/convert_frame.py.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class UnwrappedDispatchMode(DispatchMode):
    """A dispatch mode that ops reach directly, also those that compiled code runs.

    torch wraps the `__torch_dispatch__` of any other mode in `torch._dynamo.disable`, which costs a microsecond per op.

    Source: `TorchDispatchMode.__init_subclass__` in torch/utils/_python_dispatch.py.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__torch_dispatch__" in cls.__dict__:
            untraced(cls.__dict__["__torch_dispatch__"])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def entry_of(overload: Any) -> Callable[..., Any]:
    """What runs an op overload, without the frame of a Python function in between: a quarter of a microsecond less.

    Source: `OpOverload.__call__` in torch/_ops.py; its subclasses have their own.
    """
    return overload._op if type(overload) is OpOverload else overload


def top_dispatch_mode() -> Any:
    """The dispatch mode that sees an op first, None if there is none.

    Source: `torch.utils._python_dispatch._get_current_dispatch_mode`.
    """
    return torch.utils._python_dispatch._get_current_dispatch_mode()


def on_fake_tensors() -> bool:
    """Whether a fake mode is active: DTensor infers shapes under one, inside an op on real tensors.

    Source: `torch._C._get_dispatch_mode` (torch/csrc/autograd/init.cpp); `ShardingPropagator._propagate_tensor_meta`
    (torch/distributed/tensor/_sharding_prop.py) infers the shapes.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def disable_dispatch_modes() -> Any:
    """Context in which no dispatch mode sees an op. It acts from its construction on: create it where it is entered.

    Under a fake mode, which is itself a dispatch mode, the modes are set aside one by one: fake tensors bring their own
    mode back.

    Source: `torch._C._DisableTorchDispatch` (torch/csrc/autograd/init.cpp), `_disable_current_modes` in
    torch/utils/_python_dispatch.py.
    """
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.utils._python_dispatch._disable_current_modes()
    return torch._C._DisableTorchDispatch()


def without_dispatch_modes() -> Any:
    """Context in which modes see no op; tensor subclasses keep their dispatch. Slower than `disable_dispatch_modes`.

    Source: `_disable_current_modes` in torch/utils/_python_dispatch.py.
    """
    return torch.utils._python_dispatch._disable_current_modes()


def being_traced() -> bool:
    """Whether a proxy mode (`make_fx`, AOTAutograd) traces ops, and does not run them.

    Source: `torch._C._get_dispatch_mode` (torch/csrc/autograd/init.cpp), the key of `ProxyTorchDispatchMode`.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def being_jit_traced() -> bool:
    """Whether `torch.jit.trace` is tracing ops.

    Source: `torch._C._get_tracing_state` (torch/csrc/jit/python/python_tracer.cpp).
    """
    return torch._C._get_tracing_state() is not None
