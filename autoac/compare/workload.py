"""The workload of a comparison: a model, a sample and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoac.step.model import unwrapped
from autoac.step.step import Loss, TrainingStep, is_whole_step


@dataclass(frozen=True)
class Workload:
    """A model and one batch for it.

    Args:
        name: short, for files.
        title: description for the table.
        model, sample, loss, optimizer: as for `autoac.plan`. The optimizer's memory counts; its step is not run.
        blocks: names of the modules to checkpoint one by one.
    """

    name: str
    title: str
    model: nn.Module
    sample: Any
    blocks: tuple[str, ...]
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None

    def step(self) -> Callable[[], torch.Tensor | None]:
        """One training step: forward, loss, backward."""
        return TrainingStep(self.model, self.sample, self.loss).run

    @property
    def modules(self) -> nn.Module:
        """The model that strategies are put on: the user's own, even if it is compiled."""
        return unwrapped(self.model)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The sample's tensors; none if it is a callable that runs the step."""
        return TrainingStep(self.model, self.sample, self.loss).inputs

    @property
    def runs_itself(self) -> bool:
        """Whether the sample is a callable that runs a whole step."""
        return is_whole_step(self.sample)
