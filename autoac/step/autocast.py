"""Applies the caller's autocast as a training loop does: around forward and loss, anew in every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from autoac.device import KINDS
from autoac.torch_private import any_autocast

OFF_IN_BACKWARD = (
    "recorded under the autocast that was on: taken to be around the model and its loss, and off in backward; "
    "for another loop pass a callable sample"
)
"""A profile's note."""

_AS_PLANNED = ContextVar("_AS_PLANNED", default=False)


def autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    """Kind of device and dtype of each autocast that is on."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in KINDS if torch.is_autocast_enabled(kind))


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
def autocast_off() -> Iterator[None]:
    """Context without autocast. The casts that an outer autocast has cached stay."""
    with contextlib.ExitStack() as stack:
        for kind, dtype in autocasts():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=False))
        yield


@contextlib.contextmanager
def _off() -> Iterator[None]:
    with autocast_off():
        token = _AS_PLANNED.set(True)
        try:
            yield
        finally:
            _AS_PLANNED.reset(token)


def backward_is_as_planned() -> bool:
    """Whether this is a backward of ours inside the caller's autocast, whose cached casts are gone all the same."""
    return _AS_PLANNED.get()
