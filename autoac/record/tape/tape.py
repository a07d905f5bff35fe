"""Record one training step: every op, storage and saved tensor, with the times of release and the modules.

NOTE [ The recorded step ]
  1. The step runs in as little memory as possible: the replay engine runs some modules with everything recomputed. The
     choice of modules does not change the record. Replayed ops are left out of it, and the engine and autograd hold
     aliases (`SavedTensors.alias`), so that the tape notices when nothing else holds a storage.
  2. So a storage's `free` is the tick at which Python and the rest of the step have released it. Saved tensors are
     recorded separately, with the ticks of their first unpack and their release. From these `autoac_solver.build`
     derives the memory of any choice of regions and decisions.
  3. A storage from before the step is copied before it is first written, and restored at the end. So is the shape of a
     tensor on it that an op changes in place. A storage that is resized without an op is left at its new size: code
     that does that, such as FSDP, frees only what it can make again.
  4. Under a dispatch mode, autograd runs some ops out of place that would be in place without one
     (`isTensorSubclassLike` is then true for every tensor): sums of gradients, and scatters into zeros. They are
     recorded as in place, see `Formulas.in_place`. Source: aten/src/ATen/TensorSubclassLikeUtils.h, which
     `can_accumulate_inplace` in torch/csrc/autograd/input_buffer.cpp and the formulas in FunctionsManual.cpp ask.
  5. FSDP2 resizes a storage to zero when it frees a gathered parameter, and back when it gathers it again. Each life in
     between is a row of its own. A saved tensor on such a storage does not keep its bytes alive under any plan, and a
     recomputed op reads the parameter as gathered by then. The storage is overwritten without a copy. Source:
     `alloc_storage` and `free_storage` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
  6. Of a sharded tensor (DTensor) the tape sees the local part: the ops on the shards, and the collectives in between.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from autoac.device import streams
from autoac.execute.replay import ReplayCall
from autoac.ops.generators import state_of
from autoac.ops.info import OpInfo, is_collective, op_info, read_tensors, tensors_in, written_tensors
from autoac.ops.signatures import Signature, flops_of
from autoac.ops.waits import waits
from autoac.price.meters import OpTimer, SignatureMeter, WorkspaceMeter
from autoac.record.guard import Draws
from autoac.record.single_draws import SingleDraws
from autoac.record.tape.before import BeforeStep
from autoac.record.tape.calls import ModuleCalls
from autoac.record.tape.clock import Clock, Suspended
from autoac.record.tape.formulas import Formulas, traced_bytes
from autoac.record.tape.saved import SavedTensors
from autoac.record.tape.storages import Storages
from autoac.step.inputs import autocast_in, described, larger, without_autocast
from autoac.step.restore import tensors_of
from autoac.torch_private import (
    DispatchMode,
    HigherOrderOperator,
    behind_transforms,
    counted_writes,
    disable_dispatch_modes,
    gloo_threads,
    has_checkpoint_rule,
    in_backward,
    is_fake,
    is_fake_type,
    is_sharded_type,
    on_fake_tensors,
    parts_of,
    storage_key,
    wait_for_gloo,
)
from autoac_solver.records.profile import INFERENCE

_LIFT = torch.ops.aten.lift_fresh.default
_CAST = torch.ops.aten._to_copy.default
_COPY = torch.ops.aten.copy_.default
_SCATTERS = ("c10d._reduce_scatter_base_", "c10d.reduce_scatter_")
_TELL_EVERY = 50
_NOTHING: dict[str, Any] = {
    "backward": False,
    "beside_bytes": 0,
    "inside": (),
    "reads": (),
    "writes": (),
    "creates": (),
    "random_bytes": 0,
    "replayable": True,
    "side_effect": False,
    "uninitialised": False,
    "flops": 0,
    "moved_bytes": 0,
    "cached_cast": False,
    "waits": False,
    "read_on_host": False,
}
"""What is not known of an op's row."""


