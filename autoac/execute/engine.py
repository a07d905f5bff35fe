"""Interface of the engines that carry plans out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from autoac.execute.chains import Chains
from autoac.execute.program import Program
from autoac_solver.build.engines import EngineModel


class Engine(Protocol):
    """One engine on torch's side; `execute.engines` has them all.

    Attributes:
        model: the planner's model of the engine.
        eager_only: whether its regions, and with them all compiled modules, run eagerly even if the model is compiled,
            so that memory is as recorded.
        is_policy: whether its programs can be expressed as policies of torch's selective checkpointing.
        refused: why the torch of this process cannot run it; empty if it can.
    """

    model: EngineModel
    eager_only: bool
    is_policy: bool
    refused: str

    def run(
        self,
        program: Program,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module,
    ) -> Any:
        """Run one call of a region. An engine that runs its code twice does so in the contexts of `running`.

        Args:
            forward: the region's original forward, without the plan.
            module: the region's module.
        """
        ...

    def measure(self, chains: Chains) -> Any:
        """Measure the cost of the bookkeeping; returns a `model.costs`."""
        ...
