"""Hold tensors without their autograd graph, and tell tensor subclasses whose storage is not ours."""

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


def detach_foreign_too(tensor: torch.Tensor) -> torch.Tensor:
    # A subclass's own dispatch must see the detach; our mode ignores it.
    return tensor.detach() if is_foreign(type(tensor)) else detach_unseen(tensor)


def is_foreign(kind: type) -> bool:
    """Whether this is a tensor subclass with its own dispatch: its storage is not ours to account for."""
    return kind is not torch.Tensor and kind is not torch.nn.Parameter
