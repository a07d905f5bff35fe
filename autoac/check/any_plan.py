"""The interface of a plan that the checks need."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from autoac_solver.records.plan import PlanRecord


class AnyPlan(Protocol):
    """A plan, as `verify` and the timeline see it."""

    @property
    def record(self) -> PlanRecord: ...
    @property
    def predicted_peak_bytes(self) -> int: ...
    @property
    def predicted_overhead(self) -> float: ...
    @property
    def resident_bytes(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    def applied(self, model: torch.nn.Module) -> Any: ...
    def gradient_at_start(self, tensor: torch.Tensor) -> torch.Tensor | None: ...
