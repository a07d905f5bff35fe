"""Storages of a recorded step, with the ticks of their allocation and release."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from autoac.device import device_for
from autoac.measure import present_storages
from autoac.record.tape.before import BeforeStep
from autoac.record.tape.calls import sequence_of
from autoac.record.tape.clock import Clock
from autoac.step.restore import Seen
from autoac.torch_private import (
    current_node,
    in_backward,
    is_fake,
    is_wrapper_type,
    key_of_storage,
    local_part,
    parts_of,
    storage_key,
    storage_users,
)
from autoac_solver.records.profile import NEVER

_OWN_FROZEN = 1000
"""More objects than the interpreter itself freezes when it starts."""


class _HostMemory:
    """The storages on CPU that stand for such in the host's memory, while others on CPU stand for a device's."""

    def __init__(self) -> None:
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._is_target = False

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the storages of these to be there."""
        self._storages.update(local_part(tensor).untyped_storage() for tensor in tensors)

    @contextlib.contextmanager
    def as_target(self) -> Iterator[None]:
        """Context in which new storages are made there."""
        before, self._is_target = self._is_target, True
        try:
            yield
        finally:
            self._is_target = before

    def made(self, storage: torch.UntypedStorage) -> None:
        """Called with each new storage."""
        if self._is_target:
            self._storages.add(storage)

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is there."""
        return storage in self._storages


host_memory = _HostMemory()


class _FirstSeen:
    """When storages were seen first that are taken for older than the step, and were not there when it began.

    What the kernels of compiled functions make is seen when an op reads it, or autograd saves it.
    """

    def __init__(self) -> None:
        self._present: dict[int, weakref.ref[torch.UntypedStorage]] | None = None  # None if that is not known
        self._ticks: dict[int, int] = {}

    def step_begins(self, device: torch.device) -> None:
        """Note which storages there are."""
        # Objects that `gc.freeze` was called on are not found.
        if "torch._dynamo" in sys.modules and gc.get_freeze_count() < _OWN_FROZEN:
            self._present = {key_of_storage(s): weakref.ref(s) for s in present_storages(device)}

    def note(self, index: int, tensor: torch.Tensor, tick: int) -> None:
        """A tensor's storage is met for the first time."""
        if self._present is not None:
            present = self._present.get(storage_key(tensor))
            if present is None or present() is None:
                self._ticks[index] = tick

    def were_made_then(self, rows: list[dict[str, Any]]) -> None:
        """Have them be made when they were seen first, as compiled code ran in the step."""
        for index, tick in self._ticks.items():
            rows[index]["alloc"] = tick


