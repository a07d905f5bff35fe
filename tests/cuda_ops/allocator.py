"""Torch's caching allocator, on the stand-in's memory, and our simulation of it, given the same calls.

The allocator is host code: it asks the driver for segments, and here the stand-in gives it addresses. What it hands out
and reserves after each call is compared. Events are over at once on the stand-in, so a block that another stream has
used is free at the next allocation.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac_solver.allocator.caching import CachingAllocator, OutOfReservedMemory
from autoac_solver.allocator.options import MIB, parse_options

STEPS = 1500
OPTIONS = (
    *("", "max_split_size_mb:24", "max_split_size_mb:24,max_non_split_rounding_mb:40"),
    *("roundup_power2_divisions:4", "roundup_power2_divisions:[1:4,2:8,4:2]", "large_segment_size_mb:32"),
    *("expandable_segments:True", "expandable_segments:True,roundup_power2_divisions:8"),
    "expandable_segments:True,large_segment_size_mb:64",
    *("per_process_memory_fraction:0.004", "per_process_memory_fraction:0.004,max_split_size_mb:24"),
    "per_process_memory_fraction:0.004,expandable_segments:True",
    "per_process_memory_fraction:0.006,garbage_collection_threshold:0.5",
)
Call = tuple[str, int, int]


def calls(seed: int) -> Iterator[Call]:
    """What to do, how much or to which block, and on which stream."""
    dice = random.Random(seed)
    there = 0
    for _ in range(STEPS):
        if there and dice.random() < 0.47:
            yield ("free" if dice.random() < 0.9 else "free after use elsewhere"), dice.randrange(there), 0
            there -= 1
        elif dice.random() < 0.01:
            yield "empty_cache", 0, 0
        else:
            top = dice.choice([2**12, MIB, 4 * MIB, 24 * MIB, 64 * MIB])
            yield "malloc", dice.randint(1, top), int(dice.random() < 0.2)
            there += 1  # where it does not fit, something stands for it


def differs(options: str, seed: int) -> str:
    """Where the two differ first, "" if nowhere; in a process that has not used CUDA."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = options
    total = torch.cuda.get_device_properties(0).total_memory
    ours = CachingAllocator(parse_options(options), total)
    streams = torch.cuda.default_stream(), torch.cuda.Stream()
    blocks: list[tuple[Any, Any, int]] = []
    for step, (what, which, stream) in enumerate(calls(seed)):
        if what == "malloc":
            with torch.cuda.stream(streams[stream]):
                tensor = _or_none(lambda size=which: torch.empty(size, dtype=torch.uint8, device="cuda"))
            for waited in (0, 1):
                ours.stream_done(waited)
            block = _or_none(lambda size=which, on=stream: ours.malloc(size, on))
            if (tensor is None) is not (block is None):
                return f"call {step}, {what} {which}: torch {'fails' if tensor is None else 'does it'}, we do not agree"
            blocks.append((tensor, block, stream))
        elif what == "empty_cache":
            torch.cuda.empty_cache()
            ours.empty_cache()
        else:
            tensor, block, of = blocks.pop(which)
            if tensor is not None and what != "free":
                tensor.record_stream(streams[1 - of])
                ours.record_stream(block, 1 - of)
            ours.free(block)
            del tensor
        torchs = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        if torchs != (ours.allocated_bytes, ours.reserved_bytes):
            return (
                f"call {step}, {what} {which}: torch has allocated {torchs[0]} and reserved {torchs[1]}, we "
                f"{ours.allocated_bytes} and {ours.reserved_bytes}"
            )
    if (peak := torch.cuda.max_memory_reserved()) != ours.peak_reserved_bytes:
        return f"torch reserved {peak} at most, we {ours.peak_reserved_bytes}"
    return ""


def _or_none(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (torch.OutOfMemoryError, OutOfReservedMemory):
        return None


def compared(seeds: int = 3) -> int:
    """How many sequences differ; prints each that does. Each is run in a process of its own, forked from this one."""
    different = 0
    for options in OPTIONS:
        for seed in range(seeds):
            sys.stdout.flush()
            if not (child := os.fork()):
                try:
                    found = differs(options, seed)
                    if found:
                        print(f"allocator {options!r}, seed {seed}: {found}", flush=True)
                    os._exit(bool(found))
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            different += code != 0
            if code not in (0, 1):
                print(f"allocator {options!r}, seed {seed}: ended with {code}", flush=True)
    print(f"allocator: {seeds * len(OPTIONS)} sequences of {STEPS} calls, {different} differ", flush=True)
    return different


if __name__ == "__main__":
    sys.exit(bool(compared()))
