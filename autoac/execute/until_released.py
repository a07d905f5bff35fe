"""Tensors held until nothing else holds their storages: only then no code of forward can write them any more.

In the first step of a plan, values that will be recomputed are compared with forward's. Autograd uses the bytes that a
saved tensor has when forward is over, which code that torch does not see may have written after it was saved.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoac.torch_private import detach_unseen, storage_key, storage_users

Then = Callable[[torch.Tensor], None]


class UntilReleased:
    """Holds tensors. `poll` comes before each op, so memory that would be free by then is free."""

    def __init__(self) -> None:
        self._held: dict[int, list[tuple[torch.Tensor, Then]]] = {}  # by key of the storage

    def hold(self, tensor: torch.Tensor, then: Then) -> None:
        """Hold a strided tensor; `then` gets an alias of it once nothing else holds its storage."""
        alias = detach_unseen(tensor)
        self._held.setdefault(storage_key(alias), []).append((alias, then))

    def poll(self) -> None:
        """Let go of the tensors that nothing else holds."""
        for key, held in list(self._held.items()):
            if storage_users(key) <= len(held):
                self._let_go(key)

    def end(self) -> None:
        """Let go of all tensors: the region's forward is over."""
        for key in list(self._held):
            self._let_go(key)

    def _let_go(self, key: int) -> None:
        for alias, then in self._held.pop(key):
            then(alias)
