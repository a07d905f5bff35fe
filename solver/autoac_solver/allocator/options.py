"""The options of CUDA's caching allocator, parsed as torch parses `PYTORCH_CUDA_ALLOC_CONF`.

Sources: `c10/core/AllocatorConfig.h` and `.cpp`, `c10/cuda/CUDAAllocatorConfig.h` and `.cpp` in torch (2.13), and
"Memory management" in torch's CUDA notes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autoac_solver.records.errors import AllocatorOptionsError

MIB = 2**20
DEFAULT_LARGE_SEGMENT_BYTES = 20 * MIB
_INTERVALS = 16
"""Number of size intervals, at powers of two from 1 MiB on; each has its own divisions."""
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables, in the order in which torch's CUDA allocator reads them (`CUDAAllocatorConfig::instance`)."""


@dataclass(frozen=True, slots=True)
class AllocatorOptions:
    """The options that affect reserved memory.

    Args:
        large_segment_bytes: size of segments for allocations above 1 MiB and below 10 MiB.
        max_split_bytes: blocks of at least this size are not split; None splits all.
        max_non_split_rounding_bytes: a block above `max_split_bytes` must exceed the requested size by less than this.
        roundup_power2_divisions: number of parts between two powers of two to which sizes are rounded up, one entry
            each for 1 MiB, 2 MiB and so on; 0 and 1 do not round.
        garbage_collection_threshold: share of the memory limit above which unused blocks are released; 0: never. As in
            torch it has no effect without `memory_fraction`.
        expandable_segments: segments grow; no new ones are requested.
        memory_fraction: share of the device's memory that the process may reserve; 1.0 is no limit.
    """

    large_segment_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = DEFAULT_LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    memory_fraction: float = 1.0

    def divisions(self, size: int) -> int:
        """The divisions of the interval that contains a size."""
        interval = size.bit_length() - MIB.bit_length()
        return self.roundup_power2_divisions[min(max(interval, 0), _INTERVALS - 1)]


def options_in_environment(environment: Mapping[str, str] | None = None) -> str:
    """The option text that torch would use, "" for none.

    Args:
        environment: environment variables; None for those of this process.
    """
    environment = os.environ if environment is None else environment
    return next((environment[name] for name in _VARIABLES if name in environment), "")


def parse_options(text: str) -> AllocatorOptions:
    """Parse the options.

    Args:
        text: such as "expandable_segments:True,max_split_size_mb:128".

    Raises:
        AllocatorOptionsError: an option is unknown, has a value that torch rejects, or selects another allocator.
    """
    options = AllocatorOptions()
    given: set[str] = set()
    for name, value in _pairs(text):
        if name in _READERS:
            options = _READERS[name](options, name, value)
        elif name in _WITHOUT_EFFECT:
            _WITHOUT_EFFECT[name](name, value)
        else:
            known = ", ".join(sorted({*_READERS, *_WITHOUT_EFFECT}))
            raise AllocatorOptionsError(
                f"the allocator's options have {name!r}, whose effect on reserved memory is not known; known are "
                f"{known}."
            )
        given.add(name)
    if "max_non_split_rounding_mb" not in given:
        options = replace(options, max_non_split_rounding_bytes=options.large_segment_bytes)
    for name, size in (
        ("max_split_size_mb", options.max_split_bytes),
        ("max_non_split_rounding_mb", options.max_non_split_rounding_bytes),
    ):
        if size is not None and size < options.large_segment_bytes:
            raise AllocatorOptionsError(
                f"{name} must be at least {options.large_segment_bytes // MIB}, the size of a large segment."
            )
    return options


