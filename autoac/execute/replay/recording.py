"""Recording of a region's forward: the dispatch mode and the hooks under which it runs.

NOTE [ Never wrong, whatever the decisions ]
  The recording does not rely on consistent decisions, since data-dependent control flow can apply any decision to any
  op. An in-place op on a recomputed storage is always recorded. An in-place op on a kept storage never is; if a record
  holds that storage, the record gets a copy first. If a tensor that a record or autograd holds was written outside the
  region, its version counter shows it, as in autograd, and that is an error. A storage that is read before any visible
  op has written it was written by an opaque kernel: it is kept. So is a storage once an op has changed its size
  (`resize_`, `out=` into an empty tensor): its views could not be made before that op has run again, and not every
  kernel resizes its output. Results of other libraries' ops that draw from Python's or numpy's generators are kept:
  setting these back in backward could disturb others who draw from them. An op that raises, which code may catch,
  leaves the recording as it was before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoac.execute.program import CUT, END, Program
from autoac.execute.replay.call import ReplayCall, unpack
from autoac.execute.replay.held import Apart, detach_foreign_too, is_foreign, key_of, without_graph
from autoac.execute.replay.randoms import Stash, drawing
from autoac.execute.replay.records import Handle, Kept, Marks, Record, Slot
from autoac.execute.streams import as_blocking, comes_to_host
from autoac.ops.generators import generators_of
from autoac.ops.geometry import Geometry
from autoac.ops.info import OpInfo, op_info, tensors_in, written_tensors
from autoac.step.restore import host_random_states, same_random_states
from autoac.torch_private import (
    UnwrappedDispatchMode,
    counted_writes,
    detach_sharing_version,
    disable_dispatch_modes,
    is_sharded_type,
    key_of_storage,
    local_part,
    on_fake_tensors,
    parts_of,
    sharded_like,
    untraced,
    version_of,
    waited_for,
)
from autoac.torch_private.kernel_flags import KernelFlags, kernel_flags


class Recording(UnwrappedDispatchMode):
    """The dispatch mode and pack hook under which a region's forward runs."""

    supports_higher_order_operators = True

    def __init__(self, call: ReplayCall):
        super().__init__()
        self.call = call
        self.earlier: list[ReplayCall] = []  # of the parts before
        self.steps = call.program.steps
        self.position = 0
        self.counts: Any = None  # once out of step: how often each overload was called
        self.left_at: tuple[Any, Any] = (None, None)  # at that point: the expected op, and the one that came
        self.meets_shards = False  # whether a sharded tensor was seen
        self.slots: dict[int, Slot] = {}
        self.flags: KernelFlags = ()  # as last read
        self.raw: set[int] = set()  # keys of recomputed storages that no visible op has written yet

    # -- decisions ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and any(map(is_sharded_type, types)):
            self.meets_shards = True
            return NotImplemented  # its own dispatch then runs ops on the local parts
        if self.meets_shards and on_fake_tensors():
            return func(*args, **kwargs) if kwargs else func(*args)  # only shapes are inferred
        overload, recompute, look, info = self.steps[self.position]
        if overload is func:
            self.position += 1
            try:
                if look:
                    if look is CUT:
                        self.begin_part()
                    if recompute and info.plain and not types:
                        return self._record(func, info, args, kwargs or {}, ())
                    return self._run(func, info, types, args, kwargs or {}, recompute)
                return info.run(*args, **kwargs) if kwargs else info.run(*args)
            except BaseException:
                self.position -= 1
                raise
        info = op_info(func)
        if not info.ignored:
            return self._out_of_step(func, info, types, args, kwargs or {})
        if info.reshapes:
            self._reshaped(args[0])
        return info.run(*args, **kwargs) if kwargs else info.run(*args)

    def _reshaped(self, tensor: torch.Tensor) -> None:
        """Treat an op that is about to change a tensor's geometry in place as a write."""
        self._preserve(tensor)
        slot = self.slot_of(tensor)
        if slot is not None:
            slot.version = max(slot.version, version_of(tensor) + 1)

    def _preserve(self, tensor: torch.Tensor) -> None:
        """Keep what records of this part or an earlier one hold of a tensor that is about to be written.

        In a step that is profiled, the copies are no ops of the step.
        """
        key = key_of(tensor)
        for call in (*self.earlier, self.call):
            if call.holds(key):
                with disable_dispatch_modes():
                    call.preserve(key)

    def _out_of_step(self, func: Any, info: OpInfo, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op that is not the profile's next one."""
        program = self.call.program
        before = self.steps, self.position, self.counts
        if self.counts is None:
            self.left_at = self.steps[self.position][0], func
            self.counts = program.counts_before(self.position)
            self.steps, self.position = (END,), 0
        planned = program.by_call(func, self.counts[func])
        _, recompute, look, _ = planned
        try:
            if look is CUT:
                self.begin_part()
            if recompute or info.writes:
                result = self._run(func, info, types, args, kwargs, recompute)
            else:
                result = func(*args, **kwargs)
        except BaseException:
            self.steps, self.position, self.counts = before
            raise
        self.counts[func] += 1
        if planned is END:
            program.following.deviates(program.region, *self.left_at, func)
        return result

    def begin_part(self) -> None:
        """Record the following ops for a replay of their own, as if another region began."""
        self.earlier.append(self.call)
        self.call = type(self.call)(self.call.program)
        self.slots, self.raw = {}, set()

    # -- recording ---------------------------------------------------------------------------------------------

    def _run(self, func, info: OpInfo, types, args, kwargs, recompute: bool) -> Any:
        recompute = recompute and (info.replayable or info.repeatable) and not any(map(is_foreign, types))
        written: tuple[Slot, ...] = ()
        if info.writes:
            targets = written_tensors(info, args, kwargs)
            is_foreign_write = any(map(is_foreign, types))
            if is_foreign_write:
                targets = [part for target in targets for part in parts_of(target)]
            written = tuple({slot for slot in map(self.slot_of, targets) if slot is not None})
            is_whole = info.replayable and len(written) == len({key_of(t) for t in targets})
            if written and (is_foreign_write or not is_whole):
                for target in targets:  # earlier values can be recomputed, this op's result is kept
                    self.slots.pop(key_of(target), None)
                written = ()
            recompute = bool(written)
            if not recompute:
                for target in targets:
                    self._preserve(target)
            if info.writes_lists:
                with counted_writes(targets):
                    return (
                        self._record(func, info, args, kwargs, written)
                        if recompute
                        else func(*args, **kwargs)
                    )
        if not recompute:
            return func(*args, **kwargs)
        return self._record(func, info, args, kwargs, written)

    def _record(self, func, info: OpInfo, args, kwargs, written: tuple[Slot, ...]) -> Any:
        writes = self._write(written_tensors(info, args, kwargs)) if written else None
        sizes = _sizes(written) if info.resizes else ()
        refs: list[tuple[Any, Slot, Geometry | None]] = []
        kept: list[Kept] = []
        stored = list(args)
        if info.statistics is not None and info.updates_statistics(args):
            stored[info.statistics[0]] = stored[info.statistics[1]] = None
        for i in info.tensors:
            if i < len(stored) and isinstance(stored[i], torch.Tensor):
                stored[i] = self._store(stored[i], i, refs, kept)
        for i in info.lists:
            if i < len(stored) and stored[i] is not None:
                stored[i] = [
                    None if t is None else self._store(t, (i, j), refs, kept) for j, t in enumerate(stored[i])
                ]
        if kwargs:
            kwargs = dict(kwargs)
        flags = None
        if info.has_flags:
            flags = kernel_flags()
            if flags == self.flags:
                flags = self.flags  # one object for all records
            self.flags = flags
        rng, host = None, host_random_states() if info.unknown else ()
        try:
            if info.random or info.unknown:
                result, rng = self._run_random(func, info, args, kwargs)
            else:
                result = info.run(*args, **kwargs) if kwargs else info.run(*args)
        except BaseException:
            if writes is not None:
                writes.undo()
            raise
        for name in info.keywords:
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor):
                kwargs[name] = self._store(value, name, refs, kept)
            elif value is not None:
                kwargs[name] = [
                    None if t is None else self._store(t, (name, j), refs, kept) for j, t in enumerate(value)
                ]
        if host and not same_random_states(host, host_random_states()):
            # See NOTE [ Never wrong, whatever the decisions ].
            for target in written_tensors(info, args, kwargs):
                self.slots.pop(key_of(target), None)
            return result
        if sizes and any(storage.nbytes() != n_bytes for storage, n_bytes in sizes):
            for storage, _ in sizes:
                self.slots.pop(key_of_storage(storage), None)
            return result
        again: Sequence[Any] = stored
        if self.call.streams is not None:
            self.call.streams.ran(result)
            if comes_to_host(args, result):
                again, kwargs = as_blocking(func, again, kwargs)
        if isinstance(result, torch.Tensor):
            slot = self._new_slot(result, info)
            outputs = () if slot is None else ((0, slot),)
        else:
            slots = [(index, self._new_slot(tensor, info)) for index, tensor in enumerate(tensors_in(result))]
            outputs = tuple((index, slot) for index, slot in slots if slot is not None)
        if outputs or written:
            run = waited_for(func) if info.repeatable else info.run
            self.call.records.append(
                Record(func, run, again, kwargs, refs, kept, rng, written, flags, outputs)
            )
        return result

    def _write(self, targets: list[torch.Tensor]) -> _Writes:
        """Before an op writes these tensors on recomputed storages."""
        slots = {slot for slot in map(self.slot_of, targets) if slot is not None}
        writes = _Writes(self.raw, self.raw & set(map(key_of, targets)), [(s, s.marks()) for s in slots])
        for target in targets:
            self.raw.discard(key_of(target))
            slot = self.slot_of(target)
            if slot is not None:
                slot.is_written(target)
        return writes

    def _run_random(self, func, info: OpInfo, args, kwargs) -> tuple[Any, tuple[Stash, ...] | None]:
        """Run an op that may draw random numbers; also returns the stashes with which its replay draws the same."""
        if not info.unknown and not info.draws_random(args):
            return func(*args, **kwargs), None
        generators = generators_of(info, args, kwargs)
        if self.call.streams is not None:
            self.call.streams.refuse_drawing(func, generators)
        with drawing:
            stashes = tuple(map(Stash, generators))
            result = func(*args, **kwargs)
            if info.unknown:
                stashes = tuple(stash for stash in stashes if stash.has_drawn())
            for stash in stashes:
                stash.op_is_over()
        return result, stashes or None

    def _store(self, tensor: torch.Tensor, where: Any, refs: list, kept: list) -> torch.Tensor | None:
        """The record's entry for an argument: None and a reference if it will be recomputed, else the tensor."""
        key = key_of(tensor)
        slot = self.slots.get(key)
        if slot is not None and slot.alive() is not None:
            if key not in self.raw or slot.written:
                refs.append((where, slot, slot.geometry_of(tensor)))
                return None
            del self.slots[key]  # An opaque kernel wrote it.
            self.raw.discard(key)
        if key:
            self.call.held[key] = weakref.ref(tensor.untyped_storage())
        held = self.hold(tensor)
        # See NOTE [ Who holds what ] 1. A subclass's alias would take its own dispatch.
        alias = held.data if held is tensor and not is_foreign(type(held)) else held
        kept.append((alias, held, version_of(held)))
        return alias

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its graph, which would make a reference cycle: see NOTE [ Who holds what ] 3.

        In the forward of a custom `autograd.Function`, where grad mode is off, a tensor without a graph gets one when
        it is returned.
        """
        if not torch.is_grad_enabled():
            return detach_sharing_version(tensor)
        return without_graph(tensor, detach_sharing_version)

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot of the tensor's storage, None if it will not be recomputed."""
        slot = self.slots.get(key_of(tensor))
        return None if slot is None or slot.alive() is None else slot

    def _new_slot(self, tensor: torch.Tensor, info: OpInfo) -> Slot | None:
        if tensor.layout is not torch.strided:
            return None  # sparse and the like: kept by the records and handles that need it
        storage = tensor.untyped_storage()
        key = key_of_storage(storage)
        known = self.slots.get(key)
        if (known is not None and known.alive() is not None) or self.call.holds(key):
            return None  # an alias of an argument
        slot = self.slots[key] = Slot(tensor, storage)
        self.call.slots.append(slot)
        if self.raw:
            self.raw.discard(key)  # left by a dead storage at this address
        if info.uninitialised:
            self.raw.add(key)
        return slot

    # -- autograd's side ---------------------------------------------------------------------------------------

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        if type(tensor) is torch.Tensor:
            local = tensor
        elif (apart := Apart.packed(tensor, self.pack)) is not None:
            return apart
        else:
            local = local_part(tensor)
        key = key_of(local)
        slot = self.slots.get(key)
        if slot is None or slot.alive() is None or (key in self.raw and not slot.written):
            return without_graph(tensor, detach_foreign_too), version_of(tensor), self.call
        like = None if local is tensor else sharded_like(tensor)
        handle = Handle(self.call, slot, slot.geometry_of(local), version_of(local), like)
        slot.handles.append(weakref.ref(handle))
        return handle

    def finish(self) -> None:
        """End the recording after the region's forward."""
        ran = self.position if self.counts is None else sum(self.counts.values())
        self.call.program.has_run(ran)
        for call in (*self.earlier, self.call):
            call.recording = False
            call.pending = bool(call.records)


def _sizes(written: Iterable[Slot]) -> list[tuple[torch.UntypedStorage, int]]:
    alive = [slot.alive() for slot in written]
    return [(storage, storage.nbytes()) for storage in alive if storage is not None]


@dataclass(frozen=True, slots=True)
class _Writes:
    """Changes of a recording for an op that is about to write, undone if the op raises.

    Args:
        raw: the recording's set `raw`.
        keys: the keys that the op takes out of it.
        marks: the changed slots, each with its earlier state.
    """

    raw: set[int]
    keys: set[int]
    marks: list[tuple[Slot, Marks]]

    def undo(self) -> None:
        """The op has raised."""
        self.raw.update(self.keys)
        for slot, marks in self.marks:
            slot.put_back(marks)


def run(
    program: Program,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recording: Recording | None = None,
) -> Any:
    """Run one call of a region so that its backward replays the ops that the program recomputes.

    Args:
        recording: the recording to run under; None for a plain one.
    """
    recording = recording or Recording(ReplayCall(program))
    with torch.autograd.graph.saved_tensors_hooks(recording.pack, unpack), recording:
        result = forward(*args, **kwargs)
    recording.finish()
    return result
