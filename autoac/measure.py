"""Independent rulers: the memory that a piece of code really takes, counted by the allocator.

Nothing here depends on tapes, plans or predictions, so that every prediction can be checked against it.

On CUDA the allocator counts live bytes. On CPU it does not: `torch.profiler` with `profile_memory=True` reports every
allocation and every free, and the ruler is their running sum. It includes memory that no dispatch mode sees: the
workspace inside an op, stashed RNG states, the scalars that Python numbers turn into.

NOTE [ What the profiler does not say ]

1. It identifies a block by its address, and reports a free only if it saw the block's allocation. It does not report
   that a tensor from before the start is freed inside: a finalizer on its storage does.
2. A block allocated under one profiler and freed when none is running stays in its table. If the address is used again
   by then, a later profiler reports the free with the size of the wrong block. So a free counts only if this run saw
   the allocation; any other is case 1.
3. It sees the thread that started it. The autograd engine runs nodes for CPU tensors on that thread. Allocations of
   other threads are not counted.
4. A storage from before the start that is resized inside is taken to keep its size.
5. Threads of gloo record their collectives in it, too, and may still do so when the step has gone on. Stopping it frees
   what they write to (pytorch pull request 185741 mends this for other threads), so it stops once they rest. They may
   also be the last to hold a collective's tensor, whose free it would not see (3): so each wait lets them release it.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from autoac.device import Device, MemoryCount, device_for
from autoac.torch_private import (
    cpu_allocations,
    cpu_ops,
    gloo_threads,
    gloo_unhurried,
    key_of_storage,
    parts_of,
    quiet_profiler,
    raw_events,
    sparse_parts,
    wait_for_gloo,
)

T = TypeVar("T")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """Live memory over time.

    Args:
        time_s: seconds since the first event, ascending, shape (events,).
        live_above_start_bytes: live bytes from that event on, less those at the start, shape (events,).
        op_time_s, op_names: start of each op, on the same clock, and its name, such as "aten::mm"; the ops that an op
            calls are listed after it.
    """

    time_s: np.ndarray
    live_above_start_bytes: np.ndarray
    op_time_s: np.ndarray
    op_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measurement(Generic[T]):
    """Memory that one call took.

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
    timeline: MeasuredTimeline | None = field(repr=False)

    def __repr__(self) -> str:
        """The bytes and the result's type: a model's output would fill the screen."""
        return (
            f"Measurement(peak_above_start_bytes={self.peak_above_start_bytes}, "
            f"end_above_start_bytes={self.end_above_start_bytes}, result: {type(self.result).__name__})"
        )


def measure_peak(fn: Callable[[], T], device: torch.device | str = "cpu") -> Measurement[T]:
    """Run `fn` once and measure how much memory it takes on one device.

    The garbage collector runs first, so that earlier garbage is not freed, and counted, inside. Run `fn` once
    beforehand if its first run differs from the others (lazy initialisation, caches).

    Args:
        fn: called without arguments.
        device: the device to measure, CPU or CUDA.

    Returns:
        The measurement, with the result of `fn` in it.

    Raises:
        ValueError: for a device whose memory cannot be measured, or that does not exist; `fn` is not called.
    """
    with measuring(device) as taken:
        result = fn()
    return Measurement(
        peak_above_start_bytes=taken.peak_above_start_bytes,
        end_above_start_bytes=taken.end_above_start_bytes,
        result=result,
        timeline=taken.timeline,
    )


def in_turn(
    runs: Mapping[Name, Callable[[], T]],
    rounds: int,
    *,
    shuffle: random.Random | None = None,
    after_round: Callable[[int], object] = lambda done: None,
) -> dict[Name, list[T]]:
    """Interleave runs to compare their times, so that the machine's drift affects all of them alike.

    Args:
        runs: by name; each is called once per round and returns its measurement.
        rounds: number of rounds.
        shuffle: shuffles the runs in each round; None for the given order.
        after_round: called with the number of rounds done.

    Returns:
        The results of each run, one per round.
    """
    found: dict[Name, list[T]] = {name: [] for name in runs}
    order = list(runs)
    for done in range(1, rounds + 1):
        if shuffle is not None:
            shuffle.shuffle(order)
        for name in order:
            found[name].append(runs[name]())
        after_round(done)
    return found


