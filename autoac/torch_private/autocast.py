"""Kernels of the CPU's autocast, and their replacement. The lists are in aten/src/ATen/autocast_mode.cpp."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

CAN_REPLACE_CASTS = hasattr(torch.library, "get_kernel")
"""Whether kernels of autocast can be replaced while other threads keep theirs; torch 2.9 and newer."""

AutocastKernel = Callable[..., Any]
"""Called with `below` and the op's arguments; `below()` runs the op with these arguments and no cast of its own."""


def without_cpu_autocast() -> Any:
    """Context in which autocast casts no CPU tensors, as the kernels of autocast have it for the op they cast for.

    Source: `ExcludeDispatchKeyGuard` (c10/core/impl/LocalDispatchKeySet.h), used in `WrapFunction_` (autocast_mode.h).
    """
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def cast_by_cpu_autocast() -> list[str]:
    """Names of ATen's overloads, such as "softmax.int", for which the CPU's autocast has a kernel.

    Source: `_dispatch_get_all_op_names` and `_dispatch_has_kernel_for_dispatch_key` in
    torch/csrc/utils/python_dispatch.cpp.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name.removeprefix("aten::") for name in names if has(name, "AutocastCPU")]


def aten_overload(name: str) -> Any:
    """An overload of ATen by a name such as "softmax.int", None if this torch has none.

    Source: `OpOverloadPacket` (torch/_ops.py); "default" is the overload without a name.
    """
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


@contextlib.contextmanager
def cpu_autocast_kernels(
    kernels: Mapping[str, AutocastKernel], ours: Callable[[Any, Any], bool]
) -> Iterator[None]:
    """Context in which these kernels are the CPU's autocast, for calls that are `ours`.

    Kernels belong to the process. Calls that are not `ours` get what was there before.

    Args:
        kernels: by overload, such as "softmax.int".
        ours: whether a call with these arguments (positional, by name) gets the new kernel.

    Source: `torch.library.Library.impl` (torch/library.py), below which `_DispatchModule.impl` of
    torch/csrc/utils/python_dispatch.cpp also replaces kernels, and warns once; `get_kernel` in torch/library.py.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    key = torch._C.DispatchKey.AutocastCPU
    after = torch._C._dispatch_keyset_full_after(key)
    library = torch.library.Library("aten", "IMPL")
    module = library.m
    assert module is not None

    def register(name: str, kernel: AutocastKernel) -> None:
        op, full = aten_overload(name), f"aten::{name}"
        before = torch.library.get_kernel(full, "AutocastCPU") if has(full, "AutocastCPU") else None

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            def below() -> Any:
                return op.redispatch(keys & after, *args, **kwargs)

            if ours(args, kwargs):
                return kernel(below, op, args, kwargs)
            return below() if before is None else before.call_boxed(keys, *args, **kwargs)

        module.impl(full, "AutocastCPU", run, True)

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*[Oo]verrid")
            for name, kernel in kernels.items():
                register(name, kernel)
        yield
    finally:
        library._destroy()
