"""Device-specific code: clock, memory, name, random numbers. CPU and CUDA each have a class here.

On any other kind (`OtherDevice`) neither clock nor memory is read: times are the host's, bytes those of the tensors.
For the ops that a device takes see `autoac.record.cuda.ops`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from autoac.torch_private import current_raw_stream, sleep_cycles
from autoac_solver.allocator.caching import BLOCK_BYTES, rounded_size
from autoac_solver.allocator.options import AllocatorOptions, options_in_environment, parse_options
from autoac_solver.records.devices import cuda_block_bytes
from autoac_solver.records.errors import AllocatorOptionsError

T = TypeVar("T")

_LEAD_S = 1e-4
"""Time that a GPU is kept busy for before a measurement, in addition to what launching takes."""
_CYCLES = 10**7
_CYCLES_PER_S: dict[torch.device, float] = {}
"""Clock rates of GPUs, measured once per process."""

RandomState = tuple[Callable[[Any], Any], Any]
"""A function that sets random states, and the states."""


class MemoryCount(NamedTuple):
    """Live bytes counted by the allocator: before a call, at the most during it, and after it."""

    before_bytes: int
    peak_bytes: int
    after_bytes: int


class Device(Protocol):
    """The interface of a device.

    Attributes:
        device: the torch device.
        known: whether autoac reads its clock and its memory.
        asynchronous: whether calls of ops return before the ops have run.
        memory_events: whether `torch.profiler` reports its allocations.
        counts_memory: whether its allocator counts live bytes, see `counted`.
        on_hosts_processors: whether its ops lose the time that the host loses to other processes.
        block_bytes: unit to which its allocator rounds sizes up.
        training_dtype: the dtype in which large models are trained on it.
        ruler: the name of the tool that measures its peak.
    """

    device: torch.device
    known: bool
    asynchronous: bool
    memory_events: bool
    counts_memory: bool
    on_hosts_processors: bool
    block_bytes: int
    training_dtype: torch.dtype
    ruler: str

    def name(self) -> str:
        """The model of a GPU, "" for other devices."""
        ...

    def is_here(self) -> bool:
        """Whether ops can be run on it."""
        ...

    def synchronize(self) -> None:
        """Wait until all launched work is done."""
        ...

    def now(self) -> float:
        """Seconds by the wall clock, after `synchronize`."""
        ...

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        """Result of a call, and its seconds by the device's own clock."""
        ...

    def keep_busy(self, seconds: float) -> None:
        """Occupy the current stream for about this time, without waiting for it; nothing on a synchronous device."""
        ...

    def launched_s(self, call: Callable[[], object], number: int, launching_s: float) -> float:
        """Seconds that the device itself takes for `number` calls in a row.

        Args:
            launching_s: `launching_s` of these calls, which the device is kept busy for before it comes to them.
        """
        ...

    def launching_s(self, call: Callable[[], object], number: int) -> float:
        """Host seconds of `number` calls in a row, 0 if calls return only when their ops have run."""
        ...

    def step_seconds(self, step: Callable[[], object]) -> tuple[float, float]:
        """Seconds of a step: on the device (on CPU, the process's CPU time), and by the wall clock."""
        ...

    def total_bytes(self) -> int:
        """Its total memory, 0 if unknown."""
        ...

    def free_bytes(self) -> int:
        """Free memory; the total where the system does not report it, as on macOS."""
        ...

    def allocated_bytes(self, size_bytes: int) -> int:
        """Bytes that its allocator takes for a request of this size."""
        ...

    def memory_allocated(self) -> int:
        """Live bytes of all tensors on it, if `counts_memory`."""
        ...

    def counted(self, call: Callable[[], T]) -> tuple[T, MemoryCount]:
        """Result of a call, and the allocator's count, if `counts_memory`. Does not synchronize."""
        ...

    def counting(self) -> contextlib.AbstractContextManager[list[MemoryCount]]:
        """`counted` as a context: the count is in the list after it."""
        ...

    def not_measurable(self) -> str:
        """Why its memory cannot be measured, "" if it can."""
        ...

    def release_cache(self) -> None:
        """Release the memory that its allocator caches."""
        ...

    def generator_devices(self) -> list[torch.device]:
        """Devices whose random state `torch.random.fork_rng` has to keep besides the CPU's."""
        ...


class _TimedByHost:
    """Base of CPU and unknown devices: the host's clock, and no count of memory."""

    asynchronous = False
    counts_memory = False
    block_bytes = 1
    training_dtype = torch.float32
    ruler = "the profiler's memory events"

    def __init__(self, device: torch.device):
        self.device = device

    def name(self) -> str:
        return ""

    def synchronize(self) -> None:
        return

    def now(self) -> float:
        return time.perf_counter()

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start

    def keep_busy(self, seconds: float) -> None:
        return

    def launched_s(self, call: Callable[[], object], number: int, launching_s: float) -> float:
        call()
        start = time.perf_counter()
        for _ in range(number):
            call()
        return time.perf_counter() - start

    def launching_s(self, call: Callable[[], object], number: int) -> float:
        return 0.0

    def step_seconds(self, step: Callable[[], object]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        return time.process_time() - cpu, time.perf_counter() - wall

    def total_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        if "SC_AVPHYS_PAGES" not in os.sysconf_names:
            return self.total_bytes()
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def allocated_bytes(self, size_bytes: int) -> int:
        return size_bytes

    def memory_allocated(self) -> int:
        raise NotImplementedError(f"nobody counts the bytes of all tensors on {self.device}")

    def counted(self, call: Callable[[], T]) -> tuple[T, MemoryCount]:
        raise NotImplementedError(f"the allocator of {self.device} keeps no count")

    def counting(self) -> contextlib.AbstractContextManager[list[MemoryCount]]:
        raise NotImplementedError(f"the allocator of {self.device} keeps no count")

    def release_cache(self) -> None:
        return

    def generator_devices(self) -> list[torch.device]:
        return []


class CpuDevice(_TimedByHost):
    """The host's processors and memory."""

    known = True
    memory_events = True
    on_hosts_processors = True

    def is_here(self) -> bool:
        return True

    def total_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def not_measurable(self) -> str:
        return ""


class OtherDevice(_TimedByHost):
    """A kind of device that autoac does not know (MPS, XPU, meta, ...)."""

    known = False
    memory_events = False
    on_hosts_processors = False

    def is_here(self) -> bool:
        return False

    def not_measurable(self) -> str:
        return f"cannot measure memory on {str(self.device)!r}: only on 'cpu' and 'cuda'"


class CudaDevice:
    """One GPU."""

    known = True
    asynchronous = True
    memory_events = False
    counts_memory = True
    on_hosts_processors = False
    block_bytes = BLOCK_BYTES
    training_dtype = torch.bfloat16
    ruler = "max_memory_allocated"

    def __init__(self, device: torch.device):
        self.device = device

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def is_here(self) -> bool:
        return torch.cuda.is_available()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def now(self) -> float:
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, call: Callable[[], T]) -> tuple[T, float]:
        start, end = self._recorded(), _event()
        result = call()
        self._record(end)
        end.synchronize()
        return result, start.elapsed_time(end) * 1e-3

    def launched_s(self, call: Callable[[], object], number: int, launching_s: float) -> float:
        call()
        # Without it kernels that are shorter than their launch would seem to take as long as that.
        self.keep_busy(2 * launching_s + _LEAD_S)
        start, end = self._recorded(), _event()
        for _ in range(number):
            call()
        self._record(end)
        end.synchronize()
        return start.elapsed_time(end) * 1e-3

    def keep_busy(self, seconds: float) -> None:
        with torch.cuda.device(self.device):
            sleep_cycles(int(seconds * self._cycles_per_s()))

    def _cycles_per_s(self) -> float:
        if self.device not in _CYCLES_PER_S:
            sleep_cycles(_CYCLES)  # the first launch takes longer
            _, seconds = self.timed(lambda: sleep_cycles(_CYCLES))
            _CYCLES_PER_S[self.device] = _CYCLES / seconds
        return _CYCLES_PER_S[self.device]

    def launching_s(self, call: Callable[[], object], number: int) -> float:
        call()
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(number):
            call()
        elapsed = time.perf_counter() - start  # the device may not have begun with the last ones
        torch.cuda.synchronize(self.device)
        return elapsed

    def step_seconds(self, step: Callable[[], object]) -> tuple[float, float]:
        torch.cuda.synchronize(self.device)
        wall = time.perf_counter()
        start, end = self._recorded(), _event()
        step()
        self._record(end)
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) * 1e-3, time.perf_counter() - wall

    def _recorded(self) -> torch.cuda.Event:
        event = _event()
        self._record(event)
        return event

    def _record(self, event: torch.cuda.Event) -> None:
        """Record an event on this device; by default it would be recorded on the current one, which may be another."""
        event.record(torch.cuda.current_stream(self.device))

    def total_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).total_memory

    def free_bytes(self) -> int:
        # What the allocator has reserved and not handed out (after a step, or one that ran out of memory) is free, too.
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def allocated_bytes(self, size_bytes: int) -> int:
        if not size_bytes:
            return 0
        options = _allocator_options(options_in_environment())
        rounded = rounded_size(size_bytes, options)
        if options.expandable_segments:
            return rounded
        is_whole = options.max_split_bytes is not None and rounded >= options.max_split_bytes
        return cuda_block_bytes(rounded, is_whole)

    def memory_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def counted(self, call: Callable[[], T]) -> tuple[T, MemoryCount]:
        with self.counting() as count:
            result = call()
        return result, count[0]

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[MemoryCount]]:
        count: list[MemoryCount] = []
        # The allocator counts on the host, when memory is requested.
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        yield count
        after = torch.cuda.memory_allocated(self.device)
        count.append(MemoryCount(before, torch.cuda.max_memory_allocated(self.device), after))

    def not_measurable(self) -> str:
        count = torch.cuda.device_count()
        if (self.device.index or 0) < count:
            return ""
        return f"cannot measure memory on {str(self.device)!r}: torch finds {count} CUDA devices here"

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def generator_devices(self) -> list[torch.device]:
        return [self.device]


