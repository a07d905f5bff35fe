"""What may be held of a tensor, and whose storage is ours to account for."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction

from autoac.torch_private import base_of, detach_unseen, key_of_storage


def key_of(tensor: torch.Tensor) -> int:
    try:
        return key_of_storage(tensor.untyped_storage())
    except NotImplementedError:
        return 0  # sparse and the like have no storage


def without_graph(tensor: torch.Tensor, detach: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What may be held of a tensor: see NOTE [ Who holds what ] 3. A view holds its base, and that perhaps a graph."""
    base = base_of(tensor)
    whole = tensor if base is None else base
    if whole.is_leaf and (base is None or _ends_at(base, tensor)):
        return tensor
    return detach(tensor)


def _ends_at(base: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether a view's graph leads to a parameter and no further, as that of a linear layer's transposed weight does.

    A function of somebody's own may hold the view that it made.
    """
    return type(base) is torch.nn.Parameter and not isinstance(view.grad_fn, BackwardCFunction)


def detach_foreign_too(tensor: torch.Tensor) -> torch.Tensor:
    # A subclass's own dispatch must see that, and our mode ignores it.
    return tensor.detach() if is_foreign(type(tensor)) else detach_unseen(tensor)


def is_foreign(kind: type) -> bool:
    """A tensor subclass with a dispatch of its own: its storage is not ours to account for."""
    return kind is not torch.Tensor and kind is not torch.nn.Parameter
