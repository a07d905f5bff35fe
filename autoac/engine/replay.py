"""Engine "replay": a region's forward is recorded op by op, and backward runs only the recorded ops again.

NOTE [ Who holds what ]
  1. An op whose values are to be recomputed leaves a record: the op and its arguments. An argument that will itself
     be recomputed is stored as a reference (slot and geometry), any other tensor as it is. That strong reference *is*
     the saving: what nobody asks for is neither kept nor recorded.
  2. Autograd gets a handle for a tensor on a recomputed storage, and a (tensor, version) pair for any other.
  3. Handles hold the call strongly, the call knows its handles weakly. No tensor that a call holds has a grad_fn, so
     there is no reference cycle: when the graph dies, handles, call and records die at once.

NOTE [ Replay ]
  1. The first unpack in a region, of whatever tensor, replays the region's records in order, below autograd. That
     moment is known from the profile, so the simulator can be exact. Records that no living handle depends on are
     not run.
  2. A recomputed tensor is dropped after the last record that reads it; handles keep what they wait for. A record is
     dropped as soon as it has run, unless backward retains the graph: then a second backward replays again.
  3. A random op's generator state is stashed when it is recorded, set for its replay, and left as it was found.
     Threads share generators: none draws recorded numbers while another one replays (`_drawing`).
  4. What is replayed is what ran: autocast, Python side effects, changed globals do not matter. A batch norm is
     replayed without its running statistics. Gradients are on or off as they were, for some kernels look: oneDNN's
     LSTM makes its workspace only where they are on.

NOTE [ Never wrong, whatever the decisions ]
  The recording does not rely on the decisions being consistent, since data-dependent control flow can bring any of
  them to any op. An in-place op on a recomputed storage is always recorded. An in-place op on a kept storage never
  is; if a record holds that storage, the record gets a copy first. A tensor that a record or autograd holds and that
  was written where we cannot see it (outside of the region) is found by its version, as autograd does, and is an
  error. A storage that is read before any visible op has written it was written by an opaque kernel: it is kept. So is
  one from where an op has changed its size (`resize_`, `out=` into an empty tensor): views could not be made of it
  before that op has run again, and not every kernel resizes what it is given.

NOTE [ Pauses ]
  Most of what the engine costs in forward is that Python sees each op. While one of torch's own layers runs of which
  the plan records nothing, the mode is set aside; the ops there are taken to have been the profiled ones. Should they
  be others and write in place, then the version tells: a storage that was to be recomputed is kept from there on, and
  one that a record holds is an error in replay. What versions do not tell (`.data`) is why other modules do not pause.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.compat import (
    backward_keeps_graph,
    call_below_autograd,
    counted_writes,
    default_generator,
    detach_sharing_version,
    detach_unseen,
    disable_dispatch_modes,
    in_compiled_autograd,
    put_back,
    set_aside,
    version_of,
)
from autoac.engine.geometry import (
    Geometry,
    certainly_disjoint,
    clone_with_geometry,
    geometry_of,
    with_geometry,
)
from autoac.engine.program import END, Program
from autoac.opinfo import OpInfo, op_info, tensors_in, written_tensors

_drawing = threading.RLock()


class _Running(threading.local):
    """The recording of the region whose forward runs in this thread, None outside of all."""

    recording: Recording | None = None


running = _Running()


class Slot:
    """A storage that will be recomputed: what its replay must know, and who waits for it."""

    __slots__ = ("alive", "dtype", "handles", "index", "shape", "stride", "version", "written")

    def __init__(self, index: int, tensor: torch.Tensor, storage: torch.UntypedStorage):
        self.index = index
        self.alive = weakref.ref(storage)  # dead: another storage may have come to the same address
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.version = version_of(tensor)  # the latest that is known
        self.written = False  # in place
        self.handles: list[weakref.ref[Handle]] = []

    def geometry_of(self, tensor: torch.Tensor) -> Geometry | None:
        """How this tensor sees the storage; None if just as the op made it."""
        shape, stride, offset, dtype, conj, neg = geometry = geometry_of(tensor)
        as_made = not offset and shape == self.shape and stride == self.stride and dtype is self.dtype
        return None if as_made and not conj and not neg else geometry

    def is_written(self, target: torch.Tensor) -> None:
        """An op is about to write this tensor on the storage: find the handles that autograd would refuse now.

        Autograd goes by version counters. Parts cut by `unsafe_chunk` have one each, as has `.data`; their writes
        are no concern of what was saved of another part.
        """
        self.written = True
        self.version = max(self.version, version_of(target) + 1)  # counted once the op has run
        for ref in self.handles:
            handle = ref()
            if handle is not None and version_of(target) >= handle.version:
                whole = (self.shape, self.stride, 0, self.dtype, False, False)
                handle.modified |= not certainly_disjoint(geometry_of(target), handle.geometry or whole)


class Record:
    """One op to run again."""

    __slots__ = ("args", "func", "grad", "kept", "kwargs", "outputs", "refs", "rng", "written")

    def __init__(self, func, args, kwargs, refs, kept, rng, written):
        self.func = func
        self.grad = torch.is_grad_enabled()  # see NOTE [ Replay ] 4
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.refs: list[tuple[Any, Slot, Geometry | None]] = refs  # where in args, what, seen how
        self.kept: list[tuple[torch.Tensor, int]] = kept  # tensors in args, with their versions
        self.rng: tuple[torch.Generator, torch.Tensor] | None = rng
        self.written: tuple[Slot, ...] = written
        self.outputs: tuple[tuple[int, Slot], ...] = ()  # position among the op's output tensors


class Handle:
    """What autograd holds in place of a tensor that will be recomputed."""

    __slots__ = ("__weakref__", "call", "geometry", "modified", "slot", "tensor", "version")

    def __init__(self, call: ReplayCall, slot: Slot, geometry: Geometry | None, version: int):
        self.call = call
        self.slot = slot
        self.geometry = geometry
        self.version = version
        self.modified = False
        self.tensor: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        keep_graph = backward_keeps_graph() or self.call.recording
        if self.tensor is None or self.call.pending:
            self.call.replay(keep_graph, wanted=self)
        if self.modified:
            raise RuntimeError(_MODIFIED.format(region=self.call.program.region))
        tensor = self.tensor
        assert tensor is not None
        # A second backward replays again, see NOTE [ Replay ] 2. A captured graph asks once, and holds all handles to
        # its end.
        if keep_graph or in_compiled_autograd():
            self.tensor = None
        return tensor


_MODIFIED = (
    "a tensor that backward needs in region {region!r} was modified by an in-place operation after it was saved. "
    "Without a plan autograd refuses this too; use an out-of-place operation there."
)
_LOST = (
    "the record of region {region!r} is gone: it was dropped after the first backward, or a replay of it failed. "
    "Pass retain_graph=True to the first backward to run a second one."
)


def unpack(packed: Any) -> torch.Tensor:
    """The unpack hook: autograd gets back what `Recording.pack` was given."""
    if type(packed) is Handle:
        return packed.unpack()
    tensor, version, call = packed
    if call.pending:
        call.replay(backward_keeps_graph())
    if version >= 0 and tensor._version != version:
        raise RuntimeError(_MODIFIED.format(region=call.program.region))
    return tensor


class ReplayCall:
    """What one call of a region keeps for its backward."""

    __slots__ = ("__weakref__", "held", "lock", "pending", "program", "recording", "records", "slots")

    def __init__(self, program: Program):
        self.program = program
        self.records: list[Record | None] = []
        self.slots: list[Slot] = []
        self.held: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # the storages that records hold, by key
        self.recording = True  # the region's forward is still running
        self.pending = False  # recorded and not yet replayed
        self.lock = threading.Lock()

    def holds(self, key: int) -> bool:
        """Whether records hold the storage with this key. One that is gone may have left its address to another."""
        held = self.held.get(key)
        return held is not None and held() is not None

    def preserve(self, key: int) -> None:
        """Give the records that hold this storage a copy of it: it is about to be written in place."""
        copies: dict[int, torch.Tensor] = {}
        for record in self.records:
            if record is None or all(t.untyped_storage()._cdata != key for t, _ in record.kept):
                continue
            for tensor, _ in record.kept:
                if tensor.untyped_storage()._cdata == key:
                    copies[id(tensor)] = clone_with_geometry(tensor)
            record.args = tuple(_swap(value, copies) for value in record.args)
            record.kwargs = {name: _swap(value, copies) for name, value in record.kwargs.items()}
            record.kept = [(c, version_of(c)) for c in (copies.get(id(t), t) for t, _ in record.kept)]
        self.held.pop(key, None)

    def replay(self, keep_graph: bool, wanted: Handle | None = None) -> None:
        """Run the recorded ops that living handles depend on, and give the handles their tensors."""
        with self.lock:
            if not self.pending and (wanted is None or wanted.tensor is not None):
                return  # another thread was first
            if self.records and self.records[0] is None:
                raise RuntimeError(_LOST.format(region=self.program.region))
            self.pending = False
            run, last_use = self._schedule()
            if not self.recording:
                call_below_autograd(self._run, run, last_use, keep_graph)
                return
            # A backward inside of the region's own forward replays what is recorded so far, unseen by the recording.
            with disable_dispatch_modes():
                call_below_autograd(self._run, run, last_use, keep_graph)

    def _schedule(self) -> tuple[list[bool], list[list[Slot]]]:
        """Which records must run, and which slots no later record reads."""
        wanted = {slot for slot in self.slots for handle in slot.handles if handle() is not None}
        read_later: set[Slot] = set()
        run = [False] * len(self.records)
        last_use: list[list[Slot]] = [[] for _ in self.records]
        for position in range(len(self.records) - 1, -1, -1):
            record = self.records[position]
            assert record is not None
            made = [slot for _, slot in record.outputs]
            if wanted.isdisjoint(made) and wanted.isdisjoint(record.written):
                continue
            run[position] = True
            for slot in made:
                if slot not in read_later:
                    last_use[position].append(slot)
            for _, slot, _ in record.refs:
                wanted.add(slot)
                if slot not in read_later:
                    read_later.add(slot)
                    last_use[position].append(slot)
        return run, last_use

    def _run(self, run: list[bool], last_use: list[list[Slot]], keep_graph: bool) -> None:
        table: dict[Slot, torch.Tensor] = {}
        records = self.records
        for position, must_run in enumerate(run):
            record = records[position]
            assert record is not None
            if not keep_graph:
                records[position] = None
            if not must_run:
                continue
            result = self._run_one(record, table)
            if len(record.outputs) == 1 and isinstance(result, torch.Tensor):
                _deliver(record.outputs[0][1], result, table)
            elif record.outputs:
                made = list(tensors_in(result))
                for index, slot in record.outputs:
                    _deliver(slot, made[index], table)
                del made
            del result, record
            for slot in last_use[position]:
                table.pop(slot, None)

    def _run_one(self, record: Record, table: dict[Slot, torch.Tensor]) -> Any:
        for tensor, version in record.kept:
            if version >= 0 and tensor._version != version:
                raise RuntimeError(
                    f"{record.func} in region {self.program.region!r} must be run again for backward, but one of its "
                    "inputs was modified by an in-place operation after forward. The profiled step did not do that: "
                    "profile and plan the step as you train it."
                )
        args: Any = record.args
        kwargs = record.kwargs
        if record.refs:
            args = list(args)
            for where, slot, geometry in record.refs:
                tensor = table[slot] if geometry is None else with_geometry(table[slot], geometry)
                kwargs = _put(args, kwargs, where, tensor)
        if not record.grad:
            with torch.no_grad():
                return self._call(record, args, kwargs)
        return self._call(record, args, kwargs)

    def _call(self, record: Record, args: Any, kwargs: dict[str, Any]) -> Any:
        if record.rng is None:
            return record.func(*args, **kwargs) if kwargs else record.func(*args)
        generator, state = record.rng
        with _drawing:
            found = generator.get_state()
            generator.set_state(state)
            try:
                return record.func(*args, **kwargs)
            finally:
                generator.set_state(found)


def _deliver(slot: Slot, tensor: torch.Tensor, table: dict[Slot, torch.Tensor]) -> None:
    table[slot] = tensor
    for ref in slot.handles:
        handle = ref()
        if handle is not None:
            geometry = handle.geometry
            handle.tensor = tensor if geometry is None else with_geometry(tensor, geometry)


def _put(args: list[Any], kwargs: dict[str, Any], where: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """Put the tensor where its reference was taken: a position, a (position, index) or a keyword (and index)."""
    if type(where) is int:
        args[where] = tensor
    elif type(where) is str:
        kwargs = {**kwargs, where: tensor}
    else:
        outer, index = where
        if type(outer) is int:
            args[outer] = [*args[outer]]
            args[outer][index] = tensor
        else:
            kwargs = {**kwargs, outer: [*kwargs[outer]]}
            kwargs[outer][index] = tensor
    return kwargs


def _swap(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return copies.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return [_swap(item, copies) for item in value]
    return value


class Recording(TorchDispatchMode):
    """The dispatch mode and pack hook under which a region's forward runs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap every dispatched op in a `torch._dynamo.disable`, 1 us each

    def __init__(self, call: ReplayCall):
        super().__init__()
        self.call = call
        self.steps = call.program.steps
        self.position = 0
        self.counts: Any = None  # once out of step: how often each overload was called
        self.pauses = call.program.pauses
        self.paused = False  # ever
        self.slots: dict[int, Slot] = {}
        self.raw: set[int] = set()  # keys of recomputed storages that no visible op has written yet

    # -- decisions ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        overload, recompute, look, info = self.steps[self.position]
        if overload is func and info is not None:
            self.position += 1
        else:
            info = op_info(func)
            if info.ignored:
                look = False
                if info.reshapes:
                    self._reshaped(args[0])
            else:
                recompute = self._out_of_step(func)
                look = recompute or info.writes
        if look:
            return self._run(func, info, types, args, kwargs or {}, recompute)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _reshaped(self, tensor: torch.Tensor) -> None:
        """An op is about to change in place how this tensor sees its storage, which counts as a write."""
        if self.call.holds(_key(tensor)):
            self.call.preserve(_key(tensor))
        slot = self.slot_of(tensor)
        if slot is not None:
            slot.version = max(slot.version, version_of(tensor) + 1)

    def _out_of_step(self, func: Any) -> bool:
        program = self.call.program
        if self.counts is None:
            self.counts = program.counts_before(self.position)
            self.steps, self.position = (END,), 0
            self.pauses = {}
        nth = self.counts[func]
        self.counts[func] += 1
        decision = program.by_call(func, nth)
        if decision is None and not program.warned:
            program.warned = True
            warnings.warn(
                f"region {program.region!r} runs ops that the profiled step did not run ({func}): they are not "
                "recomputed. Gradients are right; memory may be higher than planned.",
                stacklevel=2,
            )
        return bool(decision)

    def pause(self, fqn: str) -> bool:
        """Stop looking while this module runs, if the plan has it so here and all has been as profiled so far.

        Returns:
            Whether it was done; then call `resume` afterwards.
        """
        pause = self.pauses.get(self.position)
        if pause is None or pause.fqn != fqn or not set_aside(self):
            return False
        self.paused = True
        self.position = pause.end
        return True

    def resume(self) -> None:
        """Look again."""
        put_back(self)

    # -- recording ---------------------------------------------------------------------------------------------

    def _run(self, func, info: OpInfo, types, args, kwargs, recompute: bool) -> Any:
        recompute = recompute and info.replayable and not any(map(_is_foreign, types))
        written: tuple[Slot, ...] = ()
        if info.writes:
            targets = written_tensors(info, args, kwargs)
            written = tuple({slot for slot in map(self.slot_of, targets) if slot is not None})
            if written and not (info.replayable and len(written) == len({_key(t) for t in targets})):
                for target in targets:  # earlier values can be recomputed, what this op makes of them is kept
                    self.slots.pop(_key(target), None)
                written = ()
            recompute = bool(written)
            if not recompute:
                for target in targets:
                    if self.call.holds(_key(target)):
                        self.call.preserve(_key(target))
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
        if written:
            for target in written_tensors(info, args, kwargs):
                self.raw.discard(_key(target))
                slot = self.slot_of(target)
                if slot is not None:
                    slot.is_written(target)
        alive = [slot.alive() for slot in written] if info.resizes else []
        sizes = [(storage, storage.nbytes()) for storage in alive if storage is not None]
        refs: list[tuple[Any, Slot, Geometry | None]] = []
        kept: list[tuple[torch.Tensor, int]] = []
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
        rng = None
        if info.random and info.draws_random(args):
            generator = info.generator(args, kwargs) or default_generator(_device(info, args, kwargs))
            with _drawing:
                rng = (generator, generator.get_state())
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs) if kwargs else func(*args)
        for name in info.keywords:
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor):
                kwargs[name] = self._store(value, name, refs, kept)
            elif value is not None:
                kwargs[name] = [
                    None if t is None else self._store(t, (name, j), refs, kept) for j, t in enumerate(value)
                ]
        if any(storage.nbytes() != n_bytes for storage, n_bytes in sizes):
            for storage, _ in sizes:  # see NOTE [ Never wrong ]
                self.slots.pop(storage._cdata, None)
            return result
        record = Record(func, tuple(stored), kwargs, refs, kept, rng, written)
        outputs = []
        for index, tensor in enumerate((result,) if isinstance(result, torch.Tensor) else tensors_in(result)):
            slot = self._new_slot(tensor, info)
            if slot is not None:
                outputs.append((index, slot))
        record.outputs = tuple(outputs)
        if outputs or written:
            self.call.records.append(record)
        return result

    def _store(self, tensor: torch.Tensor, where: Any, refs: list, kept: list) -> torch.Tensor | None:
        """What the record keeps of an argument: nothing but a reference if it will be recomputed, else the tensor."""
        key = _key(tensor)
        slot = self.slot_of(tensor, key)
        if slot is not None and self.raw and key in self.raw and not slot.written:
            del self.slots[key]  # an opaque kernel wrote it, see NOTE [ Never wrong ]
            self.raw.discard(key)
            slot = None
        if slot is not None:
            refs.append((where, slot, slot.geometry_of(tensor)))
            return None
        if key:
            self.call.held[key] = weakref.ref(tensor.untyped_storage())
        tensor = self.hold(tensor)
        kept.append((tensor, version_of(tensor)))
        return tensor

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its graph, which would make a cycle: see NOTE [ Who holds what ] 3.

        In the forward of a custom `autograd.Function`, where gradients are off, what has no graph yet gets one if it is
        returned.
        """
        if not torch.is_grad_enabled():
            return detach_sharing_version(tensor)
        return _without_graph(tensor, detach_sharing_version)

    def slot_of(self, tensor: torch.Tensor, key: int | None = None) -> Slot | None:
        """The slot of the tensor's storage, whose key may be given, if that will be recomputed."""
        if key is None:
            key = _key(tensor)
        slot = self.slots.get(key)
        if slot is None or slot.alive() is None:
            return None
        if self.paused and version_of(tensor) > slot.version:
            del self.slots[key]  # written unseen, see NOTE [ Pauses ]
            return None
        return slot

    def _new_slot(self, tensor: torch.Tensor, info: OpInfo) -> Slot | None:
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None:
            return None  # sparse and the like: kept by whoever needs it
        key = storage._cdata
        known = self.slots.get(key)
        if (known is not None and known.alive() is not None) or self.call.holds(key):
            return None  # an alias of an argument
        slot = self.slots[key] = Slot(len(self.call.slots), tensor, storage)
        self.call.slots.append(slot)
        self.raw.discard(key)  # of a storage that was here before
        if info.uninitialised:
            self.raw.add(key)
        return slot

    # -- autograd's side ---------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook."""
        slot = self.slot_of(tensor)
        if slot is None or (self.raw and _key(tensor) in self.raw and not slot.written):
            return _without_graph(tensor, _detach_unseen), version_of(tensor), self.call
        handle = Handle(self.call, slot, slot.geometry_of(tensor), version_of(tensor))
        slot.handles.append(weakref.ref(handle))
        return handle

    def finish(self) -> None:
        """The region's forward is over."""
        self.call.recording = False
        self.call.pending = bool(self.call.records)


