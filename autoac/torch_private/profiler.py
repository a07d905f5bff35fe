"""The profiler's raw events: allocations and frees on CPU, ops."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


def is_profiled() -> bool:
    """Whether torch's profiler runs: there cannot be two.

    Source: `torch.autograd.profiler._is_profiler_enabled`.
    """
    return torch.autograd.profiler._is_profiler_enabled


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Context in which torch's profiler is started without the lines "USDT:... profiler_start" on stderr.

    Its library, Kineto, reads its log level once, when a process first profiles; a level that the user has set is
    kept. If the process has profiled before, the lines cannot be suppressed.

    Source: `KINETO_LOG_LEVEL` (third_party/kineto/libkineto/src/ILoggerObserver.h and Logger.cpp).
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LEVEL, None)


class AllocationRanges:
    """Context that records the CPU allocator's allocations and frees within named ranges.

    Reads the profiler's tree of raw events, as torch's own `_memory_profiler` does. `deltas` is filled when the
    context ends: for each range, the changes in bytes by time.

    Source: `torch._C._profiler._RecordFunctionFast` (torch/csrc/profiler/python/init.cpp).
    """

    def __enter__(self) -> AllocationRanges:
        self.deltas: dict[str, list[int]] = {}
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        )
        with quiet_profiler():
            self._profile.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._profile.__exit__(*exception)
        stack = raw_events(self._profile)
        while stack:
            event = stack.pop()
            if event.name in self.deltas:
                self.deltas[event.name] = [size for _, _, size in cpu_allocations([event])]
            else:
                stack.extend(event.children)

    def range(self, name: str) -> Any:
        """A context whose allocations are recorded under this name, which must be new."""
        self.deltas[name] = []
        return torch._C._profiler._RecordFunctionFast(name)


def raw_events(profile: torch.profiler.profile) -> list[Any]:
    """The roots of a finished profile's tree of raw events, which torch's own `_memory_profiler` reads as well.

    Source: `_ProfilerResult.experimental_event_tree` (torch/csrc/autograd/init.cpp).
    """
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    return list(profile.profiler.kineto_results.experimental_event_tree())


def cpu_allocations(events: list[Any]) -> list[tuple[int, int, int]]:
    """(Unix time in ns, address, change in bytes) of each CPU allocation and free in these events, by time.

    Source: `torch._C._profiler._EventType` (torch/csrc/profiler/python/init.cpp).
    """
    found: list[tuple[int, int, int]] = []
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    found.sort(key=lambda event: event[0])
    return found


def cpu_ops(events: list[Any]) -> list[tuple[int, str]]:
    """(Unix time in ns, name such as "aten::mm") of the start of every op in these events, by time.

    An op that a dispatch mode redispatches appears once more inside itself; it counts once.

    Source: `torch._C._profiler._EventType` (torch/csrc/profiler/python/init.cpp).
    """
    found: list[tuple[int, str]] = []
    stack = [(event, "") for event in events]
    while stack:
        event, inside = stack.pop()
        name = inside
        if event.tag == torch._C._profiler._EventType.TorchOp and event.name.count("::") == 1:
            name = event.name  # autograd's own ranges have more colons
            if name != inside:
                found.append((event.start_time_ns, name))
        stack.extend((child, name) for child in event.children)
    found.sort(key=lambda event: event[0])
    return found
