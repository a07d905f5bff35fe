"""The independent rulers: what a piece of code really takes, by the allocator's own account.

Nothing here knows of tapes, plans or predictions, so that every prediction can be held against it.

On CUDA the allocator keeps the count itself. On CPU nobody does: `torch.profiler` with `profile_memory=True`
reports every allocation and every free, and the ruler is their running sum. It sees what no dispatch mode can
see: the workspace inside an operator, the RNG states that are stashed, the scalars that Python numbers turn into.

NOTE [ What the profiler does not say ]

1. It identifies a block by its address, and tells of a free only if it saw the block's allocation. Of a tensor
   from before the start that dies inside, it says nothing: a finalizer on its storage does.
2. It forgets to forget: a block allocated under one profiler and freed when none is running stays in its table.
   If the address is used again by then, a later profiler reports the free with the size of the wrong block. So
   a free counts only if this run saw the allocation; any other is case 1.
3. It sees the thread that started it, and the autograd engine's work for CPU tensors is done on that thread.
   What other threads allocate is not counted.
4. A storage from before the start that is resized inside is taken to keep its size.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from autoac.compat import cpu_allocations, cpu_ops, raw_events

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timeline:
    """Live memory over time.

    Args:
        time_s: seconds since the first event, ascending, shape (events,).
        live_above_start_bytes: live bytes from that event on, less those at the start, shape (events,).
        op_time_s, op_names: when each op began, on the same clock, and its name, such as "aten::mm"; ops that an op is
            made of are listed after it.
    """

    time_s: np.ndarray
    live_above_start_bytes: np.ndarray
    op_time_s: np.ndarray
    op_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measurement(Generic[T]):
    """What one call took.

    Args:
        peak_above_start_bytes: the most bytes alive at any moment of the call, less those alive at its start;
            never negative, for the start is a moment too.
        end_above_start_bytes: bytes alive at the end, less those alive at the start; the result's included.
        result: what the call returned.
        timeline: live bytes over time on CPU; None on CUDA, whose allocator counts but does not record.
    """

    peak_above_start_bytes: int
    end_above_start_bytes: int
    result: T
    timeline: Timeline | None


def measure_peak(fn: Callable[[], T], device: torch.device | str = "cpu") -> Measurement[T]:
    """Run `fn` once and measure how much memory it takes on one device.

    The garbage collector runs first, so that nobody else's garbage is freed, and counted, inside. Run `fn`
    once beforehand if its first run differs from the others (lazy initialisation, caches).

    Args:
        fn: called without arguments.
        device: the device to measure, CPU or CUDA.

    Returns:
        The measurement, with the result of `fn` in it.

    Raises:
        ValueError: for a device whose memory cannot be measured, or that is not there; `fn` is not called.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return _measure_cpu(fn)
    if device.type != "cuda":
        raise ValueError(f"cannot measure memory on {str(device)!r}: only on 'cpu' and 'cuda'")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"cannot measure memory on {str(device)!r}: torch finds {torch.cuda.device_count()} CUDA devices here"
        )
    return _measure_cuda(fn, device)


def unique_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages under some tensors, each storage counted once however many tensors share it.

    Args:
        tensors: strided or sparse tensors, on any device; views count with their whole storage.
    """
    # A storage's address in memory is no identity: all empty storages, and all on the meta device, are at 0.
    by_storage = {s._cdata: s.nbytes() for t in tensors for s in _storages(t)}
    return sum(by_storage.values())


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if tensor.layout == torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout == torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    else:
        raise ValueError(f"cannot count the bytes of a tensor with layout {tensor.layout}")


def _measure_cuda(fn: Callable[[], T], device: torch.device) -> Measurement[T]:
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start_bytes = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    return Measurement(
        peak_above_start_bytes=torch.cuda.max_memory_allocated(device) - start_bytes,
        end_above_start_bytes=torch.cuda.memory_allocated(device) - start_bytes,
        result=result,
        timeline=None,
    )


ONE_AT_A_TIME = threading.RLock()
"""Held where torch's profiler runs: there is one in a process, and two threads that use it at once break it."""


def _measure_cpu(fn: Callable[[], T]) -> Measurement[T]:
    gc.collect()
    # No accumulation, shapes or stacks: they cost time and say nothing about memory.
    with (
        ONE_AT_A_TIME,
        _deaths_of_present_storages() as deaths,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof,
    ):
        result = fn()
    events = sorted([*_allocator_events(prof), *deaths], key=lambda event: event[0])
    time_ns = np.array([when for when, _ in events], dtype=np.int64)
    live_bytes = np.cumsum(np.array([delta for _, delta in events], dtype=np.int64))
    ops = cpu_ops(raw_events(prof))
    start_ns = time_ns[0] if events else 0
    timeline = Timeline(
        time_s=(time_ns - start_ns) * 1e-9,
        live_above_start_bytes=live_bytes,
        op_time_s=(np.array([when for when, _ in ops], dtype=np.int64) - start_ns) * 1e-9,
        op_names=tuple(name for _, name in ops),
    )
    return Measurement(
        peak_above_start_bytes=int(live_bytes.max(initial=0)),
        end_above_start_bytes=int(live_bytes[-1]) if events else 0,
        result=result,
        timeline=timeline,
    )


def _allocator_events(prof: profile) -> list[tuple[int, int]]:
    """(Unix time in ns, change in bytes) for all blocks allocated on CPU while `prof` was on, by time.

    The tree of raw events is not public, but it alone has the addresses that rule 2 of
    NOTE [ What the profiler does not say ] needs.
    """
    changes: list[tuple[int, int]] = []
    live: dict[int, int] = {}
    for when, address, size in cpu_allocations(raw_events(prof)):
        if size > 0:
            live[address] = size
            changes.append((when, size))
        elif address in live:  # See rule 2.
            changes.append((when, -live.pop(address)))
    return changes


@contextmanager
def _deaths_of_present_storages() -> Iterator[list[tuple[int, int]]]:
    """Collects (Unix time in ns, minus bytes) for every CPU storage alive now that dies within the context.

    See rule 1 of NOTE [ What the profiler does not say ].
    """
    deaths: list[tuple[int, int]] = []

    def record(size: int) -> None:
        deaths.append((time.time_ns(), -size))

    watches = [weakref.finalize(storage, record, storage.nbytes()) for storage in _present_storages()]
    try:
        yield deaths
    finally:
        for watch in watches:
            watch.detach()


def _present_storages() -> list[torch.UntypedStorage]:
    """All CPU storages that tensors known to Python hold, gradients included."""
    # isinstance() would ask __class__ of every object there is, and some answer by importing half a library.
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            try:
                storages |= {s._cdata: s for s in _storages(tensor) if s.device.type == "cpu"}
            except (ValueError, RuntimeError, NotImplementedError):
                continue  # an opaque subclass without a storage of its own
    return list(storages.values())
