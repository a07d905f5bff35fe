"""Buffers and other tensors of modules that code writes unseen by torch (numpy, an extension) in a recorded step.

NOTE [ Unseen writes to buffers ]
  1. A recording copies what an op is about to write, and puts it back. A write that it does not see would stay, so
     buffers, and other tensors that modules have as attributes, are copied before the first recorded step, to the
     host, the small ones first.
  2. A buffer that differs from its copy although no op has written it was written by such code. Engine replay does not
     run the code again. Engine sac would, on the written buffer: the modules around are no regions for it.
  3. Ops that read the buffer before the write cannot run again, see NOTE [ Unseen writes ] 4.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from autoac.record.tape.calls import ModuleCalls
from autoac.record.unseen import cannot_run_twice
from autoac.step.uncompiled import is_inside
from autoac.torch_private import is_fake, storage_key

_MOST_BYTES = 2**26
"""Of all copies together."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A buffer, and its storage and values before the step."""

    name: str
    buffer: torch.Tensor
    key: int
    values: torch.Tensor

    def differs(self) -> bool:
        """Whether the values differ, to the bit, in the same storage (an assignment to `.data` exchanges it)."""
        if storage_key(self.buffer) != self.key or self.buffer.shape != self.values.shape:
            return False
        return not torch.equal(_bytes(self.buffer.detach().cpu()), _bytes(self.values))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Buffers:
    """Copies of a model's buffers and of its modules' tensors that are attributes, up to `_MOST_BYTES`.

    Attributes:
        overwritten: names of the buffers that unseen code has written.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.overwritten: dict[str, None] = {}
        self._copies: list[_Copy] = []
        left = _MOST_BYTES
        with_bytes = [named for named in _of_modules(model) if _has_bytes(named[1])]
        for name, buffer in sorted(with_bytes, key=lambda named: named[1].nbytes):
            if (left := left - buffer.nbytes) >= 0:
                values = buffer.detach().to("cpu", copy=True)
                self._copies.append(_Copy(name, buffer, storage_key(buffer), values))

    def put_back(self) -> None:
        """Put back what was overwritten; call it where the writes of ops have been put back."""
        for copy in self._copies:
            if copy.differs():
                self.overwritten[copy.name] = None
                copy.buffer.data.copy_(copy.values)  # the version stays: the step has not changed it

    def compare(self, written: Collection[int]) -> None:
        """Compare the buffers after a step that is not undone.

        Args:
            written: keys of the storages that ops have written.
        """
        found = [copy.name for copy in self._copies if copy.key not in written and copy.differs()]
        self.overwritten |= dict.fromkeys(found)

    def mark(self, calls: ModuleCalls) -> tuple[str, ...]:
        """Mark the modules around such buffers; returns notes for the profile."""
        owners = {name.rpartition(".")[0] for name in self.overwritten}
        for call, row in enumerate(calls.rows):
            if any(is_inside(owner, row["fqn"]) for owner in owners):
                cannot_run_twice(calls, call)
        names = ", ".join(map(repr, self.overwritten))
        note = "written by code that torch does not see, such as numpy or an extension: engine sac leaves the modules "
        return (f"buffers {names} are {note}around them as they are",) if names else ()


def _has_bytes(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Buffer) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not is_fake(tensor)


def _of_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers()
    for fqn, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.requires_grad:
                yield f"{fqn}.{name}" if fqn else name, value
