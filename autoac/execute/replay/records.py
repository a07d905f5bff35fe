"""Data of a region's recording: slots, op records, and the handles that autograd gets.

NOTE [ Who holds what ]
  1. An op whose values are to be recomputed leaves a record: the op and its arguments. An argument that will itself
     be recomputed is stored as a reference (slot and geometry), any other tensor as it is. That strong reference *is*
     the saving: values that nothing needs are neither kept nor recorded. A tensor without a graph, such as a
     parameter, is stored as an alias: code may assign other values to its `.data` before backward.
  2. Autograd gets a handle for a tensor on a recomputed storage, and a (tensor, version) pair for any other.
  3. Handles hold the call strongly, the call knows its handles weakly. No tensor that a call holds has a grad_fn, so
     there is no reference cycle: when the graph dies, handles, call and records die at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoac.execute.replay.held import MODIFIED, key_of
from autoac.execute.replay.randoms import Stash
from autoac.ops.geometry import Geometry, certainly_disjoint, clone_with_geometry, geometry_of, with_geometry
from autoac.torch_private import backward_keeps_graph, in_compiled_autograd, version_of
from autoac.torch_private.kernel_flags import KernelFlags

if TYPE_CHECKING:
    from autoac.execute.replay.call import ReplayCall

Marks = tuple[bool, int, list["weakref.ref[Handle]"]]
"""Whether a slot is written, its version, and the handles that autograd would not refuse."""


class Slot:
    """A storage that will be recomputed: its layout and version, and the handles that wait for it."""

    __slots__ = ("alive", "dtype", "handles", "shape", "stride", "version", "written")

    def __init__(self, tensor: torch.Tensor, storage: torch.UntypedStorage):
        self.alive = weakref.ref(storage)  # if dead, its address may be reused
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.version = version_of(tensor)  # the latest known
        self.written = False  # in place
        self.handles: list[weakref.ref[Handle]] = []

    def geometry_of(self, tensor: torch.Tensor) -> Geometry | None:
        """The tensor's geometry on the storage; None if it is as the op made it."""
        if (
            tensor.shape == self.shape
            and tensor.stride() == self.stride
            and not tensor.storage_offset()
            and (dtype := tensor.dtype) is self.dtype
            and not tensor.is_neg()
            and not (dtype.is_complex and tensor.is_conj())
        ):
            return None
        return geometry_of(tensor)

    @property
    def as_made(self) -> Geometry:
        """The geometry of the tensor that the op made."""
        return (self.shape, self.stride, 0, self.dtype, False, False)

    def is_written(self, target: torch.Tensor) -> None:
        """Before an op writes this tensor on the storage: mark the handles that autograd would refuse from now on.

        Autograd compares version counters. Parts cut by `unsafe_chunk` have one each, as has `.data`; a write to one
        part does not invalidate saved tensors of another.
        """
        self.written = True
        self.version = max(self.version, version_of(target) + 1)  # the counter rises once the op has run
        for ref in self.handles:
            handle = ref()
            if handle is not None and version_of(target) >= handle.version:
                seen = handle.geometry or self.as_made
                handle.modified |= not certainly_disjoint(geometry_of(target), seen)

    def marks(self) -> Marks:
        """The state that `is_written` changes."""
        return self.written, self.version, [ref for ref in self.handles if _is_intact(ref())]

    def put_back(self, marks: Marks) -> None:
        """Undo what `is_written` did since: the op has raised, and autograd's counters have not risen."""
        self.written, self.version, intact = marks
        for handle in (ref() for ref in intact):
            if handle is not None:
                handle.modified = False


Kept = tuple[torch.Tensor, torch.Tensor, int]
"""A tensor among a record's arguments, the tensor that has its version, and that version."""


class Record:
    """One op to run again."""

    __slots__ = (
        "args",
        "flags",
        "func",
        "grad",
        "kept",
        "kwargs",
        "outputs",
        "refs",
        "rng",
        "run",
        "written",
    )

    def __init__(self, func, run, args, kwargs, refs, kept, rng, written, flags, outputs):
        self.func = func
        self.run: Callable[..., Any] = run  # see `OpInfo.run`; a collective that is waited for
        self.grad = torch.is_grad_enabled()  # see NOTE [ Replay ] 4
        self.args: Sequence[Any] = args
        self.kwargs: dict[str, Any] = kwargs
        self.refs: list[tuple[Any, Slot, Geometry | None]] = refs  # place in args, slot, geometry
        self.kept: list[Kept] = kept
        self.rng: Sequence[Stash] | None = rng
        self.flags: KernelFlags | None = flags  # None if the op does not depend on them
        self.written: tuple[Slot, ...] = written
        self.outputs: tuple[tuple[int, Slot], ...] = outputs  # position among the op's output tensors

    def arguments(self, table: Mapping[Slot, torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The op's arguments, with recomputed tensors filled in."""
        if not self.refs:
            return self.args, self.kwargs
        args, kwargs = list(self.args), self.kwargs
        for where, slot, geometry in self.refs:
            tensor = table[slot] if geometry is None else with_geometry(table[slot], geometry)
            if type(where) is int:
                args[where] = tensor
            else:
                kwargs = _put(args, kwargs, where, tensor)
        return args, kwargs

    def seen(self, place: int, table: Mapping[Slot, torch.Tensor]) -> torch.Tensor:
        """The recomputed tensor of the reference at this place, with its geometry."""
        _, slot, geometry = self.refs[place]
        return table[slot] if geometry is None else with_geometry(table[slot], geometry)

    def preserve(self, key: int) -> None:
        """Replace each argument on the storage with this key by a copy."""
        copies = {id(t): clone_with_geometry(t) for t, _, _ in self.kept if key_of(t) == key}
        if copies:
            self.args = tuple(_swap(value, copies) for value in self.args)
            self.kwargs = {name: _swap(value, copies) for name, value in self.kwargs.items()}
            self.kept = [
                (copy, copy, version_of(copy)) if (copy := copies.get(id(kept[0]))) is not None else kept
                for kept in self.kept
            ]


class Handle:
    """Stands in, in autograd's graph, for a tensor that will be recomputed."""

    __slots__ = ("__weakref__", "call", "geometry", "like", "modified", "slot", "tensor", "version")

    def __init__(
        self,
        call: ReplayCall,
        slot: Slot,
        geometry: Geometry | None,
        version: int,
        like: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.call = call
        self.slot = slot
        self.geometry = geometry
        self.version = version
        self.like = like  # makes a sharded tensor of the local part
        self.modified = False
        self.tensor: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        keep_graph = backward_keeps_graph() or self.call.recording
        if self.tensor is None or self.call.pending or self.call.is_another_backward():
            self.call.replay(keep_graph, wanted=self)
        if self.modified:
            raise RuntimeError(MODIFIED.format(where=self.call.program.where))
        tensor = self.tensor
        assert tensor is not None
        if self.call.streams is not None:
            self.call.streams.hand_over(tensor)
        # A second backward replays again, see NOTE [ Replay ] 2. It cannot if one before it has freed its part of the
        # graph, and so the records. Compiled autograd unpacks once, and holds all handles until it ends.
        if (keep_graph and self.call.can_replay) or in_compiled_autograd():
            self.tensor = None
        return tensor if self.like is None else self.like(tensor)


def _is_intact(handle: Handle | None) -> bool:
    return handle is not None and not handle.modified


def _put(args: list[Any], kwargs: dict[str, Any], where: Any, tensor: torch.Tensor) -> dict[str, Any]:
    """Put the tensor at its reference's place: a keyword, or a (position or keyword, index)."""
    if type(where) is str:
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