def run(program: Program, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one call of a region so that its backward replays what the program says to recompute."""
    recording = Recording(ReplayCall(program))
    outer, running.recording = running.recording, recording
    try:
        with torch.autograd.graph.saved_tensors_hooks(recording.pack, unpack), recording:
            result = forward(*args, **kwargs)
    finally:
        running.recording = outer
    recording.finish()
    return result


def _key(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0  # sparse and the like have no storage


def _without_graph(tensor: torch.Tensor, detach: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What may be held of a tensor: see NOTE [ Who holds what ] 3. A view holds its base, and that perhaps a graph."""
    base = tensor._base
    whole = tensor if base is None else base
    if whole.is_leaf and (base is None or _ends_at(base, tensor)):
        return tensor
    return detach(tensor)


def _ends_at(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view's graph leads to a parameter and no further, as that of a linear layer's transposed weight does.

    A function of somebody's own may hold the view that it made.
    """
    return type(base) is torch.nn.Parameter and not isinstance(view.grad_fn, BackwardCFunction)


def _detach_unseen(tensor: torch.Tensor) -> torch.Tensor:
    # A subclass's own dispatch must see that, and our mode ignores it.
    return tensor.detach() if _is_foreign(type(tensor)) else detach_unseen(tensor)


def _is_foreign(kind: type) -> bool:
    """A tensor subclass with a dispatch of its own: its storage is not ours to account for."""
    return kind is not torch.Tensor and kind is not torch.nn.Parameter


def _device(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for position in info.tensors:
        if position < len(args) and args[position] is not None:
            return args[position].device
    return torch.device("cpu")
