"""Observe calls of a sharded model before FSDP2's own hooks run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from autoac.torch_private import is_unit


class Ahead:
    """A hook that runs before FSDP2 gathers the parameters of the model that the loop calls.

    In the model's forward they are gathered already: the gathered parameters would count as alive before the step, and
    the shards would not.

    Args:
        model: as the loop calls it.
        heard: called for each call, before any of it runs. A bound method, which is not kept alive.
    """

    def __init__(self, model: torch.nn.Module, heard: Callable[[tuple[Any, ...], dict[str, Any]], None]):
        self._model = model
        self._heard = weakref.WeakMethod(heard)
        self._hook: Any = None

    @property
    def is_late(self) -> bool:
        """Whether the current call was missed: the model has been sharded since the last one."""
        return is_unit(self._model) and self._hook is None

    @property
    def is_on(self) -> bool:
        """Whether calls are observed."""
        return self._hook is not None

    def put_on(self) -> None:
        """Observe calls from the next one on, if the model itself is sharded."""
        if not self.is_late:
            return
        heard = self._heard

        def about_to_be_called(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            owner = heard()
            if owner is not None:
                owner(args, kwargs)

        self._hook = self._model.register_forward_pre_hook(about_to_be_called, prepend=True, with_kwargs=True)

    def take_off(self) -> None:
        """Stop observing calls."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
