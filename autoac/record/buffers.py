"""Buffers and other tensors of modules that code writes unseen by torch (numpy, an extension) in a recorded step.

NOTE [ Unseen writes to buffers ]
  1. A recording copies what an op is about to write, and puts it back. A write that it does not see would stay, so
     buffers, other tensors that modules have as attributes and parameters are copied before the first recorded step,
     to the host, the small ones first. The large ones are compared by a checksum, once, and cannot be put back. A step
     of the user's own loop is not undone, and an optimizer may change parameters in it: these are left out there.
  2. A buffer that differs from its copy although no op has written it was written by such code. Engine replay does not
     run the code again. Engine sac would, on the written buffer: the modules around are no regions for it.
  3. Ops that read the buffer before the write cannot run again, see NOTE [ Unseen writes ] 4.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from autoac.execute.checksums import checksum_of
from autoac.record.tape.calls import ModuleCalls
from autoac.record.unseen import cannot_run_twice
from autoac.step.restore import attributes_of_modules, bytes_of, is_plain
from autoac.step.uncompiled import is_inside
from autoac.torch_private import disable_dispatch_modes, is_fake, storage_key
from autoac.warned import warn
from autoac_solver.records.format import format_bytes

_MOST_BYTES = 2**26
"""Most bytes of all copies together."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """A storage as it was before the step, by the first of the modules' tensors on it, which a module may drop.

    Args:
        names: of all tensors on it.
        key: the storage's.
        values: its bytes; None if they are too many, and only their checksum is known.
    """

    names: tuple[str, ...]
    known: weakref.ref[torch.Tensor]
    key: int
    values: torch.Tensor | None
    checksum: int | None

    @classmethod
    def of(cls, names: tuple[str, ...], tensor: torch.Tensor, copies: bool) -> _Kept:
        """The current values, on the host."""
        values = bytes_of(tensor.untyped_storage()).to("cpu", copy=True) if copies else None
        checksum = None if copies else checksum_of(tensor)
        return cls(names, weakref.ref(tensor), storage_key(tensor), values, checksum)

    def differing(self) -> torch.Tensor | None:
        """The storage's bytes now, if they differ; not if the tensor has another storage, as assigned to `.data`."""
        tensor = self.known()
        if tensor is None or storage_key(tensor) != self.key:
            return None
        with disable_dispatch_modes():  # a recording may be on
            found = bytes_of(tensor.untyped_storage())
            if self.values is None:
                is_same = checksum_of(tensor) == self.checksum
            else:
                is_same = len(found) != len(self.values) or torch.equal(found.cpu(), self.values)
        return None if is_same else found


class Buffers:
    """Copies of a model's buffers and of its modules' tensors that are attributes, up to `_MOST_BYTES`.

    Args:
        parameters: whether parameters are among them, and what is too large for a copy is compared as well.

    Attributes:
        overwritten: names of the buffers that unseen code has written; of all tensors on a storage.
    """

    def __init__(self, model: torch.nn.Module, parameters: bool = False) -> None:
        self.overwritten: dict[str, None] = {}
        by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in _of_modules(model, parameters):
            if _has_bytes(tensor):
                by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
        self._copies: list[_Kept] = []
        self._large: list[_Kept] = []  # until they are compared
        left = _MOST_BYTES
        for named in sorted(by_storage.values(), key=lambda named: named[0][1].untyped_storage().nbytes()):
            names, tensor = tuple(name for name, _ in named), named[0][1]
            if (left := left - tensor.untyped_storage().nbytes()) >= 0:
                self._copies.append(_Kept.of(names, tensor, copies=True))
            elif parameters:
                self._large += [_Kept.of(names, tensor, copies=False) for _, tensor in named]

    def put_back(self) -> None:
        """Put back what was overwritten; call it where the writes of ops have been put back.

        Warns if a tensor too large for a copy was overwritten.
        """
        for kept in self._copies:
            if kept.values is not None and (found := kept.differing()) is not None:
                self.overwritten |= dict.fromkeys(kept.names)
                found.copy_(kept.values)
        large, self._large = self._large, []
        changed = dict.fromkeys(name for kept in large if kept.differing() is not None for name in kept.names)
        self.overwritten |= changed
        if changed:
            warn(
                f"code that torch does not see, such as numpy or an extension, overwrites {', '.join(changed)} when "
                f"the model runs. Tensors over {format_bytes(_MOST_BYTES)} in all are not copied, so the trial "
                "steps leave other values in them: load the weights again before training."
            )

    def compare(self, written: Collection[int]) -> None:
        """Compare the buffers after a step that is not undone.

        Args:
            written: keys of the storages that ops have written.
        """
        unwritten = (kept for kept in self._copies if kept.key not in written)
        found = (kept.names for kept in unwritten if kept.differing() is not None)
        self.overwritten |= dict.fromkeys(name for names in found for name in names)

    def mark(self, calls: ModuleCalls) -> tuple[str, ...]:
        """Mark the modules around such buffers; returns notes for the profile."""
        owners = {name.rpartition(".")[0] for name in self.overwritten}
        for call, row in enumerate(calls.rows):
            if any(is_inside(owner, row["fqn"]) for owner in owners):
                cannot_run_twice(calls, call)
        names = ", ".join(map(repr, self.overwritten))
        note = "written by code that torch does not see, such as numpy or an extension: engine sac leaves the modules "
        return (f"tensors of modules ({names}) are {note}around them as they are",) if names else ()


def _has_bytes(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and not (tensor.is_meta or is_fake(tensor))


def _of_modules(model: torch.nn.Module, parameters: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()
    if parameters:
        yield from model.named_parameters()
    for name, tensor in attributes_of_modules(model).items():
        if not tensor.requires_grad:
            yield name, tensor
