"""Applies the caller's autocast as a training loop does: around forward and loss, anew in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from autoac.torch_private import any_autocast

OFF_IN_BACKWARD = (
    "recorded under the autocast that was on: taken to be around the model and its loss, and off in backward; "
    "for another loop pass a callable sample"
)
"""A profile's note."""

_DEVICES = ("cpu", "cuda")
_AS_PLANNED = ContextVar("_AS_PLANNED", default=False)


@contextlib.contextmanager
def forward_autocast() -> Iterator[contextlib.AbstractContextManager[None]]:
    """Context for forward and loss that stands for the loop's own autocast context; yields a context for backward.

    Autocast caches its casts of weights until the outermost context ends. If the user profiles inside of one, each step
    would find the casts of the step before, but a loop makes them anew in every step. So the cache is cleared.
    """
    if not any_autocast():
        yield contextlib.nullcontext()
        return
    torch.clear_autocast_cache()
    try:
        yield _off()
    finally:
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _off() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                dtype = torch.get_autocast_dtype(device)
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=False))
        token = _AS_PLANNED.set(True)
        try:
            yield
        finally:
            _AS_PLANNED.reset(token)


def backward_is_as_planned() -> bool:
    """Whether this is a backward of ours inside the caller's autocast, whose cached casts are gone all the same."""
    return _AS_PLANNED.get()
