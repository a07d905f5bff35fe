"""What was there before a recorded step, and how it was: see NOTE [ The recorded step ] 3 in tape.py."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping

import torch

from autoac.step.restore import Seen, put_back


class BeforeStep:
    """Copies of what a step changes: storages, shapes of tensors, gradients of leaves, states of generators."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # storages as they were, by index
        self._seen: list[Seen] = []  # how tensors were that an op has reshaped or resized
        self._leaves: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # with their gradients
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # with their states

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves that may get a gradient in the step."""
        return [tensor for tensor, _ in self._leaves]

    def keep_gradient(self, leaf: torch.Tensor) -> None:
        """Put this leaf's gradient back at the end."""
        self._leaves.append((leaf, leaf.grad))

    def keep_values(self, index: int, tensor: torch.Tensor) -> None:
        """Put the values of this tensor's storage back at the end; it is about to be written."""
        if index not in self._copies:
            self._copies[index] = _whole(tensor.untyped_storage()).clone()

    def keep_shapes(self, seen: Iterable[Seen]) -> None:
        """Put these tensors' shapes back at the end."""
        self._seen += seen

    def keep_state(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """Put this generator's state back at the end."""
        self._generators.setdefault(generator, state)

    def restore(self, storages: Mapping[int, weakref.ref[torch.UntypedStorage]]) -> None:
        """Put everything back.

        Args:
            storages: by index.
        """

        def write(index: int, copy: torch.Tensor) -> None:
            storage = storages[index]()
            if storage is not None and storage.nbytes() == copy.nbytes:  # see NOTE [ The recorded step ] 3
                with torch.no_grad():
                    _whole(storage).copy_(copy)

        try:
            put_back(
                [
                    *(seen.put_back for seen in reversed(self._seen)),
                    *(functools.partial(write, index, copy) for index, copy in self._copies.items()),
                    *(functools.partial(setattr, leaf, "grad", gradient) for leaf, gradient in self._leaves),
                    *(functools.partial(g.set_state, state) for g, state in self._generators.items()),
                ]
            )
        finally:
            for table in (self._copies, self._seen, self._leaves):
                table.clear()


def _whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """The storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )
