"""Measures times and workspaces of ops, which a tape cannot see.

Both are measured by signature (overload, shapes, strides, dtypes, scalars), so identical layers are measured once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from autoac.device import device_for
from autoac.ops.generators import set_state, state_of
from autoac.ops.info import OpInfo, is_collective, written_tensors
from autoac.ops.signatures import Signature
from autoac.torch_private import AllocationRanges, HigherOrderOperator, default_generator, is_wait
from autoac_solver.records.profile import UNSTEADY

T = TypeVar("T")

_BATCHES, _LAUNCHES = 3, 4
_MOST_WAITING = 0.1
_MOST_STOLEN = 0.1
_MOST_SPREAD = 0.5
"""Measured waiting and spread: 0.01 and 0.1 on a quiet machine (0.2 for small models), 0.3 and up to 3 beside one busy
program on two cores."""
_LONG_S = 1e-3
"""A call that takes less is seldom interrupted: waiting is rather that of reading these numbers."""
_MOST_COUNTED = 0.95
"""What is left of a call that waited longer is within the error of the two clocks."""
_ENOUGH = 2
"""With this many samples from an op's place in the step, samples from repeated runs are not used."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Measured time of an op, seconds.

    Args:
        time_s: median of its runs.
        spread_s: distance between their quartiles.
        rerun_s: median of its runs in backward, in the replay of a region, where its inputs are seldom in a cache.
        time_from: see `autoac_solver.records.profile.TIMES_FROM`.
        host_s: host time of a launch, 0 if the op has run when its call returns.
    """

    time_s: float
    spread_s: float
    rerun_s: float
    time_from: str = "measured"
    host_s: float = 0.0

    @classmethod
    def estimated(cls, seconds: float, host_s: float = 0.0) -> OpTime:
        """A time that was not measured."""
        return cls(seconds, 0.0, 0.0, "estimated", host_s)


class WorkspaceMeter:
    """Runs ops and measures the most bytes that are alive inside each, on top of what it leaves behind.

    On CPU by the profiler's allocation events, on CUDA by the allocator's own peak; use it within `measuring()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._known = device_for(device)
        self.workspace_bytes: dict[Signature, int] = {}
        self._ranges: AllocationRanges | None = None
        self._names: dict[str, Signature] = {}

    @property
    def inside(self) -> WorkspaceMeter:
        """The meter of the ops inside of a higher-order op."""
        return self

    @contextmanager
    def measuring(self) -> Iterator[WorkspaceMeter]:
        """Context in which `run` measures; the results are available after it."""
        if not self._known.memory_events:
            yield self
            return
        with AllocationRanges() as self._ranges:
            yield self
        for name, deltas in self._ranges.deltas.items():
            signature = self._names[name]
            found = _peak(deltas) if isinstance(signature.func, HigherOrderOperator) else _workspace(deltas)
            self.workspace_bytes[signature] = max(self.workspace_bytes[signature], found)

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, Signature]:
        """Run the op once; measure it if its signature is new. Returns its result and signature."""
        signature = Signature.of(func, args, kwargs)
        if signature in self.workspace_bytes:
            return func(*args, **kwargs), signature
        self.workspace_bytes[signature] = 0
        if is_collective(info.name):  # a backend allocates in threads of its own: not counted
            return func(*args, **kwargs), signature
        if self._ranges is not None:
            name = f"autoac workspace {len(self._names)}"
            self._names[name] = signature
            with self._ranges.range(name):
                return func(*args, **kwargs), signature
        if self._known.counts_memory:
            result, count = self._known.counted(lambda: func(*args, **kwargs))
            self.workspace_bytes[signature] = count.peak_bytes - max(count.before_bytes, count.after_bytes)
            return result, signature
        return func(*args, **kwargs), signature

    def run_inside(
        self, signature: Signature, func: Any, args: Any, kwargs: Any, least_bytes: int = 0
    ) -> Any:
        """Run a higher-order op, and measure the most bytes alive inside of it above those at its start.

        Equal calls may run different branches, so that each is measured; the most counts.

        Args:
            signature: the op with its tensors.
            least_bytes: what is known to have been alive before it was called.
        """
        self.workspace_bytes[signature] = max(self.workspace_bytes.get(signature, 0), least_bytes)
        if self._ranges is not None:
            name = f"autoac workspace {len(self._names)}"
            self._names[name] = signature
            with self._ranges.range(name):
                return func(*args, **kwargs)
        if self._known.counts_memory:
            result, count = self._known.counted(lambda: func(*args, **kwargs))
            found = count.peak_bytes - count.before_bytes
            self.workspace_bytes[signature] = max(self.workspace_bytes[signature], found)
            return result
        return func(*args, **kwargs)


def _peak(deltas: list[int]) -> int:
    return max(itertools.accumulate(deltas, initial=0))


def _workspace(deltas: list[int]) -> int:
    return _peak(deltas) - max(sum(deltas), 0)


class SignatureMeter:
    """Runs ops and measures nothing: for fake tensors, whose ops take no real time."""

    inside: WorkspaceMeter | None = None

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, Signature]:
        """Run the op; returns its result and signature."""
        # To wait for a tensor returns it; on fake tensors it would make another one.
        result = args[0] if is_wait(func) else func(*args, **kwargs)
        return result, Signature.of(func, args, kwargs)


class OpTimer:
    """Runs ops and measures their times.

    An op is timed at its place in the step: its inputs are not in a cache that a repeated run has just filled (for
    elementwise ops on CPU a difference of half the time). Identical layers give several such samples. For an op that
    has few, repeated runs are added at the first call of its signature; each result is dropped before the next run.
    They take the op's real arguments, but copies of those that it writes, and restore the random state. On CUDA only
    repeated runs count: a single launch is over before the host has timed it.
    """

    inside: WorkspaceMeter | None = None

    def __init__(self, device: torch.device):
        self.device = device
        self.known = device_for(device)
        self.samples: dict[Signature, list[float]] = {}
        self.repeated: dict[Signature, list[float]] = {}
        self.reruns: dict[Signature, list[float]] = {}
        self.hosts: dict[Signature, float] = {}
        self._replayed_as: dict[Signature, Signature] = {}  # batch norms: replayed without statistics

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, Signature]:
        """Run the op; returns its result and signature."""
        signature = Signature.of(func, args, kwargs)
        if self.repeats(signature, func, info, args, kwargs):
            return func(*args, **kwargs), signature  # not timed: its inputs are in the caches
        return self.time_of(signature, func, args, kwargs), signature

    def time_of(self, signature: Signature, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op and count its time, unless it raises, which the caller may catch; returns its result."""
        samples: list[float] = []
        result, _ = self.time(func, args, kwargs, samples)
        self.samples.setdefault(signature, []).extend(samples)
        return result

    def repeats(self, signature: Signature, func: Any, info: OpInfo, args: Any, kwargs: Any) -> bool:
        """Time repeated runs of an op if its signature is new; returns whether that was done."""
        if info.statistics is not None:
            plain = [None if i in info.statistics[:2] else value for i, value in enumerate(args)]
            self._replayed_as[signature] = Signature.of(func, plain, kwargs)
        if signature in self.repeated or not _repeatable(func, info, args):
            return False
        try:
            self.repeated[signature] = self._repeated(signature, func, info, args, kwargs)
        except (
            torch.OutOfMemoryError
        ):  # copies of what it writes do not fit beside the step: it is timed as it runs
            self.repeated[signature] = []
            return False
        return True

    def _repeated(self, signature: Signature, func: Any, info: OpInfo, args: Any, kwargs: Any) -> list[float]:
        with scratch_arguments(info, args, kwargs, self.device) as (args, kwargs):
            first = self.time(func, args, kwargs, [])[1]  # the first run of a shape may set things up
            if self.known.asynchronous:
                host_s = self.hosts[signature] = self.launching_s(func, args, kwargs)
                return self.launched(func, args, kwargs, host_s)
            samples: list[float] = []
            for _ in range(_repeats(first)):
                self.time(func, args, kwargs, samples)
            return samples

    def rerun(self, signature: Signature, run: Callable[[], Any]) -> Any:
        """Run an op once more in backward."""
        return self.time(run, (), {}, self.reruns.setdefault(signature, []))[0]

    def time(self, func: Any, args: Any, kwargs: Any, samples: list[float]) -> tuple[Any, float]:
        """Run an op, add its time to the samples, and return its result and the time."""
        result, elapsed = self.known.timed(functools.partial(func, *args, **kwargs))
        samples.append(elapsed)
        return result, elapsed

    def launched(self, func: Any, args: Any, kwargs: Any, host_s: float) -> list[float]:
        """Device seconds per launch, from several in a row.

        Args:
            host_s: what `launching_s` returned.
        """
        call = functools.partial(func, *args, **kwargs)
        launching_s = _LAUNCHES * host_s
        return [self.known.launched_s(call, _LAUNCHES, launching_s) / _LAUNCHES for _ in range(_BATCHES)]

    def launching_s(self, func: Any, args: Any, kwargs: Any) -> float:
        """Host seconds per launch."""
        call = functools.partial(func, *args, **kwargs)
        return min(self.known.launching_s(call, _LAUNCHES) / _LAUNCHES for _ in range(_BATCHES))

    def times(self) -> dict[Signature, OpTime]:
        """The times by signature."""
        times = {}
        # Ops that cannot be repeated get the median host time of the others.
        usual_s = statistics.median(self.hosts.values()) if self.hosts else 0.0
        for signature in dict.fromkeys((*self.samples, *self.repeated)):
            samples, reruns = self.samples.get(signature, []), self.reruns
            repeated = self.repeated.get(signature, [])
            if not samples and not repeated:
                continue  # repeated runs had no memory, and then the op raised
            if self.known.asynchronous and repeated:
                samples, reruns = repeated, {}
            elif len(samples) < _ENOUGH:
                samples = samples + repeated
            time_s = statistics.median(samples)
            replayed_as = self._replayed_as.get(signature, signature)
            rerun_s = statistics.median(reruns.get(replayed_as, [time_s]))
            host_s = self.hosts.get(signature, usual_s)
            times[signature] = OpTime(time_s, spread(samples), rerun_s, host_s=host_s)
        return times


@contextmanager
def scratch_arguments(
    info: OpInfo, args: Any, kwargs: Any, device: torch.device
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Context with arguments for extra runs of an op: writes go to copies, and generators are restored.

    Args:
        device: its generator is the one that the op draws from if it is given none.
    """
    generators: list[torch.Generator] = []
    if info.unknown or info.draws_random(args):  # a custom op need not declare it
        own = info.generator(args, kwargs)
        generators = [
            default_generator(torch.device("cpu")),
            default_generator(device),
            *([own] if own else []),
        ]
    states = [state_of(generator) for generator in generators]
    copies = {id(tensor): tensor.clone() for tensor in written_tensors(info, args, kwargs)}

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [replaced(item) for item in value]
        return copies.get(id(value), value)

    try:
        yield list(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def spread(samples: list[float]) -> float:
    """Distance between the quartiles, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low


def _own_schedstat() -> Path:
    return Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")


def waited_s(files: Iterable[Path] | None = None) -> float:
    """Seconds that threads were ready to run and had no processor, 0 where that is not counted.

    Source: the second number of Linux's `/proc/<pid>/task/<tid>/schedstat`.

    Args:
        files: those of the threads; None for all of this process.
    """
    waited_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat") if files is None else files:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            waited_ns += int(file.read_text().split()[1])
    return waited_ns * 1e-9


def stolen_s() -> float:
    """CPU seconds, of all processors, that a virtual machine's host has given to others, 0 where that is not counted.

    Source: "steal" of Linux's `/proc/stat`.
    """
    try:
        total = Path("/proc/stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    return int(total[8]) * _tick_s() if len(total) > 8 else 0.0


def _tick_s() -> float:
    """The unit that `stolen_s` is counted in, seconds."""
    return 1 / os.sysconf("SC_CLK_TCK")


class Disturbance:
    """Measures how much this process was kept from running since the object was made."""

    def __init__(self) -> None:
        self._started, self._waited_s, self._stolen_s = time.perf_counter(), waited_s(), stolen_s()

    def _elapsed_s(self) -> float:
        return max(time.perf_counter() - self._started, 1e-9)

    @property
    def waited_share(self) -> float:
        """`waited_s` per torch thread, as a share of the elapsed time."""
        return (waited_s() - self._waited_s) / self._elapsed_s() / torch.get_num_threads()

    @property
    def stolen_share(self) -> float:
        """`stolen_s` as a share of all processors' time, less one tick, which may have begun before."""
        stolen = stolen_s() - self._stolen_s
        if not stolen:  # or it is not counted, and there is no tick length
            return 0.0
        return max(0.0, stolen - _tick_s()) / self._elapsed_s() / (os.cpu_count() or 1)


def without_waiting(timed: Callable[[], tuple[T, float]], device: torch.device) -> tuple[T, float]:
    """Result and seconds of a timed call, without those in which this thread waited for a processor.

    Beside a busy program these make up most of a long call, and none of an op that takes microseconds.
    """
    start, before_s = time.perf_counter(), waited_s([_own_schedstat()])
    result, seconds = timed()
    waited = waited_s([_own_schedstat()]) - before_s
    elapsed = time.perf_counter() - start
    if device_for(device).on_hosts_processors and seconds > _LONG_S:
        seconds *= 1 - min(waited / elapsed, _MOST_COUNTED)
    return result, seconds


def unsteady(times: Iterable[OpTime], waited_share: float, stolen_share: float) -> str:
    """Why these times are unreliable, "" if they are not.

    Args:
        times: of the distinct ops.
        waited_share, stolen_share: see `Disturbance`.
    """
    known = list(times)
    total_s = sum(op.time_s for op in known)
    differ = sum(op.spread_s for op in known) / total_s if total_s else 0.0
    reasons = []
    if waited_share > _MOST_WAITING:
        reasons.append(f"its threads waited for a processor for {waited_share:.0%} of the time")
    if stolen_share > _MOST_STOLEN:
        reasons.append(f"the machine's host gave {stolen_share:.0%} of the processors' time to others")
    if differ > _MOST_SPREAD:
        reasons.append(f"runs of the same op differ by {differ:.0%} (between their quartiles)")
    if not reasons or not known:
        return ""
    return f"{UNSTEADY}, {' and '.join(reasons)}: profile on a quiet machine before relying on them"


def _repeatable(func: Any, info: OpInfo, args: Any) -> bool:
    """Whether an op can be rerun without a trace; custom ops that write or draw may do more than they declare."""
    pure = not info.writes and not info.random and not info.updates_statistics(args)
    return info.replayable and (pure or func.namespace == "aten")


def _repeats(first_s: float) -> int:
    """Number of repeated runs: more for short ops, so that profiling takes no longer than a few steps."""
    return max(1, min(5, int(0.1 / max(first_s, 1e-6))))
