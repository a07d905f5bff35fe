"""Settings that keep a comparison quiet; they have to be there before the process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SETTINGS = {
    # glibc gives freed memory back to the system and page faults drown a few per cent of step time; told to keep
    # it, it does as CUDA's caching allocator does.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    # CPU time counts waiting threads that spin: a strategy would be charged for other processes' load.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KINETO_LOG_LEVEL": "6",  # the profiler's start and stop messages
    "PYTHONHASHSEED": "0",
}

MOST_STOLEN = 0.02
"""A sample is thrown away if the host of a virtual machine gave a larger share of its CPU time to others."""


def restart_if_needed(others: Mapping[str, str] | None = None) -> None:
    """Start this process again with `SETTINGS` and others, unless it has them. Call it before anything is done."""
    wanted = {**SETTINGS, **(others or {})}
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def tell(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)
