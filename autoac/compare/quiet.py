"""Environment settings that reduce timing noise; they must be set before the process starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SETTINGS = {
    # By default glibc returns freed memory to the system, and page faults hide differences of a few per cent of step
    # time. With these settings it keeps the memory, as CUDA's caching allocator does.
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
    """Restart this process with `SETTINGS` and `others`, unless it has them. Call it before any work."""
    wanted = {**SETTINGS, **(others or {})}
    if all(os.environ.get(name) == value for name, value in wanted.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})


def tell(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)