def seconds_of(run: Callable[[], object], rounds: int, device: torch.device) -> list[float]:
    """Seconds of each of several runs in a row, by the wall clock; the device is synchronised before and after."""
    now, seconds = device_for(device).now, []
    for _ in range(rounds):
        start = now()
        run()
        seconds.append(now() - start)
    return seconds


def unique_storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages under some tensors, each storage counted once however many tensors share it.

    Args:
        tensors: strided or sparse tensors, on any device, or wrapper subclasses that keep their values in such
            (quantized weights); views count with their whole storage.
    """
    # A storage's address in memory is no identity: all empty storages, and all on the meta device, are at 0.
    by_storage = {key_of_storage(s): s.nbytes() for t in tensors for s in _storages(t)}
    return sum(by_storage.values())


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    for part in parts_of(tensor):
        if part.layout == torch.strided:
            yield part.untyped_storage()
        elif part.layout == torch.sparse_coo:
            yield from (inside.untyped_storage() for inside in sparse_parts(part))
        else:
            raise ValueError(f"cannot count the bytes of a tensor with layout {part.layout}")


class Taken:
    """Memory that a context of `measuring` took; set when the context ends.

    Attributes:
        peak_above_start_bytes, end_above_start_bytes, timeline: as in `Measurement`.
        start_here: called within the context, counts from this moment on. On CPU, frees of what was allocated before it
            are seen, even of tensors that autograd alone holds and Python does not know.
    """

    peak_above_start_bytes: int = 0
    end_above_start_bytes: int = 0
    timeline: MeasuredTimeline | None = None

    def __init__(self, start_here: Callable[[], None]):
        self.start_here = start_here


_LOOKS = 20
"""How often in a row gloo's threads must be seen to rest, 0.1 ms apart."""


def measuring(device: torch.device | str = "cpu") -> AbstractContextManager[Taken]:
    """Context that measures its body as `measure_peak` measures a function.

    Args:
        device: the device to measure, CPU or CUDA.

    Raises:
        ValueError: for a device whose memory cannot be measured.
    """
    known = device_for(torch.device(device))
    if reason := known.not_measurable():
        raise ValueError(reason)
    return _measuring_cpu() if known.memory_events else _measuring_by_allocator(known)


@contextmanager
def _measuring_by_allocator(device: Device) -> Iterator[Taken]:
    with ExitStack() as counting:
        counts: list[MemoryCount] = []

        def start_here() -> None:
            nonlocal counts
            counting.close()
            device.synchronize()
            counts = counting.enter_context(device.counting())

        taken = Taken(start_here)
        gc.collect()
        start_here()
        yield taken
        device.synchronize()
    [count] = counts
    taken.peak_above_start_bytes = count.peak_bytes - count.before_bytes
    taken.end_above_start_bytes = count.after_bytes - count.before_bytes


class Turn:
    """A thread's turn in `OneAtATime`, until `end`, which any thread may call."""

    def __init__(self, turns: OneAtATime):
        self.thread = threading.current_thread()
        self.count = 1
        self._turns = turns

    def end(self) -> None:
        """Let others have theirs. Ends a turn that was begun several times as often."""
        self._turns.end(self)


