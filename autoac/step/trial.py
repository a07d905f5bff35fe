"""Restores everything after a trial run, with the states of the optimizers that step in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from autoac.step.optimizer import around_steps
from autoac.step.restore import (
    Restorer,
    attributes_kept,
    own_gradient,
    put_back,
    untouched,
    values_kept,
)
from autoac.torch_private import parts_of


@contextmanager
def trial(
    model: torch.nn.Module,
    inputs: Iterable[torch.Tensor],
    written: Iterable[torch.Tensor],
    *,
    places: Iterable[torch.Tensor] = (),
    gradient: Callable[[torch.Tensor], torch.Tensor | None] = own_gradient,
    optimizers: AbstractContextManager[object] | None = None,
) -> Iterator[Restorer]:
    """Context: restore everything that a step changes, also when it fails.

    Args:
        inputs: the tensors of the sample.
        written: tensors that the step may write in place, such as `TrainingStep.written`; copied here, and so are
            tensors that modules have as attributes.
        places: tensors of which only shapes and storages are restored, not the values.
        gradient: gives a leaf's gradient at the step's start; by default the current one. A step adds to that in place,
            so give a copy, or None, if it runs backward.
        optimizers: restores the optimizers that step; by default a new `OptimizerStates(copies=True)`. That copies an
            optimizer's state at its first step, which counts in a peak measured there: pass one whose `known` has the
            optimizers already, after a step that is not measured.

    Returns:
        The restorer, to register further actions.

    The recording copies no values beforehand and has contexts of its own: see `autoac/record/recorder.py`, and for
    optimizers `autoac/api/profiling.py`.
    """
    states = OptimizerStates(copies=True) if optimizers is None else optimizers
    kept = values_kept(written, places), attributes_kept(model)
    with untouched(model, inputs, gradient) as restorer, kept[0], kept[1], states:
        yield restorer


Kept = dict[str, tuple[Any, Any]]
"""Name -> the earlier value, and what to restore it from: itself, or a copy."""


class OptimizerStates:
    """Context after which each optimizer has the state that it had before its first step in it.

    Earlier tensors keep their storages. An optimizer is known from its first step on, in this use of the context or in
    an earlier one. Learning-rate schedulers are not known.

    Args:
        copies: restore the values of tensors and the options of groups as well. Otherwise the caller, who runs the
            step, restores the values.
    """

    def __init__(self, copies: bool = False) -> None:
        self._copies = copies
        self._known: list[tuple[torch.optim.Optimizer, dict[Any, Any], list[tuple[Any, Kept]]]] = []

    @property
    def known(self) -> list[torch.optim.Optimizer]:
        """Optimizers that have stepped."""
        return [optimizer for optimizer, _, _ in self._known]

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known in self.known):
            rows = {parameter: (row, self._kept(row)) for parameter, row in optimizer.state.items()}
            groups = [(group, self._kept(group)) for group in optimizer.param_groups if self._copies]
            self._known.append((optimizer, rows, groups))

    def _kept(self, values: dict[str, Any]) -> Kept:
        """The current values; a group's parameters are the model's, and kept elsewhere."""
        copied = {name for name in values if self._copies and name != "params"}
        return {name: (v, copy.deepcopy(v) if name in copied else v) for name, v in values.items()}

    def __enter__(self) -> None:
        self._leave_steps = around_steps(self._steps)

    def __exit__(self, *_: Any) -> None:
        """Remove new state, and restore the earlier one."""
        self._leave_steps()
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
