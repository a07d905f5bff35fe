"""The states of optimizers that step while a step is run on trial."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class OptimizerStates:
    """Context after which each optimizer has the state that it had before it first stepped in it.

    Tensors that were there keep their storages; who runs the step puts their values back.
    """

    def __init__(self) -> None:
        self._known: list[tuple[torch.optim.Optimizer, dict[Any, tuple[Any, dict[str, Any]]]]] = []

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if all(known is not optimizer for known, _ in self._known):
            self._known.append((optimizer, {key: (row, dict(row)) for key, row in optimizer.state.items()}))

    def __enter__(self) -> None:
        self._hook = register_optimizer_step_pre_hook(self._steps)

    def __exit__(self, *_: Any) -> None:
        """Take away what is new, and put back which tensors and numbers there were."""
        self._hook.remove()
        for optimizer, rows in self._known:
            optimizer.state.clear()
            for parameter, (row, values) in rows.items():
                row.clear()
                row.update(values)
                optimizer.state[parameter] = row
