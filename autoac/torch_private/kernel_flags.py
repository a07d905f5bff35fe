"""Kernel flags: torch's settings that decide which kernel an op takes, or its result; read and set all together.

Private getters, because every recorded op reads the flags: all of them together take half a microsecond.

Source: torch/csrc/Module.cpp; torch/backends uses them.
"""

# pyright: reportAttributeAccessIssue=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

KernelFlags = tuple[Any, ...]

_Flag = tuple[Callable[[], Any], Callable[[Any], None]]


def _named(*names: str) -> list[_Flag]:
    """The flags with these names that this torch has."""
    found = [(getattr(torch._C, f"_get_{n}", None), getattr(torch._C, f"_set_{n}", None)) for n in names]
    return [(read, _of_tuples(write)) for read, write in found if read is not None and write is not None]


def _of_tuples(write: Callable[..., None]) -> Callable[[Any], None]:
    """The setter for a flag that may be read as a tuple, and is then set by its parts."""
    return lambda value: write(*value) if isinstance(value, tuple) else write(value)


def _precision(backend: str, op: str) -> list[_Flag]:
    """The precision of float32 products; the older flags (`allow_tf32`) are other names of these."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    write = getattr(torch._C, "_set_fp32_precision_setter", None)
    if read is None or write is None:
        return []
    return [(lambda: read(backend, op), lambda value: write(backend, op, value))]


_DETERMINISTIC: _Flag = (
    lambda: (
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    ),
    lambda value: torch._C._set_deterministic_algorithms(value[0], warn_only=value[1]),
)

_FLAGS: list[_Flag] = [
    _DETERMINISTIC,
    (torch.get_default_dtype, torch.set_default_dtype),
    *_named("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled"),
    *_precision("mkldnn", "matmul"),
    *_precision("mkldnn", "conv"),
]

_FLAGS_OF_CUDA: list[_Flag] = [
    *_named("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
    *_named(
        "cublas_allow_fp16_reduced_precision_reduction",
        "cublas_allow_bf16_reduced_precision_reduction",
        "cublas_allow_fp16_accumulation",
    ),
    *_precision("cuda", "matmul"),
    *_precision("cuda", "conv"),
]
"""Any build has them; they are read only where they matter."""

if torch.backends.cudnn.is_available():  # a build for CUDA
    _FLAGS += _FLAGS_OF_CUDA

_READ = tuple(read for read, _ in _FLAGS)


def kernel_flags() -> KernelFlags:
    """The current values of all flags."""
    return tuple([read() for read in _READ])


@contextlib.contextmanager
def with_kernel_flags(wanted: KernelFlags) -> Iterator[None]:
    """Context in which the flags have the values that `kernel_flags` returned."""
    found = kernel_flags()
    _set(found, wanted)
    try:
        yield
    finally:
        _set(wanted, found)


def _set(now: KernelFlags, wanted: KernelFlags) -> None:
    for (_, write), old, new in zip(_FLAGS, now, wanted, strict=True):
        if old != new:
            write(new)
