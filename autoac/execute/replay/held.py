"""Hold tensors without their autograd graph, and tell tensor subclasses whose storage is not ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from autoac.torch_private import (
    base_of,
    detach_unseen,
    is_sharded_type,
    key_of_storage,
    taken_apart,
    version_of,
)

MODIFIED = (
    "a tensor that backward needs in {where} was modified by an in-place operation after it was saved. "
    "Without a plan autograd refuses this too; use an out-of-place operation there."
)


def key_of(tensor: torch.Tensor) -> int:
    try:
        return key_of_storage(tensor.untyped_storage())
    except NotImplementedError:
        return 0  # sparse and the like have no storage


def without_graph(tensor: torch.Tensor, detach: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The tensor without its graph, see NOTE [ Who holds what ] 3. A view holds its base, which may have a graph."""
    base = base_of(tensor)
    whole = tensor if base is None else base
    if whole.is_leaf and (base is None or _ends_at(base, tensor)):
        return tensor
    return detach(tensor)


def _ends_at(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view's graph ends at a parameter, like that of a linear layer's transposed weight.

    Not if its node is a custom `autograd.Function`, which may hold the view that it made.
    """
    return type(base) is torch.nn.Parameter and not isinstance(view.grad_fn, BackwardCFunction)


class Apart:
    """Stands in, in autograd's graph, for a wrapper subclass (float8): its parts, each packed by itself.

    Args:
        tensor: the wrapper. Ops that write it count at its own version, not at those of its parts.
        parts: the packed ones.
        put_together: makes the tensor of the unpacked ones.
    """

    __slots__ = ("_alias", "_put_together", "_saved_version", "parts")

    def __init__(
        self,
        tensor: torch.Tensor,
        parts: list[Any],
        put_together: Callable[[Iterable[torch.Tensor]], torch.Tensor],
    ):
        self.parts = parts
        self._put_together = put_together
        # Without the wrapper's own dispatch: a plain tensor that has the version, and holds no part.
        self._alias, self._saved_version = detach_unseen(tensor), version_of(tensor)

    def unpacked(self, unpack: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The tensor, of unpacked parts.

        Args:
            unpack: unpacks a part.
        """
        if version_of(self._alias) != self._saved_version:
            raise RuntimeError(MODIFIED.format(where="a module that makes it"))
        return self._put_together(map(unpack, self.parts))

    @classmethod
    def packed(cls, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any]) -> Apart | None:
        """What autograd is to hold of this tensor; None if it is to be packed as one, as sharded and plain ones are.

        So is one that was written: its own dispatch writes its parts, which their recomputation would not know of.

        Args:
            pack: packs a part.
        """
        kind = type(tensor)
        is_one = not is_foreign(kind) or is_sharded_type(kind) or tensor.layout is not torch.strided
        if is_one or (tensor.is_leaf and tensor.requires_grad) or version_of(tensor):
            return None
        found = taken_apart(tensor)
        return None if found is None else cls(tensor, [pack(part) for part in found[0]], found[1])


def detach_foreign_too(tensor: torch.Tensor) -> torch.Tensor:
    # A subclass's own dispatch must see the detach; our mode ignores it.
    return tensor.detach() if is_foreign(type(tensor)) else detach_unseen(tensor)


def is_foreign(kind: type) -> bool:
    """Whether this is a tensor subclass with its own dispatch: its storage is not ours to account for."""
    return kind is not torch.Tensor and kind is not torch.nn.Parameter