class Storages:
    """The table of storages, identified by address while they are alive.

    A storage is freed with its last tensor. Autograd and the engine hold aliases only: `poll` finds the storages that
    have no other tensors left.

    Args:
        device: only storages on this device have a size; others, and those in `host_memory`, are recorded with zero
            bytes.
        before: state from before the step.
        not_counted: called with each tensor that is not strided.
        on_fakes: whether the step runs on fake tensors. Elsewhere these have no memory: torch traces the branches of
            a higher-order op, inside of the step and under its hooks on saved tensors.

    Attributes:
        rows: bytes, the ticks `alloc` and `free`, and whether backward made it.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Clock,
        before: BeforeStep,
        not_counted: Callable[[torch.Tensor], None],
        on_fakes: bool,
    ):
        self.device = device
        self.clock = clock
        self.before = before
        self.not_counted = not_counted
        self.on_fakes = on_fakes
        self.rows: list[dict[str, Any]] = []
        self._by_key: dict[int, int] = {}
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._aliases: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # storage -> aliases of holders
        self._again: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.released: Callable[[int], None] = lambda index: None  # called when only aliases hold a storage
        self.in_host_memory: set[int] = set()  # rows of storages in `host_memory`
        self.gathered: set[int] = set()  # rows of storages between two manual resizes
        # Rows of memory of other libraries, such as numpy's, that the step has met.
        self.borrowed: set[int] = set()
        self.first_seen = _FirstSeen()
        self._born_in: dict[int, int] = {}  # storage -> sequence number of the backward node that made it

    # -- lookup ------------------------------------------------------------------------------------------------

    def known(self, tensor: torch.Tensor) -> int | None:
        """Index of the tensor's storage if it is in the table."""
        return self._by_key.get(storage_key(tensor))

    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the tensor's storage, None if it has none; a storage not seen so far is older than the step.

        Of a wrapper subclass (quantized), that of its largest part.
        """
        if tensor.layout is not torch.strided or (not self.on_fakes and is_fake(tensor)):
            return None
        local = local_part(tensor)
        known = self.known(local)
        if known is not None:
            return known
        is_wrapper = is_wrapper_type(type(local))
        is_new = not is_wrapper or any(self.known(part) is None for part in parts_of(local))
        if is_new and tensor.is_leaf and tensor.requires_grad:
            self.before.keep_gradient(tensor)
        if is_wrapper:  # its own storage has a size, but no memory
            indices = self.indices_of(parts_of(local))
            return max(indices, key=lambda index: self.rows[index]["bytes"], default=None)
        index = self._register(local, NEVER)
        if index not in self.borrowed:
            self.first_seen.note(index, local, self.clock.tick)
        return index

    def indices_of(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Indices of the storages of these, in order."""
        return [index for index in map(self.index_of, tensors) if index is not None]

    def was_before(self, index: int) -> bool:
        """Whether the storage is older than the step."""
        return self.rows[index]["alloc"] == NEVER

    def made_by(self, index: int) -> int:
        """Sequence number of the backward node that made the storage, -1 if none did."""
        return self._born_in.get(index, -1)

    def by_key(self) -> Iterator[tuple[int, int]]:
        """(storage key, index) of the storages that are alive."""
        yield from self._by_key.items()

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Bytes of the storages of these, by index."""
        parts = (part for tensor in tensors for part in parts_of(tensor))
        on_device = [part for part in parts if part.device.type == self.device.type]
        return {
            index: allocated_bytes(part.untyped_storage().nbytes(), self.device)
            for part in on_device
            if (index := self.index_of(part)) is not None and index not in self.in_host_memory
        }

    # -- allocation --------------------------------------------------------------------------------------------

    def note_others(self, known: list[torch.Tensor]) -> None:
        """Record other live bytes on a CUDA device before the step: cuBLAS's workspace, tensors of other code."""
        if not device_for(self.device).counts_memory:
            return
        here = [t for t in known if t.device == self.device and t.layout is torch.strided]
        sizes = {storage_key(t): t.untyped_storage().nbytes() for t in here}
        ours = sum(allocated_bytes(size, self.device) for size in sizes.values())
        others = max(0, device_for(self.device).memory_allocated() - ours)
        self.rows.append({"bytes": others, "alloc": NEVER, "free": NEVER, "backward": False})

    def made(self, tensors: Iterable[torch.Tensor], tick: int | None = None) -> list[int]:
        """Record the storages of these that are new; returns their indices.

        Args:
            tick: when they were made, by default now.
        """
        created = []
        for tensor in tensors:
            for part in [tensor] if tensor.layout is not torch.strided else parts_of(tensor):
                if part.layout is not torch.strided:
                    self.not_counted(part)
                elif self.known(part) is None:
                    created.append(self._register(part, self.clock.tick if tick is None else tick))
        return created

    def made_outside(self, tensor: torch.Tensor) -> None:
        """Record a storage that was made outside of any op."""
        if not self.clock.suspended:
            self.clock.next()
            self.made([tensor])

    def grown(self, before: dict[int, int], tensors: Sequence[torch.Tensor]) -> bool:
        """Record that the storages of these have grown; returns whether any size has changed.

        Args:
            before: their earlier `sizes`.
        """
        changed = False
        for index, n_bytes in self.sizes(tensors if before else ()).items():
            changed |= n_bytes != before.get(index)
            self.rows[index]["bytes"] = max(self.rows[index]["bytes"], n_bytes)
        return changed

    def resized(self, storage: torch.UntypedStorage, before: int, after: int) -> None:
        """Record a manual resize, as FSDP2 does for gathered parameters: see NOTE [ The recorded step ] 5 in tape.py.

        Args:
            before, after: the storage's bytes.
        """
        if self.clock.suspended or before == after:
            return
        key, tick = key_of_storage(storage), self.clock.next()
        old = self._by_key.pop(key, None)
        on_device = storage.device.type in (self.device.type, "meta")  # a fake tensor's storage says meta
        if old is not None:
            on_device = bool(self.rows[old]["bytes"]) or on_device
            if self.rows[old]["free"] == NEVER:
                self.rows[old]["free"] = tick
            self.gathered.add(old)
        elif before:
            self._add_life(storage, before if on_device else 0, NEVER)
            self.rows[-1]["free"] = tick
        if after:
            self._watch(storage, self._add_life(storage, after if on_device else 0, tick))

    def _add_life(self, storage: torch.UntypedStorage, size: int, alloc: int) -> int:
        """Add a row for one life of a resized storage; returns its index."""
        index = len(self.rows)
        n_bytes = allocated_bytes(size, self.device)
        self.rows.append({"bytes": n_bytes, "alloc": alloc, "free": NEVER, "backward": in_backward()})
        self._refs[index] = weakref.ref(storage)
        self.gathered.add(index)
        return index

    def _register(self, tensor: torch.Tensor, alloc: int) -> int:
        index = len(self.rows)
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == self.device.type  # a fake tensor's storage says meta
        if alloc != NEVER:
            host_memory.made(storage)
        elif tensor.device.type == "cpu" and not storage.resizable():
            self.borrowed.add(index)
        if on_device and host_memory.holds(storage):
            self.in_host_memory.add(index)
            on_device = False
        self.rows.append(
            {
                "bytes": allocated_bytes(storage.nbytes(), self.device) if on_device else 0,
                "alloc": alloc,
                "free": NEVER,
                "backward": in_backward(),
            }
        )
        self._watch(storage, index)
        self._born_in[index] = sequence_of(current_node())
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        key = key_of_storage(storage)
        self._by_key[key] = index
        self._refs[index] = weakref.ref(storage, lambda _: self._died(key, index))

    # -- substitution ------------------------------------------------------------------------------------------

    def stand_in(self, result: torch.Tensor, for_tensor: torch.Tensor) -> None:
        """Record the result's storage as the other tensor's: without a mode the op would have been in place."""
        index = self._by_key.pop(storage_key(for_tensor))
        self._watch(result.untyped_storage(), index)

    def recomputed(self, tensor: torch.Tensor, index: int) -> None:
        """Record a recomputed storage as the one that forward made."""
        storage = tensor.untyped_storage()
        key = key_of_storage(storage)
        self._by_key[key] = index
        self._again[key] = weakref.ref(storage, lambda _: (self._by_key.pop(key), self._again.pop(key)))

    # -- release -----------------------------------------------------------------------------------------------

    def held_by(self, alias: torch.Tensor, index: int) -> None:
        """Register an alias that autograd or the engine holds, which `poll` does not count."""
        if self.rows[index]["free"] == NEVER and not self.was_before(index) and index not in self.gathered:
            self._aliases.setdefault(index, []).append(weakref.ref(alias))

    def poll(self) -> None:
        """Find the storages that only autograd's and the engine's aliases still hold."""
        if not self._aliases:
            return
        gone = []
        for index, aliases in self._aliases.items():
            storage = self._refs[index]()
            if storage is None:
                gone.append(index)
                continue
            users = storage_users(key_of_storage(storage))
            del storage
            if users > len(aliases):
                continue  # the common case, without a look at each alias
            alive = sum(alias() is not None for alias in aliases)
            if alive and users <= alive:
                gone.append(index)
                self.rows[index]["free"] = self.clock.next()
            elif not alive:
                gone.append(index)
        for index in gone:
            del self._aliases[index]
        for index in gone:
            self.released(index)

    def _died(self, key: int, index: int) -> None:
        tick = self.clock.next()
        if self._by_key.get(key) == index:
            del self._by_key[key]
        if self.rows[index]["free"] == NEVER:
            self.rows[index]["free"] = tick

    def survivors(self, end: int) -> dict[int, weakref.ref[torch.UntypedStorage]]:
        """Storages that the step made and that are alive at its end, by index."""
        rows = enumerate(self.rows)
        alive = [i for i, row in rows if row["alloc"] != NEVER and row["free"] == end and row["bytes"]]
        refs = {index: self._refs[index]() for index in alive if index in self._refs}
        return {index: weakref.ref(storage) for index, storage in refs.items() if storage is not None}

    # -- restoring ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def shapes_watched(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context for an op that may change the shapes of these, and with them the sizes of their storages."""
        before = [
            Seen.of(tensor)
            for tensor in tensors
            if (index := self.index_of(tensor)) is not None and self.was_before(index) and not is_fake(tensor)
        ]
        try:
            yield
        finally:
            self.before.keep_shapes(seen for seen in before if seen.changed())

    def restore(self) -> None:
        """Restore the state from before the step."""
        try:
            self.before.restore(self._refs)
        finally:
            # Their callbacks reference this object: only the garbage collector would free this cycle.
            for table in (self._refs, self._again, self._aliases):
                table.clear()


def allocated_bytes(size: int, device: torch.device) -> int:
    """Bytes that the device's allocator takes for a request of this size."""
    return device_for(device).allocated_bytes(size)
