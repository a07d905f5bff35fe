"""The states of optimizers that step while a step is run on trial."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoac.step.restore import put_back
from autoac.torch_private import parts_of

Kept = dict[str, tuple[Any, Any]]
"""By name, a value that was there and what it is to be again: itself, or a copy."""


class OptimizerStates:
    """Context after which each optimizer has the state that it had before it first stepped in it.

    Tensors that were there keep their storages. An optimizer is known from its first step on, in this context or in
    one before. The scheduler of a learning rate is not.

    Args:
        copies: put back the values of the tensors, too, and the options of the groups. Else who runs the step puts back
            the values.
    """

    def __init__(self, copies: bool = False) -> None:
        self._copies = copies
        self._known: list[tuple[torch.optim.Optimizer, dict[Any, Any], list[tuple[Any, Kept]]]] = []

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped."""
        return [optimizer for optimizer, _, _ in self._known]

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known in self.known):
            rows = {parameter: (row, self._kept(row)) for parameter, row in optimizer.state.items()}
            groups = [(group, self._kept(group)) for group in optimizer.param_groups if self._copies]
            self._known.append((optimizer, rows, groups))

    def _kept(self, values: dict[str, Any]) -> Kept:
        """What is there; a group's parameters are the model's, and kept elsewhere."""
        copied = {name for name in values if self._copies and name != "params"}
        return {name: (v, copy.deepcopy(v) if name in copied else v) for name, v in values.items()}

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def __exit__(self, *_: Any) -> None:
        """Take away what is new, and put back what was there."""
        self._hook.remove()
        put_back(functools.partial(_restore, *known) for known in self._known)


def _restore(
    optimizer: torch.optim.Optimizer, rows: dict[Any, tuple[Any, Kept]], groups: list[tuple[Any, Kept]]
) -> None:
    optimizer.state.clear()
    for parameter, (row, kept) in rows.items():
        _put(row, kept)
        optimizer.state[parameter] = row
    for group, kept in groups:
        _put(group, kept)


def _put(values: dict[str, Any], kept: Kept) -> None:
    values.clear()
    for name, (value, known) in kept.items():
        if known is value:
            values[name] = value
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                for part, copied in zip(parts_of(value), parts_of(known), strict=True):
                    part.copy_(copied)
            values[name] = value
        else:
            values[name] = copy.deepcopy(known)
