"""Settings that keep a benchmark quiet; they have to be there before the process starts."""

from __future__ import annotations

import os
import sys

SETTINGS = {
    # glibc gives freed memory back to the system and page faults drown a few per cent of step time; told to keep
    # it, it does as CUDA's caching allocator does.
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    # CPU time counts waiting threads that spin: a strategy would be charged for other processes' load.
    "OMP_WAIT_POLICY": "PASSIVE",
    "KINETO_LOG_LEVEL": "6",  # the profiler's start and stop messages
    "HF_HUB_OFFLINE": "1",  # random configs need no network
    "PYTHONHASHSEED": "0",
}


def restart_if_needed() -> None:
    """Start this process again with `SETTINGS`, unless it has them."""
    if all(os.environ.get(name) == value for name, value in SETTINGS.items()):
        return
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **SETTINGS})


def tell(message: str) -> None:
    """Progress, on stderr."""
    print(message, file=sys.stderr, flush=True)
