"""The first step of a plan that was made on fake tensors: recomputed values are compared with forward's.

NOTE [ The first replayed step ]
  1. A real profile recomputes everything once and compares (`autoac.record.guard`). On fake tensors there is nothing to
     compare, so the plan's first step does it: a value to be recomputed gets a checksum where a recorded op reads it
     and, if autograd saves it, when the region's forward can no longer write it. The recomputed value is compared with
     it before backward reads it.
  2. A difference is an error: forward's value is gone, so the step cannot go on.
  3. A region whose replay was correct is not checked again. A region that ran without a backward is.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from autoac.execute.checksums import checksum_in_little_memory
from autoac.execute.program import Program
from autoac.execute.replay.call import ReplayCall
from autoac.execute.replay.recording import Recording
from autoac.execute.replay.records import Handle, Record, Slot
from autoac.execute.until_released import UntilReleased
from autoac.ops.info import OpInfo
from autoac.ops.private_results import may_stay_unwritten
from autoac.torch_private import local_part, untraced

DIFFERS = (
    "in {region}, {op} gave other bits when it was run a second time (its result is written by code that "
    "torch does not see, it draws random numbers of its own, or its kernel differs from run to run), so this step's "
    "gradients would be wrong. The plan was made on fake tensors, where this does not show. Plan from a real step "
    '(autoac.profile(model, sample, mode="real")), or keep its result: '
    'policies=[autoac.Policy("MUST_SAVE", op={op!r}{module})].'
)


class CheckedCall(ReplayCall):
    """A region's call whose replay is compared with its forward."""

    __slots__ = ("left", "makers", "packed", "private", "reads")

    def __init__(self, program: Program):
        super().__init__(program)
        self.reads: dict[int, list[tuple[int, int]]] = {}  # by record: place among its references, checksum
        self.packed: weakref.WeakKeyDictionary[Handle, int] = weakref.WeakKeyDictionary()
        self.makers: dict[Slot, str] = {}  # the op that made each slot
        self.private: set[Slot] = set()  # kernels' own workspaces, parts of which may stay unwritten
        self.left: set[int] = (
            set()
        )  # ids of the calls, one for each part, whose replays were not compared yet

    def _run_one(self, record: Record, table: dict[Slot, torch.Tensor]) -> Any:
        for place, checksum in self.reads.get(id(record), ()):
            self._compare(record.refs[place][1], record.seen(place, table), checksum)
        return super()._run_one(record, table)

    def replay(self, keep_graph: bool, wanted: Handle | None = None) -> None:
        super().replay(keep_graph, wanted)
        for handle, checksum in list(self.packed.items()):
            if handle.tensor is not None and not handle.modified and handle.slot not in self.private:
                self._compare(handle.slot, handle.tensor, checksum)
        if not self.recording:
            self.left.discard(id(self))
            if not self.left:
                self.program.unchecked = False

    def _compare(self, slot: Slot, tensor: torch.Tensor, checksum: int) -> None:
        if checksum_in_little_memory(tensor) not in (checksum, None):
            program = self.program
            module = f", module={program.region!r}" if program.region else ""
            raise RuntimeError(DIFFERS.format(region=program.where, op=self.makers[slot], module=module))


class CheckedRecording(Recording):
    """Recording of a region's forward, with checksums of the values to be recomputed."""

    call: CheckedCall

    def __init__(self, program: Program):
        super().__init__(CheckedCall(program))
        if self.call.streams is not None:
            self.call.streams.refuse_comparing()
        self._reads: list[tuple[int, int]] = []
        self._writes: tuple[int | str, ...] = ()
        self._saved = UntilReleased()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._saved.poll()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _record(self, func: Any, info: OpInfo, args: Any, kwargs: Any, written: tuple[Slot, ...]) -> Any:
        self._reads, self._writes = [], tuple(info.writes)
        done = len(self.call.records)
        result = super()._record(func, info, args, kwargs, written)
        for record in self.call.records[done:]:
            assert record is not None
            self.call.reads[id(record)] = self._reads
            for position, slot in record.outputs:
                self.call.makers[slot] = info.name
                if may_stay_unwritten(info.name, position):
                    self.call.private.add(slot)
        return result

    def _store(self, tensor: torch.Tensor, where: Any, refs: list, kept: list) -> torch.Tensor | None:
        place = len(refs)
        stored = super()._store(tensor, where, refs, kept)
        position = where[0] if isinstance(where, tuple) else where
        # Keyword arguments are stored after the op has run; arguments that it writes may be uninitialized before.
        if len(refs) > place and not isinstance(position, str) and position not in self._writes:
            checksum = checksum_in_little_memory(tensor)
            if checksum is not None:
                self._reads.append((place, checksum))
        return stored

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        if type(packed) is Handle:
            self._saved.hold(local_part(tensor), functools.partial(self._is_final, weakref.ref(packed)))
        return packed

    def _is_final(self, ref: weakref.ref[Handle], tensor: torch.Tensor) -> None:
        """Forward cannot write this saved tensor any more."""
        handle = ref()
        if handle is not None and (checksum := checksum_in_little_memory(tensor)) is not None:
            self.call.packed[handle] = checksum

    def begin_part(self) -> None:
        self._saved.end()
        self._saved = UntilReleased()
        super().begin_part()

    def finish(self) -> None:
        self._saved.end()
        super().finish()
        calls = [
            call for call in (*self.earlier, self.call) if isinstance(call, CheckedCall) and call.pending
        ]
        left = {id(call) for call in calls}
        for call in calls:
            call.left = left
