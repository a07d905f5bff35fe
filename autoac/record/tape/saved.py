"""Saved tensors of a recorded step: when each is saved, first unpacked and released."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from autoac.execute.program import Program
from autoac.execute.replay import Handle, ReplayCall
from autoac.execute.replay import unpack as replay_unpack
from autoac.execute.replay.held import Apart
from autoac.ops.geometry import with_geometry
from autoac.record.guard import Guard
from autoac.record.tape.calls import ModuleCalls, name_of, sequence_of
from autoac.record.tape.clock import Clock, Suspended
from autoac.record.tape.storages import Storages
from autoac.record.tape.unpacks import Unpacks
from autoac.record.unseen import UnseenWrites
from autoac.torch_private import (
    COMPILED_NODE,
    current_backward,
    current_node,
    disable_dispatch_modes,
    in_backward,
    local_part,
    untraced,
    version_of,
)
from autoac_solver.records.profile import NEVER


class SavedTensors:
    """The table of saved tensors, and the hooks that fill it.

    Args:
        on_fakes: whether the step runs on fake tensors.

    Attributes:
        rows: the fields of `Saved`, in the order in which the tensors were saved.
        guard: checks recomputed values, or None.
        unseen: looks for writes that no op makes, or None.
    """

    def __init__(self, clock: Clock, storages: Storages, calls: ModuleCalls, on_fakes: bool):
        self.clock = clock
        self.storages = storages
        self.calls = calls
        self.on_fakes = on_fakes
        self.rows: list[dict[str, Any]] = []
        self._unpacked: list[int] = []  # by the node that unpacked last
        self._unpacked_in: dict[int, int] = {}  # saved tensor -> the backward that unpacked it last
        self.unpacks = Unpacks(clock)
        self._outside = ReplayCall(Program("", ()))
        self.guard: Guard | None = None
        self.unseen: UnseenWrites | None = None
        self._to_recompute: dict[int, list[weakref.ref[_Watched]]] = {}  # by storage; for `keep`

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor on the same storage, for holders that `Storages.poll` must not count."""
        # Not `detach`: that would hold the tensor's base as well. In a recording on fake tensors, a real one (labels
        # that the loss closes over) would become a fake one with its own storage here, so modes are off for it.
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        # Making the alias is no op of the step.
        with disable_dispatch_modes() if self.on_fakes and plain else Suspended(self.clock):
            alias = tensor.data
        index = self.storages.index_of(tensor)
        if index is not None:
            self.storages.held_by(alias, index)
        return alias

    @untraced
    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook for code outside of the modules that the engine runs."""
        if (apart := Apart.packed(tensor, self.pack)) is not None:
            return apart
        self.is_saved(tensor)
        alias = self.alias(tensor)
        return self.watch(tensor, (alias, version_of(alias), self._outside))

    def is_saved(self, tensor: torch.Tensor) -> None:
        """Autograd is about to save this tensor."""
        if self.unseen is not None and not in_backward():
            self.unseen.passes([tensor])

    def keep(self, index: int, alias: torch.Tensor) -> None:
        """Give autograd this storage itself in place of tensors that would be recomputed: their bytes have changed."""
        for ref in self._to_recompute.pop(index, ()):
            watched = ref()
            if watched is None or type(watched.packed) is not Handle or watched.packed.modified:
                continue
            handle: Handle = watched.packed
            with Suspended(self.clock), torch.no_grad():
                tensor = with_geometry(alias, handle.geometry or handle.slot.as_made)
                tensor = self.alias(tensor if handle.like is None else handle.like(tensor))
            watched.packed = tensor, version_of(tensor), handle.call

    def watch(self, tensor: torch.Tensor, packed: Any) -> Any:
        """Record that autograd saved this tensor, and when it releases it.

        Args:
            packed: the object for the engine's `unpack`.

        Returns:
            The object for autograd to hold.
        """
        index = self.storages.index_of(tensor)
        if index is None:
            self.calls.not_counted(tensor)
            return _Watched(None, NEVER, packed)
        self.rows.append(
            {
                "storage": index,
                "module": self.calls.current,
                "tick": self.clock.next(),
                "unpacked": NEVER,
                "released": NEVER,
                "dropped": NEVER,
            }
        )
        watched = _Watched(self, len(self.rows) - 1, packed)
        if self.unseen is not None and self.unseen.keeps and type(packed) is Handle:
            self._to_recompute.setdefault(index, []).append(weakref.ref(watched))
        return watched

    @untraced
    def unpack(self, watched: _Watched | Apart) -> torch.Tensor:
        """The unpack hook."""
        if isinstance(watched, Apart):
            return watched.unpacked(self.unpack)
        if self.unseen is not None and in_backward():
            self.unseen.backward_begins()
        row = None if watched.saved is None else self.rows[watched.index]
        if row is not None:
            self._is_unpacked(row, watched.index)
        with Suspended(self.clock):
            tensor = replay_unpack(watched.packed)
            if self.guard is not None:
                self.guard.unpacked(watched.packed, tensor)
        if row is not None and self.storages.known(local_part(tensor)) is None:
            self.storages.recomputed(local_part(tensor), row["storage"])
        return tensor

    def _is_unpacked(self, row: dict[str, Any], index: int) -> None:
        self.storages.poll()
        tick = self.clock.next()
        if row["unpacked"] == NEVER:
            row["unpacked"] = tick
            self._first_unpack(row, index)
        else:
            row["dropped"] = NEVER  # another backward
        if in_backward():
            self.unpacks.add(index, tick)
            backward = current_backward()
            if self._unpacked_in.get(index) == backward:
                self.calls.unpacked_twice(row["module"])
            self._unpacked_in[index] = backward

    def _first_unpack(self, row: dict[str, Any], index: int) -> None:
        node = current_node()
        if sequence_of(node) != self.calls.node_that_unpacked_last:
            self._unpacked = []
        self._unpacked.append(index)
        self.calls.unpacked(node, row["module"])
        if name_of(node) == COMPILED_NODE:
            self.calls.runs_compiled(row["module"])

    def held_by(self, node: Any) -> Iterator[dict[str, Any]]:
        """Rows of the tensors that this backward node has unpacked and not released."""
        if sequence_of(node) == self.calls.node_that_unpacked_last:
            yield from (row for row in map(self.rows.__getitem__, self._unpacked) if row["released"] == NEVER)

    def all_released(self) -> bool:
        """Whether autograd has released every saved tensor that was unpacked."""
        return not any(row["released"] == NEVER != row["unpacked"] for row in self.rows)


class _Watched:
    """The packed object that autograd holds in a recorded step; its deletion is the release."""

    __slots__ = ("__weakref__", "index", "packed", "saved")

    def __init__(self, saved: SavedTensors | None, index: int, packed: Any):
        self.saved = saved
        self.index = index
        self.packed = packed

    def __del__(self) -> None:
        saved: SavedTensors | None = getattr(self, "saved", None)  # an interrupt may come before it is set
        if saved is not None:
            saved.rows[self.index]["released"] = saved.clock.next()
