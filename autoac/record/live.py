"""Record a step of the user's own loop while it trains: no extra runs, and no state is restored.

NOTE [ A step of the loop ]
  1. The step begins with the model's first call. It ends before the optimizer steps or, in a loop without an optimizer,
     before the next call that finds the gradients cleared, if backward left any. So it includes everything that the
     loop does: micro-batches, the loss outside of the model, autocast, gradient scaling, clipping.
  2. The lean modules run under the replay engine with everything recomputed, as in `recorder`: gradients are bitwise
     equal, and the step takes the least memory possible.
  3. There is no warm-up. Workspace and times are measured in the same run (`LiveMeter`). Tensors that the first step
     sets up once are found among those still alive when the next step begins (`with_leftovers`).
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.device import device_for
from autoac.measure import ONE_AT_A_TIME
from autoac.ops.info import OpInfo
from autoac.ops.signatures import Signature
from autoac.price.chunked_loss import with_price_of_chunks
from autoac.price.engine_costs import engine_costs
from autoac.price.meters import Disturbance, OpTimer, WorkspaceMeter
from autoac.record import recorder
from autoac.record.buffers import Buffers
from autoac.record.guard import GuardOfLoop
from autoac.record.notes import (
    note_if_unsteady,
    note_on_device,
    notes_if_calls_differ,
    notes_if_checkpointed,
    notes_if_compiled,
    notes_if_drawn_on_host,
    notes_if_sized_by_values,
    notes_if_uncounted,
    notes_if_under_hooks,
)
from autoac.record.tape import tables as tape_tables
from autoac.record.tape.before import BeforeStep
from autoac.record.tape.instrumented import Instrumented
from autoac.record.tape.tape import Tape
from autoac.record.unseen import UnseenWrites, mark
from autoac.step.inputs import described
from autoac.step.interrupts import interruptible
from autoac.step.model import (
    check_model,
    device_bytes,
    device_of,
    gradient_of,
    has_gradients,
    model_fingerprint,
)
from autoac.step.modules import lean_modules
from autoac.step.restore import Seen, tensors_of
from autoac.step.uncompiled import uncompiled
from autoac.step.units import here, own_name
from autoac.torch_private import (
    behind_transforms,
    current_backward,
    in_backward,
    in_compiled_call,
    is_profiled,
    key_of_storage,
    local_part,
    storage_key,
    top_dispatch_mode,
    top_saved_tensors_hooks,
    when_backward_ends,
)
from autoac_solver.plan.parts import with_parts
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import NEVER, OWN_LOOP, ModuleCall, Profile, Storage

_PROFILED = (
    "torch's profiler ran in the recorded step, so memory that ops take inside of them may not be counted: let autoac "
    "record a step without it"
)
ONE_DRAW = (
    "single random numbers were drawn in the recorded step: if they decide what is called, as for layer drop, then it "
    "is one draw of many. A step is recorded anew where a later one calls other modules; autoac.plan plans for all of "
    "them at once"
)


class LiveMeter(OpTimer):
    """Times ops, and measures the workspace of each signature's first call.

    Args:
        known: workspaces from an earlier record.
    """

    def __init__(self, device: torch.device, known: Mapping[Signature, int]):
        super().__init__(device)
        self.inside = self.workspace = WorkspaceMeter(device)
        self.workspace.workspace_bytes.update(known)

    def run(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, Signature]:
        """Run the op; returns its result and signature."""
        signature = Signature.of(func, args, kwargs)
        if signature in self.workspace.workspace_bytes:
            return super().run(func, info, args, kwargs)
        if self.repeats(signature, func, info, args, kwargs):
            return self.workspace.run(func, info, args, kwargs)
        return self.time_of(signature, self.workspace.run, (func, info, args, kwargs), {})

    def repeats(self, signature: Signature, func: Any, info: OpInfo, args: Any, kwargs: Any) -> bool:
        """As in `OpTimer`; no ops but torch's own, which may keep a state: this step trains."""
        return not info.unknown and super().repeats(signature, func, info, args, kwargs)