class OneAtATime:
    """A lock that its thread may take again, that another thread may release, and that ends with its thread.

    A loop's step that is recorded or measured holds it from one of the loop's calls to another. If the loop fails in
    between, none comes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn: Turn | None = None

    def begin(self, waits: bool = True) -> Turn | None:
        """The thread's turn; None if it is another's, and the caller does not wait for it."""
        with self._changed:
            while self._turn is not None and self._turn.thread is not threading.current_thread():
                if not self._turn.thread.is_alive():
                    break
                if not waits:
                    return None
                self._changed.wait(_LOOK_S)
            if self._turn is not None and self._turn.thread is threading.current_thread():
                self._turn.count += 1
            else:
                self._turn = Turn(self)
            return self._turn

    def end(self, turn: Turn) -> None:
        """See `Turn.end`."""
        with self._changed:
            turn.count -= 1
            if not turn.count and self._turn is turn:
                self._turn = None
                self._changed.notify_all()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *_: object) -> None:
        if self._turn is not None:
            self._turn.end()


_APART_S = 1e-4
"""Far more than what the profiler's clock and Python's are apart."""

_LOOK_S = 1.0
"""After this time it is looked whether the thread whose turn it is has ended."""

ONE_AT_A_TIME = OneAtATime()
"""Held while torch's profiler runs: there is one per process, and two threads that use it at once break it."""


@contextmanager
def _measuring_cpu() -> Iterator[Taken]:
    starts_ns: list[int] = []

    def start_here() -> None:
        time.sleep(_APART_S)
        starts_ns.append(time.time_ns())
        time.sleep(_APART_S)

    taken = Taken(start_here)
    wait_for_gloo(gloo_threads(), _LOOKS)  # what they still hold would be freed within
    gc.collect()
    # No accumulation, shapes or stacks: they cost time and say nothing about memory.
    with (
        ONE_AT_A_TIME,
        _deaths_of_present_storages() as deaths,
        quiet_profiler(),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=False) as prof,
        gloo_unhurried(gloo_threads()),
    ):
        try:
            yield taken
        finally:
            wait_for_gloo(gloo_threads(), _LOOKS)  # see rule 5
    events = sorted([*_allocator_events(prof), *deaths], key=lambda event: event[0])
    time_ns = np.array([when for when, _ in events], dtype=np.int64)
    live_bytes = np.cumsum(np.array([delta for _, delta in events], dtype=np.int64))
    ops = cpu_ops(raw_events(prof))
    for start_ns in starts_ns[-1:]:
        first = int(np.searchsorted(time_ns, start_ns))
        live_bytes = live_bytes[first:] - (live_bytes[first - 1] if first else 0)
        time_ns, ops = time_ns[first:], [op for op in ops if op[0] >= start_ns]
    start_ns = time_ns[0] if len(time_ns) else 0
    taken.peak_above_start_bytes = int(live_bytes.max(initial=0))
    taken.end_above_start_bytes = int(live_bytes[-1]) if len(live_bytes) else 0
    taken.timeline = MeasuredTimeline(
        time_s=(time_ns - start_ns) * 1e-9,
        live_above_start_bytes=live_bytes,
        op_time_s=(np.array([when for when, _ in ops], dtype=np.int64) - start_ns) * 1e-9,
        op_names=tuple(name for _, name in ops),
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

    watches = [
        weakref.finalize(storage, record, storage.nbytes())
        for storage in present_storages(torch.device("cpu"))
    ]
    try:
        yield deaths
    finally:
        for watch in watches:
            watch.detach()


def present_storages(device: torch.device) -> list[torch.UntypedStorage]:
    """All storages on a device of this type that tensors known to Python hold, gradients included."""
    # isinstance() would read `__class__` of every object, and some import half a library then. The objects, some 10^5,
    # are of few types.
    objects = gc.get_objects()
    of_tensors = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = [o for o in objects if type(o) in of_tensors]
    del objects
    tensors += [gradient for t in tensors if (gradient := _gradient(t)) is not None]
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device.type:
            try:
                storages |= {key_of_storage(s): s for s in _storages(tensor) if s.device.type == device.type}
            # An opaque subclass without a storage of its own; one whose own code fails, as it is not made in full yet.
            except Exception:
                continue
    return list(storages.values())


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's `.grad` if it is a leaf."""
    try:
        return tensor.grad if tensor.is_leaf else None
    except RuntimeError:  # one of several views whose base was written in place since: any access raises
        return None