class Tape(DispatchMode):
    """The dispatch mode that records a step, below all modes that the step enters.

    Args:
        device: only storages on this device have a size; others are recorded with zero bytes.
        meter: runs the ops and measures them, by signature.
        before: keeps and restores the state from before the step.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: torch.device,
        meter: OpTimer | WorkspaceMeter | SignatureMeter,
        before: BeforeStep | None = None,
    ):
        super().__init__()
        self.device = device
        self.meter = meter
        self.sample = ""  # see `Profile.sample`
        self.root_calls: list[str] = []  # descriptions of the model's calls with gradients on
        self.single = SingleDraws()
        # Op -> the module calls in which it drew from Python's or numpy's random numbers.
        self.drawn_on_host: dict[str, list[int]] = {}
        self.failed_at: tuple[str, str] | None = None  # op and module where the step failed
        self.on_op: Callable[[int], None] = lambda done: None  # now and then called with the number of ops
        self.ops: list[dict[str, Any]] = []
        self.view_times: list[float] = []
        self.for_shards: Any = None  # the op on sharded tensors whose local op is still to come
        self.casts_shards = False  # whether that is a cast that autocast caches
        self.sized_by_values = set[int]()  # storages, made outside of modules, and masks
        self.gloo: list[Path] = []  # the threads that may still hold tensors of collectives that are over
        self.replays: weakref.WeakSet[ReplayCall] = weakref.WeakSet()
        self.clock = Clock()
        self.before = before or BeforeStep()
        self.calls = ModuleCalls()
        on_fakes = isinstance(meter, SignatureMeter)
        self.storages = Storages(device, self.clock, self.before, self.calls.not_counted, on_fakes)
        self.saved = SavedTensors(self.clock, self.storages, self.calls, on_fakes)
        self.formulas = Formulas(self.clock, self.storages, self.saved)

    # -- ops ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.clock.suspended:
            return func(*args, **kwargs)
        if any(map(is_sharded_type, types)):
            self.for_shards = func
            self.casts_shards = self._is_cached_cast(func, args)
            return NotImplemented  # DTensor's own dispatch is next; the ops that it runs come here
        if not self.saved.on_fakes and on_fake_tensors():
            return func(*args, **kwargs)  # shape inference only
        try:
            return self._dispatch(func, args, kwargs)
        except BaseException:
            self.failed_at = self.failed_at or (str(func), self.calls.where())
            raise

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.gloo:
            wait_for_gloo(self.gloo)
        self.storages.poll()
        self.saved.unpacks.node_runs()
        info = op_info(func)
        return (self._view if info.ignored else self._op)(func, info, args, kwargs)

    def _view(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        self.calls.count_view()
        if func is _LIFT and args[0].untyped_storage().resizable():
            self.clock.next()  # just made by `torch.tensor`; numpy's memory is not resizable
        else:  # a storage first seen here is older than the step
            self._note_scattered(tensors_in(args))
            self.storages.indices_of(tensors_in((*args, *kwargs.values())))
        with self.storages.shapes_watched(args[:1] if info.reshapes else ()):
            start = time.perf_counter()
            if isinstance(func, HigherOrderOperator):
                result = self._higher_order(func, info, args, kwargs)
            else:
                result = func(*args, **kwargs)
            self.view_times.append(time.perf_counter() - start)
        if info.gives_values and self.ops:
            self.ops[-1]["read_on_host"] |= any(t.device.type == self.device.type for t in tensors_in(args))
        self.storages.made(tensors_in(result))  # a higher-order op makes storages, too
        return result

    def _higher_order(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        """Run a higher-order op, and record what it takes inside.

        In backward it is an op of the tape, without results. In forward it is not: regions run the ops of their
        programs one by one, and do not see this one. There it counts at the op before, where as much is alive or more.
        """
        signature = Signature.of(func, tensors_in((*args, *kwargs.values())), {})
        if not has_checkpoint_rule(func):
            self.calls.runs_unruled()
        if in_backward():
            self._note_unseen(info, signature)
        elif self.ops:
            self.ops[-1]["inside"] = (*self.ops[-1]["inside"], signature)
        if self.saved.on_fakes or not self.ops:
            self.calls.runs_unseen(info.name)
        if self.meter.inside is None:
            result = func(*args, **kwargs)
        else:
            result = self.meter.inside.run_inside(
                signature, func, args, kwargs, traced_bytes(info.name, args)
            )
        self.clock.next()  # its results are among what it takes inside
        return result

    def _note_unseen(self, info: OpInfo, signature: Signature) -> None:
        self.ops.append(self._row(info, self.clock.next(), signature, backward=True, replayable=False))

    def _row(self, info: OpInfo, tick: int, signature: Signature, **known: Any) -> dict[str, Any]:
        """A row of the tape, in which all that is not known is zero or empty."""
        own = {"name": info.name, "tick": tick, "module": self.calls.of_op()}
        return {**_NOTHING, **own, "signature": signature, "dtype": signature.dtype, **known}

    def _op(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        tick = self.clock.next()
        written = written_tensors(info, args, kwargs)
        if func is _COPY:
            self._note_scattered(args[1:2])
        reads = self.storages.indices_of(read_tensors(info, args, kwargs))
        unseen = self.saved.unseen
        if unseen is not None and in_backward():
            unseen.backward_begins()
        elif unseen is not None and not unseen.is_checked:
            unseen.before_op(info, args, kwargs)
        writes = self.storages.indices_of(written)
        statistics = info.updates_statistics(args)
        if statistics:
            reads, writes = [s for s in reads if s not in writes], []
        for tensor in written:
            self._before_write(tensor)
        sizes = self.storages.sizes(written) if info.resizes else {}
        random_bytes = self._random_bytes(info, args, kwargs)
        self.formulas.note_end(info)
        # Autograd sums sharded tensors out of place, with or without a mode.
        casts_shards = self.casts_shards and func is self.for_shards
        in_place = func is not self.for_shards and self.formulas.in_place(info, args)
        beside_bytes = self.formulas.beside_bytes(info, args)
        with (
            self.storages.shapes_watched(written if info.resizes else ()),
            counted_writes(written if info.writes_lists else []),
        ):
            draws = Draws(info, args, kwargs)
            result, signature = self.meter.run(func, info, args, kwargs)
            if info.random:
                result = self.single.drawn(func, args, kwargs, result)
            random_bytes += draws.note(self.before.keep_state, self.saved.on_fakes)
        if draws.on_host:
            self.drawn_on_host.setdefault(info.name, []).append(self.calls.of_op())
        if is_collective(info.name) and self.device.type == "cpu" and not self.saved.on_fakes:
            self.gloo = gloo_threads()
        if in_place:
            self.storages.stand_in(result, for_tensor=args[0])
            writes = reads[:1]
        creates = self.storages.made(tensors_in(result), tick)
        if not self.calls.stack and not in_backward() and info.sized_by_values(args):
            masks = tensors_in(args[1]) if info.name == "aten.index.Tensor" else ()
            self.sized_by_values.update((*creates, *self.storages.indices_of(masks)))
        if not is_collective(info.name):
            self.for_shards = None
        self.formulas.note_scalar(info, args)
        self.calls.runs(info, args)
        if self.calls.stack and not self.saved.on_fakes and (by := streams()) is not None:
            for tensor in tensors_in(result):
                if (key := by.key(tensor)) is not None:
                    self.calls.runs_on(key)
        if not len(self.ops) % _TELL_EVERY:
            self.on_op(len(self.ops))
        resized = self.storages.grown(sizes, written)
        strided = [tensor for tensor in tensors_in(result) if tensor.layout is torch.strided]
        made = [tensor for tensor in strided if self.storages.known(tensor) in creates]
        is_plain = not any(_is_subclass(kind) for kind in map(type, args))
        row = self._row(
            info,
            tick,
            signature,
            backward=in_backward(),
            beside_bytes=beside_bytes,
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(dict.fromkeys(writes)),
            creates=tuple(creates),
            random_bytes=random_bytes,
            replayable=info.replayable and is_plain and not resized and not draws.on_host,
            side_effect=statistics or info.generator(args, kwargs) is not None,
            uninitialised=info.uninitialised,
            flops=flops_of(func, args, kwargs, result),
            moved_bytes=signature.moved_bytes(made),
            cached_cast=self._is_cached_cast(func, args) or (func is _CAST and casts_shards),
            waits=waits(info, args, kwargs, result),
        )
        self.ops.append(row)
        if unseen is not None:
            unseen.is_checked = False
            later = in_backward() or is_collective(info.name)
            if later:
                unseen.is_written_later((*written, *tensors_in(result)))
            else:
                unseen.wrote((*written, *tensors_in(result)), info.uninitialised)
        return result

    def left_lean(self, result: Any) -> None:
        """Called with the result of a lean module."""
        if self.saved.unseen is not None:
            self.saved.unseen.passes(map(behind_transforms, tensors_of(result)))

    def _note_scattered(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the tensor that gloo's reduce-scatter makes without an op; after the wait it is copied out."""
        if self.ops and self.ops[-1]["name"].startswith(_SCATTERS):
            self.storages.made(tensors, self.ops[-1]["tick"])

    def _is_cached_cast(self, func: Any, args: Any) -> bool:
        """Whether autocast caches this op's result, see `cached_cast` in ATen's autocast_mode.cpp.

        This runs below autocast's kernels, where autocast reads as off; its state at the module's call is used instead.
        """
        if func is not _CAST or in_backward() or not self.calls.autocast:
            return False
        weight = args[0]
        kept = weight.is_leaf and weight.requires_grad and weight.dtype is torch.float32
        return kept and torch.is_autocast_cache_enabled()

    def _random_bytes(self, info: OpInfo, args: Any, kwargs: Any) -> int:
        if not info.draws_random(args):
            return 0
        generator = info.generator(args, kwargs) or torch.default_generator
        state = state_of(generator)
        self.before.keep_state(generator, state)
        return state.nbytes

    def _before_write(self, tensor: torch.Tensor) -> None:
        for part in parts_of(tensor):
            index = self.storages.index_of(part)
            if index is None or index in self.storages.gathered:
                continue
            key = storage_key(part)
            with Suspended(self.clock), disable_dispatch_modes():
                for call in self.replays:
                    if call.holds(key):
                        call.preserve(key)
                if self.storages.was_before(index) and not is_fake(part):
                    self.before.keep_values(index, part)
                    self.before.keep_graph(tensor)

    # -- modules -----------------------------------------------------------------------------------------------

    def enter(self, fqn: str, call: int, module: torch.nn.Module, inputs: Any) -> None:
        """A module's forward begins."""
        self.storages.poll()
        if not fqn:
            own = described(*inputs)
            # A trainer may have announced the batch before it has entered its autocast.
            told = without_autocast(self.sample) + autocast_in(own) if own else self.sample
            self.sample = larger(told, own)
            if torch.is_grad_enabled():
                self.root_calls.append(without_autocast(own))
        given = [(tensor, behind_transforms(tensor)) for tensor in tensors_of(inputs)]
        tick = self.clock.next()
        storages = dict.fromkeys(self.storages.indices_of(behind for _, behind in given))
        row = self.calls.enter(tick, fqn, call, module, tuple(storages))
        # Wrapper tensors of vmap and other transforms are dead in a second run.
        row["changes_arguments"] = any(tensor is not behind for tensor, behind in given)
        if any(tensor.is_inference() for tensor, _ in given):
            row["once"] = INFERENCE

    def returns(self, result: Any) -> None:
        """A module's forward is about to return."""
        given = [(tensor.requires_grad, behind_transforms(tensor)) for tensor in tensors_of(result)]
        self.calls.returns(
            tuple(dict.fromkeys(self.storages.indices_of(behind for _, behind in given))),
            tuple(dict.fromkeys(self.storages.indices_of(behind for needs, behind in given if needs))),
        )

    def leave(self, changes_arguments: bool) -> None:
        """A module's forward ends; `changes_arguments` as in `ModuleCall`."""
        self.storages.poll()
        self.calls.leave(self.clock.next(), changes_arguments)

    # -- afterwards --------------------------------------------------------------------------------------------

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves that may get a gradient in the step."""
        return self.before.leaves

    def restore(self) -> None:
        """Restore the state from before the step: tensors, gradients of leaves, generators."""
        self.storages.restore()


def _is_subclass(kind: type) -> bool:
    if not issubclass(kind, torch.Tensor) or is_fake_type(kind):
        return False
    return kind not in (torch.Tensor, torch.nn.Parameter)
