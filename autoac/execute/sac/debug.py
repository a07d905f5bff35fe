"""Find the op in which a region's second run differs from its first, for `set_checkpoint_debug_enabled(True)`.

Torch's own checkpoint debugging cannot be combined with a policy (it refuses). So engine sac keeps a log of its own:
the ops of both runs, with shapes, modules and lines of the user's code. It takes time, so it is kept only on request.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointError, set_checkpoint_debug_enabled

from autoac.ops.info import op_info, read_tensors
from autoac.torch_private import (
    TorchDispatchMode,
    checkpoint_debug_enabled,
    is_sharded_type,
    is_wait,
    on_fake_tensors,
)
from autoac_solver.records.names import region_in_words

_CHECKPOINT = torch.utils.checkpoint.__file__

_SHOWN = 12
"""Number of ops to show on each side of a difference; the others are only counted."""


def debugging() -> bool:
    """Whether the user has switched checkpoint debugging on."""
    return bool(checkpoint_debug_enabled())


@contextlib.contextmanager
def hidden_from_torch() -> Iterator[contextlib.ExitStack]:
    """Context without torch's debugging, under which it refuses policies; close the stack once torch has checked."""
    with contextlib.ExitStack() as off:
        off.enter_context(set_checkpoint_debug_enabled(False))
        yield off


@dataclass(frozen=True, slots=True)
class Entry:
    """An op that ran: its name, the shapes and dtypes of its inputs, the module, and the user's line."""

    name: str
    reads: tuple[str, ...]
    module: str
    line: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (f"module {self.module!r}" if self.module else "", self.line)))
        return f"{self.name}({', '.join(self.reads)})" + (f"  in {where}" if where else "")

    def same(self, other: Entry) -> bool:
        """Whether both are the same op on tensors of the same shapes and dtypes."""
        return self.name == other.name and self.reads == other.reads


class OpLog(TorchDispatchMode):
    """Logs the ops that run under it, except kinds of which checkpointing adds its own.

    Args:
        region: name of the region, the module that runs first under it.
    """

    supports_higher_order_operators = True

    def __init__(self, region: str):
        super().__init__()
        self.region = region
        self.entries: list[Entry] = []
        self.depth = 0

    def __enter__(self) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename != _CHECKPOINT:
            frame = frame.f_back
        while frame.f_back is not None and frame.f_back.f_code.co_filename == _CHECKPOINT:
            frame = frame.f_back
        self.depth = _depth(frame)  # stack depth of torch's checkpoint, which calls the region
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_sharded_type, types)):
            return NotImplemented  # the ops on the local parts are logged
        if on_fake_tensors():
            return func(*args, **kwargs)
        if func not in SAC_IGNORED_OPS and not is_wait(func):
            info = op_info(func)
            reads = tuple(map(_described, read_tensors(info, args, kwargs)))
            module, line = self._where()
            self.entries.append(Entry(info.name, reads, module, line))
        return func(*args, **kwargs)

    def _where(self) -> tuple[str, str]:
        """The innermost running module, named from the region on, and the innermost line outside torch."""
        frames: list[FrameType] = []
        frame = sys._getframe(2)
        while frame is not None and _depth(frame) > self.depth:
            frames.append(frame)
            frame = frame.f_back
        modules = [
            module
            for f in reversed(frames)
            if f.f_code.co_name == "forward" and isinstance(module := f.f_locals.get("self"), torch.nn.Module)
        ]
        name = self.region
        if modules:
            inner = next(
                (n for n, m in modules[0].named_modules() if m is modules[-1]), type(modules[-1]).__name__
            )
            name = ".".join(filter(None, (self.region, inner)))
        user = next((f for f in frames if "/torch/" not in f.f_code.co_filename), None)
        line = "" if user is None else f"{user.f_code.co_filename}:{user.f_lineno}"
        return name, line


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _depth(frame: FrameType | None) -> int:
    depth = 0
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def compared(first: OpLog, second: OpLog, whole: bool) -> CheckpointError | None:
    """The error that names the first differing op; None if the second run ran the same ops as the first.

    Args:
        whole: whether the second run was complete; if not, early stop has cut it short.
    """
    a, b = first.entries, second.entries
    position = next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not x.same(y)), min(len(a), len(b))
    )
    if position == len(b) and (position == len(a) or not whole):
        return None
    ran = str(a[position]) if position < len(a) else "at its end"
    again = str(b[position]) if position < len(b) else "at its end"
    return CheckpointError(
        f"{region_in_words(first.region)} did not do in its second run, for backward, what it did in forward. They "
        f"differ first at op {position + 1}:\n"
        f"  forward:     {ran}\n"
        f"  second run:  {again}\n"
        "A second run must find everything as forward did: global state, counters, generators of its own "
        'are not put back. Plan with engine="replay", which runs no code twice, or keep this region from being '
        f"recomputed: policies=autoac.policies.never_recompute({first.region!r}).\n"
        f"Ops of forward ({len(a)}):\n{_listed(a, position)}\n"
        f"Ops of the second run ({len(b)}):\n{_listed(b, position)}"
    )


def _listed(entries: list[Entry], position: int) -> str:
    """The ops around a position, one per line, with that position marked."""
    start, stop = max(0, position - _SHOWN), min(len(entries), position + _SHOWN)
    lines = [f"  ... {start} before"] if start else []
    lines += [f"{'>' if i == position else ' '} {i + 1:>4}  {entries[i]}" for i in range(start, stop)]
    if stop < len(entries):
        lines.append(f"  ... {len(entries) - stop} after")
    return "\n".join(lines)
