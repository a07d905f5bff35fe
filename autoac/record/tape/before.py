"""State from before a recorded step, to be restored: see NOTE [ The recorded step ] 3 in tape.py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping

import torch

from autoac.ops.generators import set_state
from autoac.step.restore import Graph, Seen, bytes_of, put_back
from autoac.torch_private import base_of


class BeforeStep:
    """Copies of state that a step changes: storages, tensor shapes, gradients of leaves, generator states."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # copies of storages, by index
        self._graphs: dict[int, Graph] = {}  # autograd's state of written tensors, by identity
        self._seen: list[Seen] = []  # tensors before an op reshaped or resized them
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with their gradients
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # with their states

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves that may get a gradient in the step."""
        return [tensor for tensor, _ in self._leaves]

    def keep_gradient(self, leaf: torch.Tensor) -> None:
        """Keep this leaf's gradient for `restore`."""
        self._leaves.append((leaf, leaf.grad))

    def keep_values(self, index: int, tensor: torch.Tensor) -> None:
        """Keep the values of this tensor's storage, which is about to be written, for `restore`."""
        if index not in self._copies:
            self._copies[index] = bytes_of(tensor.untyped_storage()).clone()

    def keep_graph(self, tensor: torch.Tensor) -> None:
        """Keep autograd's state of this tensor for `restore`; the tensor is about to be written."""
        for written in (tensor, base_of(tensor)):
            if written is None:
                continue
            kept = self._graphs.get(id(written))
            if kept is None or kept.known() is not written:
                self._graphs[id(written)] = Graph.of(written)

    def keep_shapes(self, seen: Iterable[Seen]) -> None:
        """Keep these tensors' shapes for `restore`."""
        self._seen += seen

    def keep_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Keep this generator's state for `restore`."""
        self._generators.setdefault(generator, state)

    def restore(self, storages: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Restore everything that was kept.

        Args:
            storages: by index.
        """

        def write(index: int, copy: torch.Tensor) -> None:
            storage = storages[index]()
            if storage is not None and storage.nbytes() == copy.nbytes:  # see NOTE [ The recorded step ] 3
                with torch.no_grad():
                    bytes_of(storage).copy_(copy)

        try:
            put_back(
                [
                    *(seen.put_back for seen in reversed(self._seen)),
                    *(functools.partial(write, index, copy) for index, copy in self._copies.items()),
                    *(functools.partial(setattr, leaf, "grad", gradient) for leaf, gradient in self._leaves),
                    *(graph.put_back for graph in reversed(self._graphs.values())),
                    *(functools.partial(set_state, g, state) for g, state in self._generators.items()),
                ]
            )
        finally:
            for table in (self._copies, self._graphs, self._seen, self._leaves, self._generators):
                table.clear()
