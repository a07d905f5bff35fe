"""Strategies for compiled models: torch's own memory budget, and checkpoints around compiled blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

import autoac
from autoac.compare.strategies import Strategy
from autoac.execute.compiled.code import compiled
from autoac.plans import Plan
from autoac.step.inputs import described
from autoac_solver.plan.recorded.programs import region_calls, with_regions
from autoac_solver.records.compiled import TORCHS
from autoac_solver.records.engines import COMPILE
from autoac_solver.records.profile import Profile

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Values of `torch._functorch.config.activation_memory_budget`; 1 is the default of `torch.compile`."""

ALL = "all blocks"
"""Of strategies that compile each block that can be compiled."""

TORCHS_BUDGET = "torch.compile, budget "
CHECKPOINTED = "torch.compile, each block checkpointed"


def by_torch(profile: Profile, fractions: Sequence[float] = FRACTIONS) -> list[Strategy]:
    """The regions compiled for a profile, at torch's own budgets, and under its checkpoint.

    Args:
        fractions: 1 is the first, because gradients of compiled code are compared with those of the first strategy.
    """
    plan = autoac.solve(profile, 10**15, engine=COMPILE)
    table = profile.compiled
    assert table is not None
    measured = [call for region in table.regions if region.points for call in region.calls]
    names = list(dict.fromkeys(profile.calls[call].fqn for call in measured if call < len(profile.calls)))
    found = [
        Strategy(f"{TORCHS_BUDGET}{fraction:g}", "other", at_fraction(plan, fraction).apply, compiled=ALL)
        for fraction in fractions
    ]
    install = functools.partial(checkpoint_compiled, names)
    return [*found, Strategy(CHECKPOINTED, "other", install, compiled=ALL)]


def at_fraction(plan: Plan, fraction: float, slower: bool = True) -> Plan:
    """A plan with all regions that can be compiled compiled at torch's own budget; it has no valid predictions.

    Args:
        slower: also those that plans leave uncompiled, because that is faster.
    """
    point = f"torch:{fraction:g}"
    table = plan.record.profile.compiled
    assert table is not None
    found = (region for region in table.regions if region.points and (slower or not region.failure))
    compiled_calls = {call for region in found for call in region.calls}
    calls = zip(plan.record.regions, region_calls(plan.record), strict=True)
    regions = (
        dataclasses.replace(region, wrapped=True, point=point) if call in compiled_calls else region
        for region, call in calls
    )
    return Plan(with_regions(plan.record, tuple(regions)))


def checkpoint_compiled(names: Sequence[str], model: nn.Module) -> None:
    """Permanently run modules compiled as torch does by default, under its checkpoint."""
    for name in names:
        module = model.get_submodule(name)

        def forward(*args: Any, module: nn.Module = module, **kwargs: Any) -> Any:
            run = compiled(type(module), TORCHS, described(args, kwargs))
            return checkpoint(run, module, args, kwargs, use_reentrant=False)

        module.__dict__["forward"] = forward