class InUse(RuntimeError):
    """What a step is recorded with is used by another thread."""


class _NothingKept(BeforeStep):
    """Keeps nothing: a live step is not undone, and copies would keep gradients alive that the loop clears.

    Attributes:
        written: keys of the storages from before the step that ops have written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def keep_gradient(self, leaf: torch.Tensor) -> None:
        pass

    def keep_values(self, index: int, tensor: torch.Tensor) -> None:
        self.written.add(storage_key(local_part(tensor)))

    def keep_graph(self, tensor: torch.Tensor) -> None:
        pass

    def keep_shapes(self, seen: Iterable[Seen]) -> None:
        pass

    def keep_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        pass


class LiveTape(Tape):
    """Tape of a real training step, whose writes are not undone.

    Args:
        ending: storage keys of the parameters of which a write after backward ends the step.
        has_gradients: whether any parameter has a gradient now.
    """

    def __init__(
        self, device: torch.device, meter: OpTimer, ending: set[int], has_gradients: Callable[[], bool]
    ):
        self.kept = _NothingKept()
        super().__init__(device, meter, self.kept)
        self.ending = ending
        self.is_over = False  # a parameter was written after backward: the update has begun
        self.is_trained = False  # a backward has left gradients of parameters, or an optimizer stepped in it
        self._has_gradients = has_gradients
        self._backwards: set[int] = set()  # numbers of those that have begun
        self._unended: set[int] = set()  # and of those that have not ended

    def _op(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        backward = current_backward()
        if backward >= 0 and backward not in self._backwards:
            self._backwards.add(backward)
            self._unended.add(backward)
            when_backward_ends(functools.partial(self._backward_has_ended, backward))
        return super()._op(func, info, args, kwargs)

    def _backward_has_ended(self, number: int) -> None:
        self._unended.discard(number)
        self.is_trained |= self._has_gradients()

    def _before_write(self, tensor: torch.Tensor) -> None:
        super()._before_write(tensor)
        written = bool(self.ending) and tensor.layout is torch.strided and storage_key(tensor) in self.ending
        if written and in_backward():
            self.is_trained = True
        elif written and self.went_backward:
            self.is_over = True
            self.clock.suspended += 1  # from here on ops are the optimizer's

    @property
    def went_backward(self) -> bool:
        """Whether a backward has begun."""
        return any(row["backward"] for row in reversed(self.ops))

    @property
    def is_given_up(self) -> bool:
        """Whether the step is none to plan for, outside of backward.

        It can no longer have a backward (none has begun, and all saved tensors are released), or one has failed.
        """
        if self._unended:
            return True
        rows = self.saved.rows
        return not self.went_backward and bool(rows) and all(row["released"] != NEVER for row in rows)


def keys_of_parameters(model: torch.nn.Module) -> set[int]:
    """Keys of the storages of a model's strided parameters."""
    return {storage_key(local_part(p)) for p in model.parameters() if p.layout is torch.strided}


