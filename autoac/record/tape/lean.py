"""The replay engine for recording: see NOTE [ The recorded step ] 1 in tape.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from autoac.execute.program import Program
from autoac.execute.replay import Handle, Record, Recording, ReplayCall, Slot
from autoac.execute.replay.held import Apart, key_of
from autoac.ops.geometry import clone_with_geometry
from autoac.ops.info import OpInfo, op_info, read_tensors, written_tensors
from autoac.ops.signatures import Signature
from autoac.price.meters import OpTimer
from autoac.record.tape.clock import Suspended
from autoac.record.tape.tape import Tape
from autoac.torch_private import (
    in_backward,
    is_fake_type,
    is_sharded_type,
    local_part,
    on_fake_tensors,
    untraced,
    version_of,
)


class _TimedCall(ReplayCall):
    """A region's call whose replay is timed op by op: the cost of rerunning an op at its place in backward."""

    __slots__ = ("tape",)

    def __init__(self, program: Program, tape: Tape):
        super().__init__(program)
        self.tape = tape

    def _run_one(self, record: Record, table: dict[Slot, torch.Tensor]) -> Any:
        if self.tape.saved.guard is not None:
            self.tape.saved.guard.replaying(record, table)
        return super()._run_one(record, table)

    def _call(self, record: Record, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        meter = self.tape.meter
        if not isinstance(meter, OpTimer):
            return super()._call(record, args, kwargs)
        # The time includes setting and resetting the generator of a random op.
        run = functools.partial(super()._call, record, args, kwargs)
        return meter.rerun(Signature.of(record.func, args, kwargs), run)


class LeanRecording(Recording):
    """The replay engine for recording: everything is recomputed, and tensors are held as aliases."""

    def __init__(self, tape: Tape, region: str):
        super().__init__(_TimedCall(Program(region, ()), tape))
        self.tape = tape
        self.saved = tape.saved
        tape.replays.add(self.call)
        if self.call.streams is not None:
            self.call.streams.refuses = False  # the profile has it, and the plan does not wrap the region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = op_info(func)
        if any(map(is_sharded_type, types)):
            return NotImplemented  # see NOTE [ The recorded step ] 6
        if not self.saved.on_fakes and on_fake_tensors():
            return func(*args, **(kwargs or {}))
        if info.ignored:
            return func(*args, **(kwargs or {}))
        types = tuple(kind for kind in types if not is_fake_type(kind))
        self._look(info, args, kwargs or {})
        guard = self.saved.guard
        if guard is None:
            return self._run(func, info, types, args, kwargs or {}, not info.repeatable)
        module = self.tape.calls.rows[self.tape.calls.current]
        info = self.info = guard.about_to_run(info, module["fqn"], module["call"])
        # A collective runs once: the other ranks may not record this step.
        result = self._run(func, info, types, args, kwargs or {}, not info.repeatable)
        guard.has_run(len(self.tape.ops) - 1)
        return result

    def _look(self, info: OpInfo, args: Any, kwargs: dict[str, Any]) -> None:
        """Compare what the op is about to read or write; see NOTE [ Unseen writes ] 8 for what is kept."""
        unseen = self.saved.unseen
        if unseen is None or in_backward():
            return
        unseen.before_op(info, args, kwargs)
        unseen.is_checked = True
        for tensor in (*read_tensors(info, args, kwargs), *written_tensors(info, args, kwargs)):
            if unseen.is_kept(tensor):
                self.slots.pop(key_of(tensor), None)

    def _record(self, func: Any, info: OpInfo, args: Any, kwargs: Any, written: tuple[Slot, ...]) -> Any:
        done = len(self.call.records)
        result = super()._record(func, info, args, kwargs, written)
        for record in self.call.records[done:]:
            if self.saved.guard is not None and record is not None:
                self.saved.guard.recorded(record)
        return result

    def _store(self, tensor: torch.Tensor, where: Any, refs: list, kept: list) -> torch.Tensor | None:
        place = len(refs)
        stored = super()._store(tensor, where, refs, kept)
        if self.saved.guard is not None and len(refs) > place:
            self.saved.guard.reads(self.info, tensor, where, place)
        return stored

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.saved.unseen is not None and self.saved.unseen.is_kept(tensor):
            with Suspended(self.tape.clock), torch.no_grad():
                return clone_with_geometry(tensor)  # the code that has written it may do so again
        return self.saved.alias(tensor)

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        self.saved.is_saved(tensor)
        if self.saved.unseen is not None and self.saved.unseen.is_kept(local_part(tensor)):
            self.slots.pop(key_of(local_part(tensor)), None)
        packed = super().pack(tensor)
        if type(packed) is Apart:
            return packed  # the parts were watched
        if type(packed) is Handle and self.saved.guard is not None:
            self.saved.guard.packed(packed, tensor)
        if type(packed) is tuple:
            alias = self.saved.alias(tensor)
            packed = (alias, version_of(alias), self.call)
        return self.saved.watch(tensor, packed)
