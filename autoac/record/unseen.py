"""Finds writes that no op makes, in code that is not recomputed while a step is recorded.

NOTE [ Unseen writes ]
  1. The guard (NOTE [ The guard ]) covers only values of lean modules that their backward needs: only these are
     recomputed. It misses the values that a larger module computes between its lean ones, and the values that a lean
     module makes for others. A plan may still choose the larger module as a region and recompute them.
  2. So in the first step each storage is checksummed when an op has made or written it, and again when an op reads it,
     when autograd saves it and when a lean module returns it. If the checksums differ, code that torch does not see has
     written the storage in between: the op whose bytes were overwritten cannot run again.
  3. Undeclared random numbers of ops and flags that forward sets are found, and kept, everywhere (see `Draws`, and
     `autoac.torch_private.kernel_flags`). Not found here are nondeterministic kernels.
  4. Engine sac runs such code a second time, on the saved storage. That is right if the code overwrites all bytes, and
     wrong if it adds to them. The two cannot be told apart unless the storage was uninitialised before
     (`torch.empty`) and no op writes it afterwards. So in all other cases the modules around are no regions for sac.
"""

from __future__ import annotations

import ctypes
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from autoac.execute.checksums import on_device
from autoac.record.tape.calls import ModuleCalls
from autoac.record.tape.storages import Storages
from autoac.torch_private import disable_dispatch_modes, is_zero_tensor, negative_view
from autoac_solver.records.profile import FOREIGN, NEVER

_WITH_BYTES = (torch.Tensor, torch.nn.Parameter)
"""Types that are checked; a subclass may have no bytes of its own."""

OpOfStep = tuple[str, int, str, int]
"""Module, its call in the step, op, and its call by the module; the same in every recording of the step."""


class UnseenWrites:
    """Compares the storages of one recorded step with the bytes that ops have left in them.

    Args:
        storages, calls, ops: the tape's, which go on growing.
    """

    def __init__(self, storages: Storages, calls: ModuleCalls, ops: Sequence[dict[str, Any]]):
        self._storages = storages
        self._calls = calls
        self._ops = ops
        self._left: dict[int, int] = {}  # storage -> checksum after the last op that wrote it
        self._changed: list[tuple[int, int]] = []  # storage, and the number of ops that had run

    def wrote(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op has made or written these."""
        for index, tensor in self._made_in_step(tensors):
            self._left[index] = checksum_of_storage(tensor)

    def is_written_later(self, tensors: Iterable[torch.Tensor]) -> None:
        """A collective is writing these or has been waited for: their bytes are not those that an op left."""
        for index, _ in self._made_in_step(tensors):
            self._left.pop(index, None)

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        """An op is about to read these, autograd saves them, or a lean module returns them."""
        for index, tensor in self._made_in_step(tensors):
            left = self._left.get(index)
            if left is not None and (found := checksum_of_storage(tensor)) != left:
                self._left[index] = found
                self._changed.append((index, len(self._ops)))

    def _made_in_step(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for tensor in tensors:
            if tensor.layout is not torch.strided or type(tensor) not in _WITH_BYTES or tensor.is_meta:
                continue
            index = self._storages.known(tensor)
            if index is not None and not self._storages.was_before(index) and not is_zero_tensor(tensor):
                yield index, tensor

    def found(self) -> set[OpOfStep]:
        """The ops whose results were overwritten by unseen code."""
        names = ops_of_step(self._ops, self._calls)
        found = set()
        for storage, done in self._changed:
            writers = (row for row in reversed(range(done)) if _leaves_bytes_in(self._ops[row], storage))
            if (row := next(writers, None)) is not None:
                found.add(names[row])
        return found


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


def mark(ops: Sequence[dict[str, Any]], calls: ModuleCalls, found: set[OpOfStep]) -> tuple[str, ...]:
    """Mark the ops that another recording has found, unless marked already; returns notes for the profile."""
    by_op: dict[str, list[str]] = {}
    written = {storage for op in ops for storage in op["writes"]}
    for op, name in zip(ops, ops_of_step(ops, calls), strict=True):
        if name in found and (not op["uninitialised"] or not written.isdisjoint(op["creates"])):
            _cannot_run_twice(calls, op["module"])
        if name in found and op["replayable"]:
            op["replayable"] = False
            by_op.setdefault(op["name"], []).append(repr(name[0]) if name[0] else "the model itself")
    return tuple(
        f"{op} in {', '.join(dict.fromkeys(modules))} has other bits after it ran than when they are read (its result "
        "is written by code that torch does not see, such as numpy or an extension): plans save what it makes"
        for op, modules in by_op.items()
    )


def _cannot_run_twice(calls: ModuleCalls, call: int) -> None:
    """Mark the modules around: a second run would write to saved storages, possibly adding to them; see (4)."""
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
