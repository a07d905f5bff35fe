"""Engine compile: how a compiled region runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from autoac.execute.chains import Chains
from autoac.execute.compiled.code import compiled
from autoac.execute.program import Program
from autoac.execute.replay.engine import ReplayEngine
from autoac.step.inputs import described
from autoac.torch_private import hooked_inside, is_recompile_limit
from autoac_solver.build.engines import engine_model
from autoac_solver.build.engines.compile import CompileCosts
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.engines import COMPILE


class CompileEngine:
    """See `Engine`. Modules that the user has compiled run eagerly, because the regions are compiled.

    Regions that cannot be compiled have no point: engine replay runs them.
    """

    model = engine_model(COMPILE)
    eager_only = True
    is_policy = False
    refused = ""

    def __init__(self) -> None:
        self._replay = ReplayEngine()

    def run(
        self,
        program: Program,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module,
    ) -> Any:
        if program.point == EAGER:
            return self._replay.run(program, forward, args, kwargs, module)
        if torch.compiler.is_compiling():  # an outer torch.compile traces it: the point would be lost
            return forward(*args, **kwargs)
        if hooked := hooked_inside(module):
            why = (
                f"has hooks on module {hooked!r} since it was planned, which compiled code may not run, so it runs "
                "uncompiled: the budget may not hold. Plan again with the hooks."
            )
        else:
            try:
                return self._code(program, args, kwargs, module)(module, args, kwargs)
            except Exception as error:
                if not is_recompile_limit(error):
                    raise
            why = (
                "was called with more kinds of arguments than torch compiles code for, so it runs uncompiled for this "
                "one: the budget may not hold. Pad batches to a few lengths, or raise torch.compiler's recompile limit."
            )
        if not program.warned:
            program.warned = True
            warnings.warn(f"region {program.region!r} {why}", stacklevel=2)
        return forward(*args, **kwargs)

    @staticmethod
    def _code(
        program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], module: torch.nn.Module
    ) -> Callable[..., Any]:
        """The compiled code for these arguments."""
        others = bool(program.inputs) and described(args, kwargs) != program.inputs
        return compiled(type(module), program.point, program.inputs, others)

    def measure(self, chains: Chains) -> CompileCosts:
        return CompileCosts()
