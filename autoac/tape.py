"""Record one training step: every op and storage, what autograd saves and when it lets go, and in which module.

NOTE [ The recorded step ]
  1. It runs in as little memory as we can: some modules are run by the replay engine with everything recomputed.
     Which modules, does not matter for the record: replayed ops are left out of it, and what the engine and autograd
     hold is held as aliases (`_Alias`), so that the tape can tell when nobody else holds a storage any more.
  2. So a storage's `free` is when Python and the rest of the step let go of it; what autograd saved is recorded on
     its own, with the ticks of its first unpack and its release. From these `autoac_solver.build` derives the memory
     of any choice of regions and decisions.
  3. A storage that was there before the step is copied before it is first written, and put back at the end. So is the
     shape of a tensor on it that an op changes in place. A storage that is resized where no op is seen is left at its
     new size: who does that by hand, as FSDP does, frees what it can make again.
  4. Under a dispatch mode, autograd does some things out of place that it would do in place (`isTensorSubclassLike`
     is true for every tensor then): it sums gradients, and scatters them into zeros. They are recorded as what they
     are without a mode, see `_in_place_without_a_mode`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import statistics
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.arguments import held_in
from autoac.compat import (
    COMPILED_NODE,
    any_autocast,
    behind_transforms,
    counted_writes,
    current_node,
    disable_dispatch_modes,
    disable_dynamo,
    held_once_as_argument,
    in_backward,
    is_compiled_wrapper,
    is_dense,
    is_fake_type,
    next_node_number,
    storage_key,
    storage_users,
    top_saved_tensors_hooks,
    version_of,
)
from autoac.engine.losses import EVERYWHERE, run_with_losses, sides
from autoac.engine.program import Program
from autoac.engine.replay import Record, Recording, ReplayCall
from autoac.engine.replay import unpack as replay_unpack
from autoac.fake import is_fake
from autoac.opinfo import OpInfo, op_info, read_tensors, tensors_in, written_tensors
from autoac.private_results import PRIVATE_RESULTS
from autoac.signatures import Signature, flops_of
from autoac.timing import OpTime, OpTimer, SignatureMeter, WorkspaceMeter
from autoac.untouched import Seen, put_back, tensors_of
from autoac_solver.profile import NEVER, SCALAR_BYTES, ModuleCall, Op, Saved, Storage

_CUDA_BLOCK_BYTES = 512
_LIFT = torch.ops.aten.lift_fresh.default
_CAST = torch.ops.aten._to_copy.default
_TELL_EVERY = 50

# Out of place under a dispatch mode only; source: `areAnyTensorSubclassLike` in torch's FunctionsManual.cpp.
_SCATTERS = {"aten.index_put.default", "aten.scatter.src", "aten.scatter_add.default"}
_SCATTERS |= {"aten.index_add.default", "aten.put.default"}
_BCE_NODE = "BinaryCrossEntropyWithLogitsBackward"
_EXTREMUM_NODES = ("MaxBackward1", "MinBackward1")
_BCE_OPS = {"aten.sub.Tensor", "aten.mul.Tensor"}

# Autograd brings a gradient to its input's shape and type (`validate_outputs` in torch's engine.cpp) when the node's
# formula is over, and with it whatever that has unpacked. The formulas of these nodes do not end with either op.
_NODES_FITTED_AFTERWARDS = (
    "MulBackward0",
    "DivBackward0",
    "AddcmulBackward0",
    "AddmmBackward0",
    "BaddbmmBackward0",
)
_FITTING_OPS = {"aten.sum.dim_IntList", "aten._to_copy.default"}


class Tape(TorchDispatchMode):
    """The dispatch mode that is below everything else while a step is recorded.

    Args:
        device: only storages on this device have a size; others are recorded with zero bytes.
        meter: runs the ops, and measures what it measures by their signatures.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, device: torch.device, meter: OpTimer | WorkspaceMeter | SignatureMeter):
        super().__init__()
        self.device = device
        self.meter = meter
        self.tick = 0
        self.suspended = 0
        self.failed_at: tuple[str, str] | None = None  # op and module where the step broke off
        self.on_op: Callable[[int], None] = lambda done: None  # told now and then how many ops are recorded
        self.ops: list[dict[str, Any]] = []
        self.storages: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.call_stack: list[int] = []
        self._autocast: list[bool] = []  # whether it was on when the modules on the stack were called
        self.compiled_calls: set[int] = set()  # in which compiled code ran
        self.uncounted: dict[int, set[str]] = {}  # call -> layouts of tensors whose memory is not counted
        self.replays: weakref.WeakSet[ReplayCall] = weakref.WeakSet()
        self._view_times: list[float] = []
        self._by_key: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._aliases: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # storage -> aliases that a holder has
        self._again: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._copies: dict[int, torch.Tensor] = {}  # resident storages as they were
        self._seen: list[
            Seen
        ] = []  # how tensors were that were there, and that an op has reshaped or resized
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with their gradients as they were
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # with their states as they were
        self._scalars: dict[int, dict[str, Any]] = {}  # node -> storage of the number that it has saved
        self._born_in: dict[int, int] = {}  # storage -> sequence number of the backward node that made it
        self._unpacked: list[int] = []  # saved tensors, by the node that unpacked last
        self._unpacked_for = (NEVER, NEVER)  # node that unpacked last, and the module call it belongs to
        self._extremum_bytes = 0  # of the gradient of the last maximum or minimum
        self._outside = ReplayCall(Program("", ()))

    # -- ops ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        try:
            return self._dispatch(func, args, kwargs)
        except BaseException:
            self.failed_at = self.failed_at or (str(func), self.where())
            raise

    def _dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._poll()
        info = op_info(func)
        if info.ignored:
            for call in self.call_stack:
                self.calls[call]["views"] += 1
            if func is _LIFT and args[0].untyped_storage().resizable():
                self.tick += (
                    1  # what `torch.tensor` has just made; not numpy's memory, which is not torch's to resize
                )
            else:  # what is seen here first was there before the step
                self._ids(tensors_in((*args, *kwargs.values())))
            with self._shapes_watched(args[:1] if info.reshapes else ()):
                start = time.perf_counter()
                result = func(*args, **kwargs)
                self._view_times.append(time.perf_counter() - start)
            self._register_new(tensors_in(result))  # a higher-order op makes storages, too
            return result
        return self._op(func, info, args, kwargs)

    def _op(self, func: Any, info: OpInfo, args: Any, kwargs: Any) -> Any:
        self.tick += 1
        tick = self.tick
        written = written_tensors(info, args, kwargs)
        reads = self._ids(read_tensors(info, args, kwargs))
        statistics = info.updates_statistics(args)
        writes = [] if statistics else self._ids(written)
        if statistics:
            reads = [s for s in reads if s not in self._ids(written)]
        for tensor in written:
            self._before_write(tensor)
        sizes = self._sizes(written) if info.resizes else {}
        random_bytes = self._random_bytes(info, args, kwargs)
        self._note_formula(info)
        in_place = self._in_place_without_a_mode(info, args)
        beside_bytes = self._beside_without_a_mode(info, args)
        with (
            self._shapes_watched(written if info.resizes else ()),
            counted_writes(written if info.writes_lists else []),
        ):
            result, signature = self.meter.run(func, info, args, kwargs)
        if in_place:
            self._stand_in(result, for_tensor=args[0])
            writes = reads[:1]
        creates = self._register_new(tensors_in(result), tick)
        self._saved_scalar(info, args)
        if not len(self.ops) % _TELL_EVERY:
            self.on_op(len(self.ops))
        resized = False
        for index, n_bytes in self._sizes(written if sizes else ()).items():
            resized |= n_bytes != sizes.get(index)
            self.storages[index]["bytes"] = max(self.storages[index]["bytes"], n_bytes)
        strided = [tensor for tensor in tensors_in(result) if tensor.layout is torch.strided]
        made = [tensor for tensor in strided if self._by_key.get(storage_key(tensor)) in creates]
        self.ops.append(
            {
                "name": info.name,
                "tick": tick,
                "module": self._module(),
                "backward": in_backward(),
                "signature": signature,
                "beside_bytes": beside_bytes,
                "reads": tuple(dict.fromkeys(reads)),
                "writes": tuple(dict.fromkeys(writes)),
                "creates": tuple(creates),
                "random_bytes": random_bytes,
                "replayable": info.replayable
                and not resized
                and not any(_is_subclass(kind) for kind in map(type, args)),
                "side_effect": statistics or info.generator(args, kwargs) is not None,
                "uninitialised": info.uninitialised,
                "dtype": signature.dtype,
                "flops": flops_of(func, args, kwargs, result),
                "moved_bytes": signature.moved_bytes(made),
                "cached_cast": self._is_cached_cast(func, args),
            }
        )
        return result

    def _is_cached_cast(self, func: Any, args: Any) -> bool:
        """Whether autocast keeps what this op makes, see `cached_cast` in ATen's autocast_mode.cpp.

        Below its kernels, where this runs, it says that it is off: how it was when the module was called has to do.
        """
        if func is not _CAST or in_backward() or not (self._autocast and self._autocast[-1]):
            return False
        weight = args[0]
        kept = weight.is_leaf and weight.requires_grad and weight.dtype is torch.float32
        return kept and torch.is_autocast_cache_enabled()

    def _module(self) -> int:
        """The module call that an op belongs to; in backward, that whose saved tensors its node has unpacked."""
        if self.call_stack:
            return self.call_stack[-1]
        sequence, module = self._unpacked_for
        return module if in_backward() and sequence == _sequence(current_node()) else NEVER

    def _saved_scalar(self, info: OpInfo, args: Any) -> None:
        """A Python number that autograd saves for backward: a tensor that no mode and no hook sees.

        It dies when its node has run. Where no node is seen to run it is taken to live to the end of the step.
        """
        if in_backward():
            row = self._scalars.get(_sequence(current_node()))
            if row is not None:
                row["free"] = self.tick + 1
            return
        saves = info.name in ("aten.mul.Tensor", "aten.div.Tensor")
        if saves and self.device.type == "cpu" and torch.is_grad_enabled():
            numbers = sum(not isinstance(a, torch.Tensor) for a in args[:2])
            if numbers and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args[:2]):
                row = {"bytes": SCALAR_BYTES, "alloc": self.tick, "free": NEVER, "backward": False}
                self.storages.append(row)
                self._scalars[next_node_number() - 1] = row

    def _random_bytes(self, info: OpInfo, args: Any, kwargs: Any) -> int:
        if not info.draws_random(args):
            return 0
        generator = info.generator(args, kwargs) or torch.default_generator
        state = generator.get_state()
        self._generators.setdefault(generator, state)
        return state.nbytes

    def _note_formula(self, info: OpInfo) -> None:
        """Note that what the node has unpacked is no longer held by it, if only such ops follow: autocast casts too."""
        if not self._unpacked or not in_backward():
            return
        node = current_node()
        if _sequence(node) != self._unpacked_for[0] or _name(node) not in _NODES_FITTED_AFTERWARDS:
            return
        held = (self.saved[index] for index in self._unpacked)
        for saved in (saved for saved in held if saved["released"] == NEVER):
            if info.name not in _FITTING_OPS:
                saved["dropped"] = NEVER
            elif saved["dropped"] == NEVER:
                saved["dropped"] = self.tick

    def _in_place_without_a_mode(self, info: OpInfo, args: Any) -> bool:
        """Whether this is autograd's own op, which it does in place when no mode is active.

        Formulas of single nodes that do so are known by name, and write what the same node has made. Anything else is
        two gradients that are added up: the first was made by an earlier node than the one that was just evaluated (a
        sum inside of a node's own formula has a term that this node made), and nobody but the engine holds it.
        """
        if not in_backward() or not args or not isinstance(args[0], torch.Tensor):
            return False
        if args[0].layout is not torch.strided:
            return False
        old, node = args[0], current_node()
        known = self._by_key.get(storage_key(old))
        if known is None or not self.storages[known]["backward"] or not is_dense(old):
            return False  # what forward made and autograd saved is no gradient
        made_by_node = self._born_in.get(known) == _sequence(node)
        if info.name in _SCATTERS:  # into zeros; what CopySlices has made is the gradient that came in
            return made_by_node and "CopySlices" not in _name(node)
        if info.name in _BCE_OPS and _name(node).startswith(_BCE_NODE):
            return made_by_node
        adds = info.name == "aten.add.Tensor" and len(args) == 2 and _alike(*args)
        return adds and not made_by_node and held_once_as_argument(old)

    def _beside_without_a_mode(self, info: OpInfo, args: Any) -> int:
        """Bytes that are alive beside this op when no mode is active, and are not under one.

        The gradient of a whole tensor's maximum is written into zeros that are there before the maxima are counted;
        under a mode it is a product that comes after, and two masks of a byte an element and one number are there.
        """
        if not in_backward() or not _name(current_node()).startswith(_EXTREMUM_NODES):
            return 0
        if info.name == "aten.eq.Tensor":
            self._extremum_bytes = max(0, args[0].numel() * (args[0].element_size() - 2) - 1)
        return self._extremum_bytes if info.name == "aten.sum.default" else 0

    def _stand_in(self, result: torch.Tensor, for_tensor: torch.Tensor) -> None:
        """Let the result's storage be recorded as the other's: without a mode the op would have been in place."""
        old_key = storage_key(for_tensor)
        index = self._by_key.pop(old_key)
        self._watch(result.untyped_storage(), index)

    # -- storages ----------------------------------------------------------------------------------------------

    def note_others(self, known: list[torch.Tensor]) -> None:
        """Record what else is alive on a CUDA device before the step: cuBLAS's workspace, other people's tensors."""
        if self.device.type != "cuda":
            return
        sizes = {storage_key(t): t.untyped_storage().nbytes() for t in known if t.device == self.device}
        ours = sum(_allocated(size, self.device) for size in sizes.values())
        others = max(0, torch.cuda.memory_allocated(self.device) - ours)
        self.storages.append({"bytes": others, "alloc": NEVER, "free": NEVER, "backward": False})

    def _sizes(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Bytes of the storages of these, by index."""
        on_device = [tensor for tensor in tensors if tensor.device.type == self.device.type]
        return {
            index: _allocated(tensor.untyped_storage().nbytes(), self.device)
            for tensor in on_device
            if (index := self.storage_id(tensor)) is not None
        }

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves that may get a gradient in the step."""
        return [tensor for tensor, _ in self._leaves]

    def _ids(self, tensors: Any) -> list[int]:
        return [index for index in map(self.storage_id, tensors) if index is not None]

    def storage_id(self, tensor: torch.Tensor) -> int | None:
        """Index of the tensor's storage; one not seen before was there before the step."""
        if tensor.layout is not torch.strided:
            return None
        known = self._by_key.get(storage_key(tensor))
        if known is not None:
            return known
        if tensor.is_leaf and tensor.requires_grad:
            self._leaves.append((tensor, tensor.grad))
        return self._register(tensor, NEVER)

    def allocated(self, tensor: torch.Tensor) -> None:
        """Record a storage that was made outside of any op."""
        if not self.suspended:
            self.tick += 1
            self._register_new([tensor])

    def _register_new(self, tensors: Any, tick: int | None = None) -> list[int]:
        created = []
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self._uncounted(tensor)
            elif storage_key(tensor) not in self._by_key:
                created.append(self._register(tensor, self.tick if tick is None else tick))
        return created

    def _register(self, tensor: torch.Tensor, alloc: int) -> int:
        index = len(self.storages)
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == self.device.type  # a fake tensor's storage says meta
        self.storages.append(
            {
                "bytes": _allocated(storage.nbytes(), self.device) if on_device else 0,
                "alloc": alloc,
                "free": NEVER,
                "backward": in_backward(),
            }
        )
        self._watch(storage, index)
        self._born_in[index] = _sequence(current_node())
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        key = storage._cdata
        self._by_key[key] = index
        self._refs[index] = weakref.ref(storage, lambda _: self._died(key, index))

    def _died(self, key: int, index: int) -> None:
        self.tick += 1
        del self._by_key[key]
        if self.storages[index]["free"] == NEVER:
            self.storages[index]["free"] = self.tick

    def _poll(self) -> None:
        """Find the storages that only autograd's and the engine's aliases still hold."""
        if not self._aliases:
            return
        gone = []
        for index, aliases in self._aliases.items():
            storage = self._refs[index]()
            if storage is None:
                gone.append(index)
                continue
            users = storage_users(storage._cdata)
            del storage
            if users > len(aliases):
                continue  # the common case, told without looking at each
            alive = sum(alias() is not None for alias in aliases)
            if alive and users <= alive:
                gone.append(index)
                self.tick += 1
                self.storages[index]["free"] = self.tick
            elif not alive:
                gone.append(index)
        for index in gone:
            del self._aliases[index]

    def _before_write(self, tensor: torch.Tensor) -> None:
        index = self.storage_id(tensor)
        if index is None:
            return
        key = storage_key(tensor)
        with _Suspended(self), disable_dispatch_modes():
            for call in self.replays:
                if call.holds(key):
                    call.preserve(key)
            if self.storages[index]["alloc"] == NEVER and index not in self._copies and not is_fake(tensor):
                self._copies[index] = _whole(tensor.untyped_storage()).clone()

    @contextlib.contextmanager
    def _shapes_watched(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context of an op that may change the shape of these, and with it the size of their storages."""
        before = [
            Seen.of(tensor)
            for tensor in tensors
            if (index := self.storage_id(tensor)) is not None
            and self.storages[index]["alloc"] == NEVER
            and not is_fake(tensor)
        ]
        try:
            yield
        finally:
            self._seen += [seen for seen in before if seen.changed()]

    def restore(self) -> None:
        """Put back what the step has changed of what was there before: tensors, gradients of leaves, generators."""

        def write(index: int, copy: torch.Tensor) -> None:
            storage = self._refs[index]()
            if storage is not None and storage.nbytes() == copy.nbytes:  # see NOTE [ The recorded step ] 3
                with torch.no_grad():
                    _whole(storage).copy_(copy)

        try:
            put_back(
                [
                    *(seen.put_back for seen in reversed(self._seen)),
                    *(functools.partial(write, index, copy) for index, copy in self._copies.items()),
                    *(
                        functools.partial(setattr, tensor, "grad", gradient)
                        for tensor, gradient in self._leaves
                    ),
                    *(functools.partial(g.set_state, state) for g, state in self._generators.items()),
                ]
            )
        finally:
            # Callbacks in them hold the tape: it would wait for the garbage collector with all that it holds.
            for table in (
                self._copies,
                self._seen,
                self._leaves,
                self._refs,
                self._again,
                self._aliases,
            ):
                table.clear()

    # -- what autograd and the engine hold ---------------------------------------------------------------------

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor on the same storage, for a holder whose hold is not to count as Python's."""
        # Not `detach`: that would hold the tensor's base as well. Recorded on fake tensors, a real one (labels that the
        # loss closes over) would become a fake one here, on a storage of its own.
        on_fakes = isinstance(self.meter, SignatureMeter)
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        # Nor is it an op of the step.
        with disable_dispatch_modes() if on_fakes and plain else _Suspended(self):
            alias = tensor.data
        index = self.storage_id(tensor)
        lives = index is not None and self.storages[index]["free"] == NEVER
        if index is not None and lives and self.storages[index]["alloc"] != NEVER:
            self._aliases.setdefault(index, []).append(weakref.ref(alias))
        return alias

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook for code outside of the modules that the engine runs."""
        alias = self.alias(tensor)
        return self.watch(tensor, (alias, version_of(alias), self._outside))

    def watch(self, tensor: torch.Tensor, packed: Any) -> Any:
        """Record that autograd saved this tensor, and when it lets go of it."""
        index = self.storage_id(tensor)
        if index is None:
            self._uncounted(tensor)
            return _Watched(None, NEVER, packed)
        self.tick += 1
        self.saved.append(
            {
                "storage": index,
                "module": self.call_stack[-1] if self.call_stack else NEVER,
                "tick": self.tick,
                "unpacked": NEVER,
                "released": NEVER,
                "dropped": NEVER,
            }
        )
        return _Watched(self, len(self.saved) - 1, packed)

    def unpack(self, watched: _Watched) -> torch.Tensor:
        """The unpack hook."""
        if watched.tape is not None and self.saved[watched.index]["unpacked"] == NEVER:
            self._poll()
            self.tick += 1
            self.saved[watched.index]["unpacked"] = self.tick
            node, module = current_node(), self.saved[watched.index]["module"]
            if _sequence(node) != self._unpacked_for[0]:
                self._unpacked = []
            self._unpacked.append(watched.index)
            self._unpacked_for = _sequence(node), module
            if _name(node) == COMPILED_NODE:
                self.compiled_calls.add(module)
        elif watched.tape is not None:
            self.saved[watched.index]["dropped"] = NEVER  # another backward
        with _Suspended(self):
            tensor = replay_unpack(watched.packed)
        if watched.tape is not None and storage_key(tensor) not in self._by_key:
            self._recomputed(tensor.untyped_storage(), self.saved[watched.index]["storage"])
        return tensor

    def _recomputed(self, storage: torch.UntypedStorage, index: int) -> None:
        """Backward sees a recomputed storage: to the record it is the one that forward made."""
        key = storage._cdata
        self._by_key[key] = index
        self._again[key] = weakref.ref(storage, lambda _: (self._by_key.pop(key), self._again.pop(key)))

    # -- modules -----------------------------------------------------------------------------------------------

    def enter(self, fqn: str, call: int, module: torch.nn.Module, inputs: Any, plain: bool) -> None:
        """A module's forward begins; `plain` as in `ModuleCall`."""
        self._poll()
        given = [(tensor, behind_transforms(tensor)) for tensor in tensors_of(inputs)]
        self.tick += 1
        self.calls.append(
            {
                "fqn": fqn,
                "call": call,
                "parent": self.call_stack[-1] if self.call_stack else NEVER,
                "class_name": type(module).__name__,
                "grad": torch.is_grad_enabled(),
                "start": self.tick,
                "end": NEVER,
                "inputs": tuple(dict.fromkeys(self._ids(behind for _, behind in given))),
                "views": 0,
                "plain": plain,
                # What vmap and the like have wrapped is dead at a second run.
                "changes_arguments": any(tensor is not behind for tensor, behind in given),
            }
        )
        self.call_stack.append(len(self.calls) - 1)
        self._autocast.append(any_autocast())

    def where(self) -> str:
        """The module whose forward runs now, or whose backward does, in words."""
        index = self._module()
        if index == NEVER:
            return "code outside of all modules"
        call = self.calls[index]
        return f"module {call['fqn'] or 'the model itself'!r} ({call['class_name']})"

    def with_compiled_code(self) -> list[str]:
        """Names of the modules in which code ran that `torch.compile` has compiled."""
        calls = sorted(self.compiled_calls)
        return list(dict.fromkeys("" if call == NEVER else self.calls[call]["fqn"] for call in calls))

    def _uncounted(self, tensor: torch.Tensor) -> None:
        if not is_fake(tensor):
            layout = str(tensor.layout).removeprefix("torch.")
            self.uncounted.setdefault(self._module(), set()).add(layout)

    def with_uncounted(self) -> tuple[list[str], list[str]]:
        """Names of the modules whose tensors are not all counted, and the layouts of those that are not."""
        fqns = ["" if call == NEVER else self.calls[call]["fqn"] for call in sorted(self.uncounted)]
        return list(dict.fromkeys(fqns)), sorted(set[str]().union(*self.uncounted.values()))

    def leave(self, changes_arguments: bool) -> None:
        """A module's forward ends; `changes_arguments` as in `ModuleCall`."""
        self._poll()
        self.tick += 1
        self._autocast.pop()
        call = self.calls[self.call_stack.pop()]
        call["end"] = self.tick
        call["changes_arguments"] |= changes_arguments

    # -- the record --------------------------------------------------------------------------------------------

    def finish(
        self,
        names: dict[int, tuple[str, str]],
        workspace: dict[Signature, int],
        times: dict[Signature, OpTime],
    ) -> dict[str, Any]:
        """The tables of a `Profile`.

        Args:
            names: kind and name of the storages that are known, by storage key.
            workspace: bytes by signature.
            times: by signature.
        """
        self._poll()
        if any(row["released"] == NEVER != row["unpacked"] for row in self.saved):  # the graph is still there
            for row in self._scalars.values():
                row["free"] = NEVER
        end = self.tick = self.tick + 1
        for table, field in ((self.storages, "free"), (self.saved, "released"), (self.calls, "end")):
            for row in table:
                if row[field] == NEVER:
                    row[field] = end
        for row in self.saved:
            if row["dropped"] == NEVER:
                row["dropped"] = row["released"]
        known = {index: names[key] for key, index in self._by_key.items() if key in names}
        return {
            "end": end,
            "views_s": len(self._view_times) * statistics.median(self._view_times or [0.0]),
            "tape": self.timed(times, workspace),
            "signatures": tuple(map(str, self._signatures())),
            "storage_table": tuple(
                _storage(row, *known.get(index, _kind(row))) for index, row in enumerate(self.storages)
            ),
            "saved": tuple(Saved(**row) for row in self.saved),
            "calls": tuple(ModuleCall(**row) for row in self.calls),
            "op_fingerprint": _fingerprint(row["name"] for row in self.ops),
        }

    def timed(self, times: dict[Signature, OpTime], workspace: dict[Signature, int]) -> tuple[Op, ...]:
        """The ops with their times and workspace."""
        signatures = self._signatures()
        return tuple(_op(row, times, workspace, signatures) for row in self.ops)

    def resized(self, table: tuple[Storage, ...], sizes: dict[Signature, list[int]]) -> tuple[Storage, ...]:
        """The storages with the sizes that the kernels give them.

        Args:
            sizes: bytes of the storages that an op makes, in order.
        """
        found = list(table)
        for row in self.ops:
            made = sizes.get(row["signature"], [])
            if row["name"] in PRIVATE_RESULTS:  # known already, and others without gradients
                continue
            if len(made) == len(row["creates"]):
                for storage, n_bytes in zip(row["creates"], made, strict=True):
                    found[storage] = dataclasses.replace(
                        found[storage], bytes=_allocated(n_bytes, self.device)
                    )
        return tuple(found)

    def _signatures(self) -> dict[Signature, int]:
        """The distinct signatures in order, with their numbers."""
        return {
            signature: i for i, signature in enumerate(dict.fromkeys(row["signature"] for row in self.ops))
        }


class _Watched:
    """What autograd holds while a step is recorded; its death is the release."""

    __slots__ = ("index", "packed", "tape")

    def __init__(self, tape: Tape | None, index: int, packed: Any):
        self.tape = tape
        self.index = index
        self.packed = packed

    def __del__(self) -> None:
        if self.tape is not None:
            self.tape.tick += 1
            self.tape.saved[self.index]["released"] = self.tape.tick


class _Suspended:
    """Ops in this context are not part of the step."""

    def __init__(self, tape: Tape):
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.suspended += 1

    def __exit__(self, *_: Any) -> None:
        self.tape.suspended -= 1


class _TimedCall(ReplayCall):
    """A region's call whose replay is timed op by op: what it costs to run an op again, where that happens."""

    __slots__ = ("tape",)

    def __init__(self, program: Program, tape: Tape):
        super().__init__(program)
        self.tape = tape

    def _call(self, record: Record, args: Any, kwargs: dict[str, Any]) -> Any:
        meter = self.tape.meter
        if not isinstance(meter, OpTimer):
            return super()._call(record, args, kwargs)
        run = functools.partial(
            super()._call, record, args, kwargs
        )  # a random op sets and resets its generator, too
        return meter.rerun(Signature.of(record.func, args, kwargs), run)


class LeanRecording(Recording):
    """The replay engine while a step is recorded: everything is recomputed, and what is held is held by aliases."""

    def __init__(self, tape: Tape, region: str):
        super().__init__(_TimedCall(Program(region, ()), tape))
        self.tape = tape
        tape.replays.add(self.call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        info = op_info(func)
        if info.ignored:
            return func(*args, **(kwargs or {}))
        types = tuple(kind for kind in types if not is_fake_type(kind))
        return self._run(func, info, types, args, kwargs or {}, True)

    def hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.tape.alias(tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = super().pack(tensor)
        if type(packed) is tuple:
            alias = self.tape.alias(tensor)
            packed = (alias, version_of(alias), self.call)
        return self.tape.watch(tensor, packed)


class Instrumented:
    """Context: every module's forward tells the tape of its calls, and the lean modules run under the engine.

    Args:
        lean: the modules to run with everything recomputed.
        losses: which modules compute losses that are to be lean, as for `sides`; None for all that there are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tape: Tape,
        lean: set[torch.nn.Module],
        losses: Mapping[str, Collection[str | None]] | None,
    ):
        self.tape = tape
        self.lean = lean
        self.sides = None if losses is None else sides(losses)
        self.counts: Counter[torch.nn.Module] = Counter()
        self.modules = [
            (name, module)
            for name, module in model.named_modules()
            if not isinstance(module, torch.jit.ScriptModule) and not is_compiled_wrapper(module)
        ]
        self.depth = 0  # of lean modules

    def __enter__(self) -> None:
        self.get_rng_state = torch.get_rng_state
        torch.get_rng_state = self._seen_rng_state
        self.originals = [(module, module.__dict__.get("forward")) for _, module in self.modules]
        for name, module in self.modules:
            module.__dict__["forward"] = types.MethodType(self._wrapper(name, module), module)

    def __exit__(self, *_: Any) -> None:
        torch.get_rng_state = self.get_rng_state
        for module, original in self.originals:
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = original

    def _seen_rng_state(self) -> torch.Tensor:
        """No dispatch mode sees this allocation, and the user's own checkpoints make it for each of their calls."""
        state = self.get_rng_state()
        self.tape.allocated(state)
        return state

    def _wrapper(self, name: str, module: torch.nn.Module) -> Callable[..., Any]:
        own = module.__dict__.get("forward")
        original = own or types.MethodType(type(module).forward, module)
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        plain = of_torch and own is None

        def run(*args: Any, **kwargs: Any) -> Any:
            number = self.counts[module]
            self.counts[module] += torch.is_grad_enabled()
            held = held_in((args, kwargs))
            self.tape.enter(name, number, module, (args, kwargs), plain)
            try:
                if (
                    module in self.lean
                    and not self.depth
                    and torch.is_grad_enabled()
                    and self._hooks_are_ours()
                ):
                    return self._run_lean(name, original, args, kwargs)
                return self._run(name, original, args, kwargs)
            finally:
                self.tape.leave(held_in((args, kwargs)).entries != held.entries)

        def forward(_: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A compiled function calls the module: the compiler is not to trace the recording.
            return (disable_dynamo(run) if torch.compiler.is_compiling() else run)(*args, **kwargs)

        return forward

    def _hooks_are_ours(self) -> bool:
        """Whether what autograd saves comes to us: not inside of the user's own checkpoint or `save_on_cpu`.

        There the user has decided already; such code is recorded as it runs, and nothing in it becomes a region.
        """
        return top_saved_tensors_hooks() == (self.tape.pack, self.tape.unpack)

    def _run(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The module's own forward, with its losses as in a planned model."""
        side = EVERYWHERE if self.sides is None else self.sides.get(name)
        return original(*args, **kwargs) if side is None else run_with_losses(side, original, args, kwargs)

    def _run_lean(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recording = LeanRecording(self.tape, name)
        self.depth += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(recording.pack, self.tape.unpack), recording:
                result = self._run(name, original, args, kwargs)
        finally:
            self.depth -= 1
        recording.finish()
        return result


def _op(
    row: dict[str, Any],
    times: dict[Signature, OpTime],
    workspace: dict[Signature, int],
    signatures: dict[Signature, int],
) -> Op:
    row = dict(row)
    signature, beside_bytes = row["signature"], row.pop("beside_bytes")
    row["signature"] = signatures[signature]
    time = times.get(signature, OpTime(0.0, 0.0, 0.0))
    return Op(**row, **dataclasses.asdict(time), workspace_bytes=workspace.get(signature, 0) + beside_bytes)


def _storage(row: dict[str, Any], kind: str, name: str) -> Storage:
    return Storage(bytes=row["bytes"], alloc=row["alloc"], free=row["free"], kind=kind, name=name)


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    if row["alloc"] == NEVER:
        return "Input", ""
    return ("Temp" if row["backward"] else "Activation"), ""


def _fingerprint(names: Any) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _allocated(size: int, device: torch.device) -> int:
    """What the device's allocator takes for this many bytes: CUDA's rounds up to its block size."""
    if device.type != "cuda":
        return size
    return -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _sequence(node: Any) -> int:
    return -1 if node is None else node._sequence_nr()


def _name(node: Any) -> str:
    return "" if node is None else node.name()


def _alike(a: Any, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype


def _is_subclass(kind: type) -> bool:
    if not issubclass(kind, torch.Tensor) or is_fake_type(kind):
        return False
    return kind not in (torch.Tensor, torch.nn.Parameter)