def same_options(one: str, other: str) -> bool:
    """Whether two texts are the same options; a text that is not understood is the same as itself only."""
    try:
        return one == other or parse_options(one) == parse_options(other)
    except AllocatorOptionsError:
        return False


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Split into names and values; a value in brackets keeps its commas."""
    rest = "".join(text.split())
    while rest:
        name, colon, rest = rest.partition(":")
        if rest.startswith("["):
            value, bracket, rest = rest[1:].partition("]")
            value = f"[{value}"
            if not bracket or (rest and not rest.startswith(",")):
                raise AllocatorOptionsError(f"the value of {name} does not end with ']'.")
            rest = rest[1:]
        else:
            value, _, rest = rest.partition(",")
        if not name or not colon or not value:
            raise AllocatorOptionsError(
                f"the allocator's options {text!r:.200} are not of the form 'name:value,name:value'."
            )
        yield name, value


# -- values ----------------------------------------------------------------------------------------------------------


def _flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise AllocatorOptionsError(f"{name} is {value!r}; possible are True and False.")
    return value == "True"


def _whole(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise AllocatorOptionsError(f"{name} is {value!r}, which is no whole number.")
    return int(value)


def _share(name: str, value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise AllocatorOptionsError(f"{name} is {value!r}, which is no share between 0 and 1.")
    return share


def _power_of_two(name: str, value: str) -> int:
    number = _whole(name, value)
    if not number or number & (number - 1):
        raise AllocatorOptionsError(f"{name} has {value!r}, which is no power of two.")
    return number


def _large_segment(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    size = _whole(name, value)
    if size <= 10:
        raise AllocatorOptionsError(f"{name} must be greater than 10.")
    return replace(options, large_segment_bytes=size * MIB)


def _max_split(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    return replace(options, max_split_bytes=_whole(name, value) * MIB)


def _rounding(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    return replace(options, max_non_split_rounding_bytes=_whole(name, value) * MIB)


def _threshold(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    share = _share(name, value)
    if share == 1:
        raise AllocatorOptionsError(f"{name} must be less than 1.")
    return replace(options, garbage_collection_threshold=share)


def _expandable(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    return replace(options, expandable_segments=_flag(name, value))


def _fraction(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    return replace(options, memory_fraction=_share(name, value))


def _divisions(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    """One number for all intervals, or "[256:1,512:2,>:4".

    Intervals below the first one named get its divisions; ">" sets the rest.
    """
    if not value.startswith("["):
        return replace(options, roundup_power2_divisions=(_power_of_two(name, value),) * _INTERVALS)
    divisions, last = list(options.roundup_power2_divisions), None
    for part in value[1:].split(","):
        interval, _, number = part.partition(":")
        count = 0 if number == "0" else _power_of_two(name, number)
        if interval == ">":
            first = 0 if last is None else last
            divisions[first:] = [count] * (_INTERVALS - first)
            continue
        index = min(_power_of_two(name, interval).bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [count] * index
        divisions[index] = count
        last = index
    return replace(options, roundup_power2_divisions=tuple(divisions))


def _backend(options: AllocatorOptions, name: str, value: str) -> AllocatorOptions:
    if value != "native":
        raise AllocatorOptionsError(
            f"{name} is {value!r}: what another allocator than torch's native one reserves is not simulated."
        )
    return options


_READERS: dict[str, Callable[[AllocatorOptions, str, str], AllocatorOptions]] = {
    "large_segment_size_mb": _large_segment,
    "max_split_size_mb": _max_split,
    "max_non_split_rounding_mb": _rounding,
    "garbage_collection_threshold": _threshold,
    "roundup_power2_divisions": _divisions,
    "expandable_segments": _expandable,
    "per_process_memory_fraction": _fraction,
    "backend": _backend,
}

# Options about locks, CUDA graphs and pinned host memory: they do not affect memory reserved on the device.
_WITHOUT_EFFECT: dict[str, Callable[[str, str], object]] = {
    "release_lock_on_cudamalloc": _flag,
    "throw_on_cudamalloc_oom": _flag,
    "graph_capture_record_stream_reuse": _flag,
    "pinned_use_cuda_host_register": _flag,
    "pinned_use_background_threads": _flag,
    "pinned_free_catch_all": _flag,
    "pinned_num_register_threads": _power_of_two,
    "pinned_reserve_segment_size_mb": _whole,
    "pinned_max_round_threshold_mb": _whole,
    "pinned_max_cached_size_mb": _whole,
}