@functools.cache
def _allocator_options(text: str) -> AllocatorOptions:
    """The options of CUDA's allocator in an environment variable's text."""
    try:
        return parse_options(text)
    except AllocatorOptionsError:  # others than those that are simulated; a plan's notes name them
        return AllocatorOptions()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class Streams:
    """CUDA streams of this process: the current stream of this thread, and synchronisation between streams.

    A stream's key is the index of its GPU and its address.
    """

    def key(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Key of the current stream of the tensor's GPU, None if the tensor is on no GPU."""
        if not tensor.is_cuda:
            return None
        index = tensor.get_device()
        return index, current_raw_stream(index)

    def current(self, index: int) -> Any:
        """The current stream of a GPU, for the other methods."""
        return torch.cuda.current_stream(index)

    def is_current(self, index: int, raw: int) -> bool:
        """Whether this GPU is the current one, and the stream with this address its current stream."""
        return torch.cuda.current_device() == index and current_raw_stream(index) == raw

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which this stream is the current one."""
        return torch.cuda.stream(stream)

    def hand_over(self, tensor: torch.Tensor, stream: Any) -> None:
        """Make later work on the current stream see the values that another stream has written to a tensor.

        The allocator does not reuse the memory before that work is done.
        """
        current = torch.cuda.current_stream(tensor.get_device())
        current.wait_stream(stream)
        tensor.record_stream(current)

    def settle(self, indices: Iterable[int]) -> None:
        """Wait for all work on all streams of these GPUs."""
        for index in indices:
            torch.cuda.synchronize(index)

    def has(self, generator: torch.Generator) -> bool:
        """Whether a generator is a GPU's."""
        return generator.device.type == "cuda"

    def capturing(self) -> bool:
        """Whether the current stream is captured into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()


_STREAMS = Streams()


def streams() -> Streams | None:
    """The streams of GPUs; None if CUDA is not in use, and ops run synchronously."""
    return _STREAMS if torch.cuda.is_initialized() else None


KINDS: dict[str, type[CpuDevice | CudaDevice]] = {"cpu": CpuDevice, "cuda": CudaDevice}
"""The kinds of devices that autoac knows, by torch's name."""


@functools.cache
def device_for(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return KINDS.get(device.type, OtherDevice)(device)


def cuda_of_build() -> str | None:
    """The CUDA version that this torch was built for, None for a build without CUDA."""
    return torch.version.cuda


def current_device(kind: str) -> torch.device | None:
    """The default device of a kind, None if this machine has none.

    Args:
        kind: "cpu" or "cuda".
    """
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return torch.device(kind)


def gpu_random_states() -> list[RandomState]:
    """The random states of all GPUs, none if CUDA has not been initialised."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return [(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())]
    return []


def processor() -> str:
    """The name of the host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
