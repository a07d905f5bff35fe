"""What the rest of autoac asks of an engine that carries plans out."""

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
        model: what the planner knows of it.
        eager_only: whether its regions run as they are written even where the model is compiled, and all compiled
            modules with them, for the bytes are to be those of the record.
        is_policy: whether what a program says can be handed out as a policy of torch's selective checkpointing.
    """

    model: EngineModel
    eager_only: bool
    is_policy: bool

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
            forward: the region's own, without the plan.
            module: whose forward it is.
        """
        ...

    def measure(self, chains: Chains) -> Any:
        """What the bookkeeping takes: of type `model.costs`."""
        ...