class LiveStep:
    """One step of the user's loop while it is recorded, from `begin` to `finish` or `give_up`.

    Args:
        model: not planned.
        lean_losses: as for `recorder.recorded_step`.
        known: workspaces from an earlier record.
        ends_with_optimizer: whether writes to parameters do not end the step.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lean_losses: bool,
        known: Mapping[Signature, int],
        ends_with_optimizer: bool,
    ):
        check_model(model)
        self.model = model
        self.device = device_of(model)
        self.losses = None if lean_losses else {}
        self.meter = LiveMeter(self.device, known)
        keys = set[int]() if ends_with_optimizer else keys_of_parameters(model)
        self.tape = LiveTape(self.device, self.meter, keys, functools.partial(has_gradients, model))
        unseen = self.tape.saved.unseen = UnseenWrites(self.tape, model.parameters(), keeps=True)
        self.tape.saved.guard = GuardOfLoop(unseen.found)
        self.buffers = Buffers(model)
        self.parameters = keys_of_parameters(model)
        # The user's torch profiler is running, and there can be only one: workspace cannot be measured.
        self.profiled = device_for(self.device).memory_events and is_profiled()
        self.survivors: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.fingerprint = model_fingerprint(model)  # some loops freeze parts of it within the step
        self._began_compiled = False
        self._stopped: Any = None  # what `stop` has found

    def begin(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], others: Iterable[torch.Tensor]) -> None:
        """Record from here on.

        Args:
            inputs: positional and keyword arguments that the model is called with.
            others: tensors that are counted elsewhere, such as an optimizer's state.

        Raises:
            ProfilingError: a mode or hooks are on under which the step cannot be recorded.
            InUse: another thread measures memory, or records a step: a later step can be recorded.
        """
        if top_dispatch_mode() is not None or top_saved_tensors_hooks() is not None:
            raise ProfilingError(
                "the model is called under a dispatch mode or under saved-tensor hooks (checkpoint, save_on_cpu): a "
                "step in which it is called without them can be recorded."
            )
        model, tape = self.model, self.tape
        tape.sample = described(*inputs)
        gradients = [g for p in model.parameters() if (g := gradient_of(p)) is not None]
        # The loop may call the model by `torch.func.vmap` or `jvp`.
        given = map(behind_transforms, tensors_of(inputs))
        fixed = [*model.parameters(), *gradients, *model.buffers(), *given]
        tape.storages.note_others(here([*fixed, *others]))
        for tensor in fixed:
            tape.storages.index_of(tensor)
        tape.storages.first_seen.step_begins(self.device)
        self.gradients = {tape.storages.index_of(gradient) for gradient in gradients}
        with contextlib.ExitStack() as stack:
            stack.callback(tape.restore)
            # What the loop runs before it ends the step may save tensors here for a backward after it.
            stack.callback(setattr, tape.saved, "unseen", None)
            if not self.profiled:
                if (turn := ONE_AT_A_TIME.begin(waits=False)) is None:
                    raise InUse("another thread measures memory")
                # Also if the step is never over, and its loop is gone.
                stack.callback(weakref.finalize(self, turn.end))
                profiling = contextlib.ExitStack()
                # torch's profiler must not run when the process ends, as after an error in the step
                stack.callback(weakref.finalize(self, profiling.close))
                profiling.enter_context(self.meter.workspace.measuring())
            stack.enter_context(uncompiled(model))
            stack.enter_context(Instrumented(model, tape, lean_modules(model), self.losses))
            stack.enter_context(interruptible())  # the user's own loop runs next
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(tape.saved.pack, tape.saved.unpack))
            stack.enter_context(tape)
            self._began_compiled = in_compiled_call()
            self.started, self.disturbance = time.perf_counter(), Disturbance()
            self.contexts = stack.pop_all()

    @property
    def is_trained(self) -> bool:
        """Whether a backward has left gradients of parameters, or parameters have other memory than at the start."""
        return self.tape.is_trained or self.parameters != keys_of_parameters(self.model)

    @property
    def can_end(self) -> bool:
        """Whether our dispatch mode and saved-tensor hooks are on top of their stacks."""
        hooks = top_saved_tensors_hooks()
        return top_dispatch_mode() is self.tape and hooks == (self.tape.saved.pack, self.tape.saved.unpack)

    @property
    def has_stopped(self) -> bool:
        """Whether nothing more is recorded."""
        return self._stopped is not None

    @property
    def must_stay_on(self) -> bool:
        """Whether our dispatch mode cannot be taken off now, see `in_compiled_call`."""
        return not self._began_compiled and in_compiled_call()

    def give_up(self) -> None:
        """Stop recording without a profile."""
        self.contexts.close()

    def stop(self, states: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        """Record no more. Our modes and hooks stay on, idle, until `finish` or `give_up`.

        Args:
            states: of the optimizers that have stepped in backward, each tensor with its optimizer's name.

        Raises:
            ProfilingError: no backward ran.
        """
        elapsed = time.perf_counter() - self.started
        guard, unseen = self.tape.saved.guard, self.tape.saved.unseen
        assert guard is not None
        assert unseen is not None
        times = self.meter.times()
        found = unseen.found()
        unfit = mark(self.tape.ops, self.tape.calls, found)
        self.buffers.compare(self.tape.kept.written)
        unfit = (*unfit, *guard.mark(self.tape.ops, found), *self.buffers.mark(self.tape.calls))
        tables = tape_tables.finish(self.tape, recorder.names_of(self.model), {}, times)
        known = ((self.tape.storages.known(state), name) for name, state in states)
        on_tape = {index: name for index, name in known if index is not None}
        left = self.tape.storages.survivors(tables["end"])
        self.survivors = {index: ref for index, ref in left.items() if index not in on_tape}
        self.tape.clock.suspended += 1
        self._stopped = elapsed, times, unfit, tables, on_tape

    def finish(self, states: Iterable[tuple[str, torch.Tensor]] = ()) -> Profile:
        """Stop recording and make the profile.

        Args:
            states: as for `stop`, if that was not called.

        Raises:
            ProfilingError: no backward ran.
        """
        try:
            if self._stopped is None:
                self.stop(states)
        finally:
            self.contexts.close()
        assert self._stopped is not None
        elapsed, times, unfit, tables, on_tape = self._stopped
        tables["tape"] = tape_tables.timed(self.tape.ops, times, self.workspaces)
        # Storages from before the step that the loop frees in it, such as gradients cleared after forward.
        tables["storage_table"] = tuple(
            replace(storage, alloc=0, kind="Gradient" if index in self.gradients else storage.kind)
            if storage.alloc == NEVER and storage.free < tables["end"]
            else storage
            for index, storage in enumerate(tables["storage_table"])
        )
        _count_states(tables, on_tape)
        recorder.check_recorded(tables, is_whole=True)
        checkpointed = notes_if_checkpointed(self.model)
        profile = Profile(
            model=own_name(self.model),
            model_fingerprint=self.fingerprint,
            device=str(self.device),
            device_bytes=device_bytes(self.device),
            torch_version=torch.__version__,
            costs=engine_costs(self.device, recorder.bytes_per_op(tables["tape"])),
            measured_step_s=elapsed,
            notes=(
                "recorded while the model was trained: a step of your own loop, up to the optimizer's",
                *([_PROFILED] if self.profiled else []),
                *([ONE_DRAW] if self.tape.single.count else []),
                *checkpointed,
                *notes_if_compiled(self.model, self.tape),
                *notes_if_uncounted(self.tape),
                *([] if checkpointed else notes_if_under_hooks(self.tape)),
                *notes_if_calls_differ(self.tape),
                *notes_if_sized_by_values(self.tape),
                *notes_if_drawn_on_host(self.tape),
                *unfit,
                *note_if_unsteady(times.values(), self.device, self.disturbance),
                *note_on_device(self.device),
            ),
            facts=(OWN_LOOP, *recorder.facts_of(self.tape, checkpointed)),
            **tables,
        )
        profile = with_price_of_chunks(profile, self.device)
        # Where it draws single random numbers, others may skip layers, which shifts the cuts between parts.
        return profile if self.tape.single.count else with_parts(profile)

    @property
    def workspaces(self) -> dict[Signature, int]:
        """Workspace in bytes per signature, of a finished step."""
        return self.meter.workspace.workspace_bytes


def _count_states(tables: dict[str, Any], states: dict[int, str]) -> None:
    """Have the states of optimizers that step in backward, by index of their storages, exist before the step.

    The step that makes them is not like the others.
    """
    tables["storage_table"] = tuple(
        replace(storage, alloc=NEVER, free=tables["end"], kind="Optstate", name=states[index])
        if index in states
        else storage
        for index, storage in enumerate(tables["storage_table"])
    )
    tables["tape"] = tuple(
        op
        if states.keys().isdisjoint(op.creates)
        else replace(op, creates=tuple(storage for storage in op.creates if storage not in states))
        for op in tables["tape"]
    )


def with_leftovers(
    profile: Profile,
    survivors: dict[int, weakref.ref[torch.UntypedStorage]],
    rebound: Collection[int],
    kept_by: Mapping[int, str],
    given: Collection[int] = (),
) -> Profile:
    """The profile of a step that begins while the loop still holds tensors of the previous step, such as its output.

    The loop frees them when it rebinds their names. For local variables of the code that calls the model, this is when
    the call that makes their successors has returned; for attributes of a module, when its own call has. Anything else,
    such as the results of a function that runs a whole step, is taken to be rebound after backward. DDP's buckets,
    which it makes anew once, are no such results.

    Args:
        survivors: storages that were alive at the step's end.
        rebound: keys of the storages in local variables of the code that calls the model.
        kept_by: modules' names, by the keys of the storages in their attributes.
        given: keys of the storages that the next step is called with, such as the state of a recurrent network. The
            recorded step has had such inputs, too: they are counted already.
    """
    inputs = Counter(s.bytes for s in profile.storage_table if s.kind == "Input" and s.alloc <= 0)
    last = max((op.tick for op in profile.tape if op.backward), default=profile.end)
    released = [
        storage for storage in profile.storage_table if storage.kind == "Input" and storage.free < profile.end
    ]
    alive = [
        (profile.storage_table[index], kept)
        for index, ref in survivors.items()
        if (kept := ref()) is not None
    ]
    left = [(one, kept) for one, kept in alive if one.kind != "Gradient" and one.alloc <= last]
    roots = [call for call in profile.calls if call.fqn == ""]
    batches, buckets = _for_later(profile, roots)
    again = []
    for storage, kept in left:
        key = key_of_storage(kept)
        if key in given and inputs[storage.bytes]:
            inputs[storage.bytes] -= 1
            continue
        makers = [call for call in profile.calls if call.start <= storage.alloc <= call.end]
        ends = [call.end for call in makers if call.fqn == kept_by.get(key, "")]
        # The data loader is one batch ahead: the recorded step began with such a batch too, which is counted already.
        same = [one for one in released if one.bytes == storage.bytes and one.free > storage.alloc]
        if same and storage in batches:
            released.remove(same[0])
            continue
        is_soon_replaced = key in rebound or storage in buckets or (key in kept_by and bool(ends))
        until = max([storage.alloc, *ends]) if is_soon_replaced else last
        free = min(until + 1, profile.end)
        again.append(Storage(storage.bytes, 0, free, "Input", "left by the step before"))
    return replace(profile, storage_table=(*profile.storage_table, *again)) if again else profile


def _for_later(profile: Profile, roots: Sequence[ModuleCall]) -> tuple[list[Storage], list[Storage]]:
    """Storages made outside of the model's calls, of nothing of the model's: those that no op reads, only backward."""
    table = profile.storage_table
    of_the_model = {
        index
        for index, storage in enumerate(table)
        if storage.kind in ("Parameter", "Buffer", "Gradient")
        or any(call.start <= storage.alloc <= call.end for call in roots)
    }
    read, read_forward = set[int](), set[int]()
    for op in profile.tape:  # in order, so that what is computed from the model's results is found, too
        read.update(op.reads)
        if not op.backward:
            read_forward.update(op.reads)
        if op.backward or not of_the_model.isdisjoint(op.reads):
            of_the_model.update(op.creates)
    others = [index for index in range(len(table)) if index not in of_the_model and index not in read_forward]
    unread = [table[index] for index in others if index not in read]
    return unread, [table[index] for index in others if index in read]
