"""One call of a region: its records, kept for backward and run again there.

NOTE [ Replay ]
  0. Saved tensors are packed and unpacked by `torch.autograd.graph.saved_tensors_hooks`
     (torch/csrc/autograd/saved_variable.cpp: `SavedVariable::unpack` calls the hook once for each use in backward).
  1. The first unpack of any tensor in a region replays the region's records in order, below autograd. That moment is
     known from the profile, so the simulator can be exact. Records that no living handle depends on are not run.
  2. A recomputed tensor is dropped after the last record that reads it; handles keep what they wait for. A record is
     dropped as soon as it has run, unless backward keeps the graph: then handles drop what they have given out, and the
     first unpack of any tensor in the region by another backward replays again.
  3. A random op draws the same numbers again, see NOTE [ Random numbers ] in `randoms`.
  4. The ops that ran are replayed: autocast, Python side effects and changed globals do not matter. A batch norm is
     replayed without its running statistics. Grad mode is restored, because some kernels read it: oneDNN's LSTM makes
     its workspace only in grad mode. So are the switches of `kernel_flags`, which forward may have set around an op;
     pointwise ops do not depend on them.
  5. On a GPU, the replay runs on the stream of the region's forward, see NOTE [ Streams ] in `autoac.execute.streams`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from autoac.execute.program import Program
from autoac.execute.replay.held import MODIFIED, Apart
from autoac.execute.replay.randoms import draw_again
from autoac.execute.replay.records import Handle, Record, Slot
from autoac.execute.streams import streams_of_call
from autoac.ops.geometry import with_geometry
from autoac.ops.info import tensors_in
from autoac.torch_private import (
    backward_keeps_graph,
    call_below_autograd,
    counted_version,
    current_backward,
    disable_dispatch_modes,
    untraced,
)
from autoac.torch_private.kernel_flags import KernelFlags, kernel_flags, with_kernel_flags

_LOST = (
    "the record of {where} is gone: it was dropped after the first backward, or a replay of it failed. "
    "Pass retain_graph=True to the first backward to run a second one."
)


@untraced
def unpack(packed: Any) -> torch.Tensor:
    """The unpack hook: returns the tensor that `Recording.pack` was given."""
    if type(packed) is Handle:
        return packed.unpack()
    if type(packed) is Apart:
        return packed.unpacked(unpack)
    tensor, version, call = packed
    if call.pending or call.is_another_backward():
        call.replay(backward_keeps_graph())
    if version >= 0 and counted_version(tensor) != version:
        raise RuntimeError(MODIFIED.format(where=call.program.where))
    return tensor


class ReplayCall:
    """The records of one call of a region, kept for its backward."""

    __slots__ = (
        "__weakref__",
        "flags",
        "held",
        "lock",
        "pending",
        "program",
        "recording",
        "records",
        "replayed_in",
        "slots",
        "streams",
    )

    def __init__(self, program: Program):
        self.program = program
        self.records: list[Record | None] = []
        self.slots: list[Slot] = []
        self.held: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # the storages that records hold, by key
        self.recording = True  # the region's forward is still running
        self.pending = False  # recorded and not yet replayed
        self.replayed_in: int | None = None  # the backward of the last replay if it has kept the graph
        self.lock = threading.Lock()
        self.flags: KernelFlags = ()  # the current ones during the replay
        self.streams = streams_of_call(program.region)  # None if no GPU is in use

    def holds(self, key: int) -> bool:
        """Whether records hold the storage with this key; the address of a dead storage may be reused."""
        held = self.held.get(key)
        return held is not None and held() is not None

    def preserve(self, key: int) -> None:
        """Give the records that hold this storage a copy of it, before it is written in place."""
        for record in self.records:
            if record is not None:
                record.preserve(key)
        self.held.pop(key, None)

    @property
    def can_replay(self) -> bool:
        """Whether the records are still there; a backward that frees its part of the graph drops all of them."""
        return not self.records or self.records[0] is not None

    def is_another_backward(self) -> bool:
        """Whether the running backward is another one than that of the last replay, which has kept the graph."""
        return self.replayed_in is not None and self.replayed_in != current_backward()

    def replay(self, keep_graph: bool, wanted: Handle | None = None) -> None:
        """Run the recorded ops that living handles depend on, and give the handles their tensors."""
        with self.lock:
            again = self.is_another_backward()
            if not (self.pending or again or (wanted is not None and wanted.tensor is None)):
                return  # another thread was first
            if not self.can_replay:
                raise RuntimeError(_LOST.format(where=self.program.where))
            if again:
                self._drop()
            self.pending = False
            self.replayed_in = current_backward() if keep_graph and not self.recording else None
            self.program.following.tell()  # for steps that do not call the root
            self.flags = kernel_flags()
            last_use = self._schedule()
            with contextlib.nullcontext() if self.streams is None else self.streams.entered():
                if not self.recording:
                    call_below_autograd(self._run, last_use, keep_graph)
                    return
                # A backward inside the region's own forward replays the records so far, unseen by the recording.
                with disable_dispatch_modes():
                    call_below_autograd(self._run, last_use, keep_graph)

    def _drop(self) -> None:
        """Drop the tensors that the backward before this one has not used."""
        for slot in self.slots:
            for ref in slot.handles:
                if (handle := ref()) is not None:
                    handle.tensor = None

    def _schedule(self) -> list[list[Slot] | None]:
        """Per record the slots that no later one reads; None if it need not run."""
        wanted = {slot for slot in self.slots for handle in slot.handles if handle() is not None}
        read_later: set[Slot] = set()
        last_use: list[list[Slot] | None] = []
        for record in reversed(self.records):
            assert record is not None
            outputs = record.outputs
            if not (
                (len(outputs) == 1 and outputs[0][1] in wanted)
                or any(slot in wanted for _, slot in outputs)
                or any(slot in wanted for slot in record.written)
            ):
                last_use.append(None)
                continue
            last = [slot for _, slot in outputs if slot not in read_later]
            for _, slot, _ in record.refs:
                if slot not in read_later:
                    wanted.add(slot)
                    read_later.add(slot)
                    last.append(slot)
            last_use.append(last)
        last_use.reverse()
        return last_use

    def _run(self, last_use: list[list[Slot] | None], keep_graph: bool) -> None:
        table: dict[Slot, torch.Tensor] = {}
        records = self.records
        for position, last in enumerate(last_use):
            record = records[position]
            assert record is not None
            if not keep_graph:
                records[position] = None
            if last is None:
                continue
            result = self._run_one(record, table)
            if isinstance(result, torch.Tensor) and record.outputs:
                slot = record.outputs[0][1]
                table[slot] = result
                if slot.handles:
                    _deliver(slot, result)
            elif record.outputs:
                made = list(tensors_in(result))
                for index, slot in record.outputs:
                    table[slot] = made[index]
                    _deliver(slot, made[index])
                del made
            del result, record
            for slot in last:
                table.pop(slot, None)

    def _run_one(self, record: Record, table: dict[Slot, torch.Tensor]) -> Any:
        for _, tensor, version in record.kept:
            if version >= 0 and counted_version(tensor) != version:
                raise RuntimeError(
                    f"{record.func} in {self.program.where} must be run again for backward, but one of its "
                    "inputs was modified by an in-place operation after forward. The profiled step did not do that: "
                    "profile and plan the step as you train it."
                )
        args, kwargs = record.arguments(table)
        flags = None if record.flags == self.flags else record.flags
        if flags is None and record.grad:
            return self._call(record, args, kwargs)
        with (
            contextlib.nullcontext() if flags is None else with_kernel_flags(flags),
            contextlib.nullcontext() if record.grad else torch.no_grad(),
        ):
            return self._call(record, args, kwargs)

    def _call(self, record: Record, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if record.rng is None:
            return record.run(*args, **kwargs) if kwargs else record.run(*args)
        return draw_again(record.func, args, kwargs, record.rng, self.program.region)


def _deliver(slot: Slot, tensor: torch.Tensor) -> None:
    """Give a recomputed tensor to the handles that wait for it."""
    for ref in slot.handles:
        handle = ref()
        if handle is not None:
            geometry = handle.geometry
            handle.tensor = tensor if geometry is None else with_geometry(tensor, geometry)
