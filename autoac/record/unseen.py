"""Finds writes that no op makes, in all code of forward while a step is recorded.

NOTE [ Unseen writes ]
  1. The guard (NOTE [ The guard ]) covers only values of lean modules that their backward needs: only these are
     recomputed. It misses the values that a larger module computes between its lean ones, and the values that a lean
     module makes for others. A plan may still choose the larger module as a region and recompute them.
  2. So in the first step each storage is checksummed when an op has made or written it, and again when an op reads or
     writes it, when autograd saves it and when a lean module returns it. If the checksums differ, code that torch does
     not see has written the storage in between: the op whose bytes were overwritten cannot run again.
  3. Such a write may also be the last one before backward: autograd has saved the storage, and no op reads it again. So
     each storage is held by an alias until nothing else holds it (`Storages.poll` finds that before the next op, so
     this takes no memory) or until backward begins, and is compared then. A storage that neither an op has read nor
     autograd has saved is not asked about.
  4. An op that has read a storage before such a write cannot run again either, even though the storage is saved.
  5. Undeclared random numbers of ops and flags that forward sets are found, and kept, everywhere (see `Draws`, and
     `autoac.torch_private.kernel_flags`). Not found here are nondeterministic kernels.
  6. Engine sac runs such code a second time, on the saved storage. That is right if the code overwrites all bytes, and
     wrong if it adds to them. The two cannot be told apart unless the storage was uninitialised before
     (`torch.empty`), is written once before anything has read it, and no op writes it afterwards. In all other cases
     sac has no regions around the op whose bytes were overwritten, nor around the code that wrote. Which code that is
     is not known: all modules count that were running between the two checksums.
  7. A storage that is older than the step (a tensor that numpy fills again and again) is checksummed when an op first
     reads it. Parameters are skipped (many bytes) unless a first step is found to have changed them: a second one then
     tells when (NOTE [ Unseen writes to buffers ]). Tensors that are filled again after backward has begun, as by data
     loaders, are skipped, too.
  8. A step of the user's own loop is recorded only once, and its gradients count. There the values that were written
     are kept: see `SavedTensors.keep` and `LeanRecording`.
  9. What was allocated and is read before an op has written it (`torch.empty`) was written by unseen code, even if its
     bytes are those that the memory held before: a step that is run again often gets the memory of the last one.
 10. `mark_dirty` of an `autograd.Function` counts one more write of a tensor, after the function's last op. Engine
     replay refuses to run an op again whose kept input has been written since, as autograd does. So what has read the
     tensor before is saved.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoac.execute.checksums import on_device
from autoac.ops.info import OpInfo, read_and_filled
from autoac.record.tape.calls import ModuleCalls
from autoac.torch_private import (
    disable_dispatch_modes,
    is_zero_tensor,
    local_part,
    negative_view,
    storage_key,
    version_of,
)
from autoac_solver.records.names import module_in_words
from autoac_solver.records.profile import FOREIGN, NEVER

if TYPE_CHECKING:
    from autoac.record.tape.tape import Tape

_WITH_BYTES = (torch.Tensor, torch.nn.Parameter)
"""Types that are checked; a subclass may have no bytes of its own."""

OpOfStep = tuple[str, int, str, int]
"""Module, its call in the step, op, and its call by the module; the same in every recording of the step."""

FILLED, OVERWRITTEN, READ_BEFORE, MARKED = "filled", "overwritten", "read before", "marked"
"""Why an op cannot run again: unseen code has written its result before or after something read it, or its input after
it had read it; or its input was marked as written after it had read it, see (10)."""

MAY_WRITE = "may write"
"""Why a module cannot run again: its code may have made such a write, see (6)."""


class UnseenWrites:
    """Compares the storages of one recorded step with the bytes that ops have left in them.

    Args:
        tape: of the step.
        skipped: parameters that are not compared.
        keeps: whether the step's gradients count, so that the values written are kept.
    """

    def __init__(self, tape: Tape, skipped: Iterable[torch.Tensor], keeps: bool = False):
        self.keeps = keeps
        self._skipped = {
            storage_key(part) for part in map(local_part, skipped) if part.layout is torch.strided
        }
        self.is_checked = False  # whether the arguments of the op that runs next have been compared
        # The tape holds this. In a cycle, what is held here would outlive a step that fails.
        self._ref = weakref.ref(tape)
        self._left: dict[int, tuple[int, int, int]] = {}  # storage -> bytes, checksum, tick of the checksum
        self._read: set[int] = set()  # storages that were read or saved since
        self._raw: set[int] = set()  # storages without values yet, see NOTE [ Unseen writes ] 9
        self._held: dict[int, torch.Tensor] = {}  # see NOTE [ Unseen writes ] 3
        # storage -> place of a tensor in it -> the version that an op has read since one wrote the storage
        self._versions: dict[int, dict[Any, int]] = {}
        self._changed: list[_Change] = []
        self._marked: list[tuple[int, int]] = []  # storage and number of ops so far
        self._kept: set[int] = set()
        tape.storages.released = self._released

    @property
    def _tape(self) -> Tape:
        tape = self._ref()
        assert tape is not None
        return tape

    def wrote(self, tensors: Iterable[torch.Tensor], uninitialised: bool = False) -> None:
        """An op of forward has made or written these, or only allocated them."""
        for index, tensor in self._compared(tensors):
            self._note(index, tensor)
            self._read.discard(index)
            self._versions.pop(index, None)
            (self._raw.add if uninitialised else self._raw.discard)(index)
            if index not in self._held:
                self._held[index] = self._tape.saved.alias(tensor)

    def is_written_later(self, tensors: Iterable[torch.Tensor]) -> None:
        """A collective or an op of backward writes these: their bytes will not be those that an op of forward left."""
        for index, _ in self._compared(tensors):
            self._left.pop(index, None)
            self._held.pop(index, None)

    def before_op(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run."""
        read, filled = read_and_filled(info, args, kwargs)
        self.reads(read)
        self.passes(filled)

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op is about to read these."""
        self._look(tensors, reading=True)

    def passes(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op is about to write these without reading them, a lean module returns them, or autograd saves them.

        Autograd may save before the op that writes has run (the noise of `rrelu`).
        """
        self._look(tensors, reading=False)

    def _look(self, tensors: Iterable[torch.Tensor], reading: bool) -> None:
        for index, tensor in self._compared(tensors):
            if index in self._left:
                self._compare(index, tensor, is_filled=reading and index in self._raw)
            elif self._tape.storages.was_before(index):
                self._note(index, tensor)
                self._held[index] = self._tape.saved.alias(tensor)
            else:
                continue
            self._read.add(index)
            self._look_at_version(index, tensor)

    def _look_at_version(self, index: int, tensor: torch.Tensor) -> None:
        # Pieces that `unsafe_chunk` makes have a version each, so only tensors at the same place are compared.
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        versions, version = self._versions.setdefault(index, {}), version_of(tensor)
        if version > versions.setdefault(place, version):
            versions[place] = version
            self._marked.append((index, len(self._tape.ops)))

    def is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was written by unseen code and must not be recomputed in this step."""
        return bool(self._kept) and self._tape.storages.known(tensor) in self._kept

    def backward_begins(self) -> None:
        """Backward begins: compare the storages that forward's code could still write until now."""
        if self._held:
            self._tape.storages.poll()
            held, self._held = self._held, {}
            for index, alias in held.items():
                self._ends(index, alias)
                if self._tape.storages.was_before(index):
                    self._left.pop(index, None)

    def _released(self, index: int) -> None:
        alias = self._held.pop(index, None)
        if alias is not None:
            self._ends(index, alias)

    def _ends(self, index: int, alias: torch.Tensor) -> None:
        if index in self._left and index in self._read:
            self._compare(index, alias)

    def _note(self, index: int, tensor: torch.Tensor) -> None:
        n_bytes = tensor.untyped_storage().nbytes()
        self._left[index] = n_bytes, checksum_of_storage(tensor), self._tape.clock.tick

    def _compare(self, index: int, tensor: torch.Tensor, is_filled: bool = False) -> None:
        n_bytes, left, since = self._left[index]
        if tensor.untyped_storage().nbytes() != n_bytes:
            del self._left[index]  # resized without an op
            return
        self._note(index, tensor)
        if self._left[index][1] == left and not is_filled:
            return
        self._raw.discard(index)
        now = self._tape.clock.tick
        self._changed.append(_Change(index, since, now, len(self._tape.ops), index in self._read))
        if self.keeps:
            self._kept.add(index)
            self._tape.saved.keep(index, tensor)

    def _compared(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        storages, seen = self._tape.storages, set[int]()
        for tensor in tensors:
            if tensor.layout is not torch.strided or type(tensor) not in _WITH_BYTES or tensor.is_meta:
                continue
            if not tensor.numel():
                continue
            if (index := storages.index_of(tensor)) is None or index in seen or is_zero_tensor(tensor):
                continue
            if index in storages.gathered or (
                storages.was_before(index) and storage_key(tensor) in self._skipped
            ):
                continue
            seen.add(index)
            yield index, tensor

    def found(self) -> dict[OpOfStep, str]:
        """The ops that cannot run again, and why: `FILLED`, `OVERWRITTEN`, `READ_BEFORE` or `MARKED`.

        And, as `_any_call`, the modules that `MAY_WRITE`.
        """
        ops = self._tape.ops
        names = ops_of_step(ops, self._tape.calls)
        found: dict[OpOfStep, str] = {}
        for storage, done in self._marked:
            for row in self._readers(storage, done)[1]:
                found[names[row]] = MARKED
        written = {storage for op in ops for storage in op["writes"]}
        for change in self._changed:
            storage = change.storage
            writer, readers = self._readers(storage, change.ops_before)
            for row in readers if change.was_read else ():
                found.setdefault(names[row], READ_BEFORE)
            if writer != NEVER:  # else it is older than the step
                before = found.get(names[writer], READ_BEFORE)
                is_first = before in (READ_BEFORE, MARKED) and not change.was_read
                found[names[writer]] = FILLED if is_first else OVERWRITTEN
                if is_first and ops[writer]["uninitialised"] and storage not in written:
                    continue  # see NOTE [ Unseen writes ] 6
                if ops[writer]["module"] != NEVER:
                    found[_any_call(names[writer][0])] = MAY_WRITE
            for call in self._tape.calls.rows:
                ran = call["start"] <= change.until and (call["end"] == NEVER or call["end"] >= change.since)
                of_user = call["class_name"] in self._tape.calls.sources  # torch's own modules write nothing
                if ran and of_user:
                    found[_any_call(call["fqn"])] = MAY_WRITE
        return found

    def _readers(self, storage: int, done: int) -> tuple[int, list[int]]:
        """Of the first `done` ops the last that wrote a storage, `NEVER` for none, and those that read it since."""
        ops = self._tape.ops
        writers = (row for row in reversed(range(done)) if _leaves_bytes_in(ops[row], storage))
        writer = next(writers, NEVER)
        since = range(writer + 1, done)
        return writer, [row for row in since if storage in ops[row]["reads"] and not ops[row]["backward"]]


@dataclass(frozen=True, slots=True)
class _Change:
    """A write that was found.

    Args:
        storage: its index.
        since, until: ticks of the two checksums.
        ops_before: number of ops before the second.
        was_read: an op had read the storage, or autograd saved it, since an op wrote it.
    """

    storage: int
    since: int
    until: int
    ops_before: int
    was_read: bool


def _any_call(fqn: str) -> OpOfStep:
    """Stands for all calls of a module."""
    return fqn, NEVER, "", 0


def _leaves_bytes_in(op: dict[str, Any], storage: int) -> bool:
    return storage in op["creates"] or storage in op["writes"]


def ops_of_step(ops: Sequence[dict[str, Any]], calls: ModuleCalls) -> list[OpOfStep]:
    """The identity of each op of a recorded step."""
    counts: Counter[tuple[str, int, str]] = Counter()
    found = []
    for op in ops:
        module = calls.rows[op["module"]] if op["module"] != NEVER else {"fqn": "", "call": 0}
        place = module["fqn"], module["call"], op["name"]
        found.append((*place, counts[place]))
        counts[place] += 1
    return found


def mark(ops: Sequence[dict[str, Any]], calls: ModuleCalls, found: Mapping[OpOfStep, str]) -> tuple[str, ...]:
    """Mark the ops and modules that a recording has found, unless marked already; returns notes for the profile."""
    by_op: dict[tuple[str, str], list[str]] = {}
    for op, name in zip(ops, ops_of_step(ops, calls), strict=True):
        why = found.get(name)
        if why is None:
            continue
        if op["replayable"]:
            op["replayable"] = False
            by_op.setdefault((op["name"], why), []).append(module_in_words(name[0]))
    for index, call in enumerate(calls.rows):
        if _any_call(call["fqn"]) in found:
            cannot_run_twice(calls, index)
    return tuple(
        f"{op} in {', '.join(dict.fromkeys(modules))} {_NOTES[why]}" for (op, why), modules in by_op.items()
    )


_NOTES = {
    FILLED: "has other bits after it ran than when they are read (its result is written by code that torch does not "
    "see, such as numpy or an extension): plans save what it makes",
    OVERWRITTEN: "has other bits after forward than when they were read or saved (its result is overwritten by code "
    "that torch does not see, such as numpy or an extension): plans save what it makes",
    MARKED: "has read what an autograd.Function marks as written (`mark_dirty`) after it has run: plans save what it "
    "makes",
    READ_BEFORE: "has read what is overwritten afterwards by code that torch does not see: plans save what it makes",
}


def cannot_run_twice(calls: ModuleCalls, call: int) -> None:
    """Mark the modules around: a second run would write to saved storages, possibly adding to them; see (6)."""
    while call != NEVER:
        calls.rows[call]["once"] = calls.rows[call].get("once") or FOREIGN
        call = calls.rows[call]["parent"]


def checksum_of_storage(tensor: torch.Tensor) -> int:
    """Checksum of all bytes of a tensor's storage, including those outside of the tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return 0
    if tensor.device.type == "cpu":
        memory: Any = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        return zlib.crc32(memory)
    with disable_dispatch_modes(), torch.no_grad():
        return on_device(bytes_of_storage(tensor))


def bytes_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage, on its device, up to the last whole element of the tensor's dtype."""
    plain = tensor.detach()
    plain = plain.conj() if plain.is_conj() else plain  # clears the conjugate bit, changes no byte
    plain = negative_view(plain) if plain.is_neg() else plain
    elements = plain.untyped_storage().nbytes() // plain.element_size()
    return plain.as_strided((elements,), (1,), 0).view(torch.uint8)
