"""Activation checkpointing for PyTorch under a budget in bytes: the same gradients, the least extra time.

The public names. They are loaded when first asked for, so that `autoac --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoac._version import __version__

if TYPE_CHECKING:
    from autoac import measure, policies
    from autoac.engine.losses import cross_entropy
    from autoac.planner import batch_tradeoff, plan, profile, solve, tradeoff
    from autoac.plans import Plan, Tradeoff
    from autoac_solver.batches import BatchTradeoff
    from autoac_solver.errors import (
        AutoacError,
        BudgetFormatError,
        InfeasibleBudgetError,
        NoPlanInTimeError,
        PlanMismatchError,
        PolicyConflictError,
        PolicyError,
        ProfileError,
        ProfilingError,
    )
    from autoac_solver.policies import Policy
    from autoac_solver.profile import Profile

_HOMES = {
    "plan": "autoac.planner",
    "profile": "autoac.planner",
    "solve": "autoac.planner",
    "tradeoff": "autoac.planner",
    "batch_tradeoff": "autoac.planner",
    "cross_entropy": "autoac.engine.losses",
    "BatchTradeoff": "autoac_solver.batches",
    "Plan": "autoac.plans",
    "Profile": "autoac_solver.profile",
    "Tradeoff": "autoac.plans",
    "AutoacError": "autoac_solver.errors",
    "BudgetFormatError": "autoac_solver.errors",
    "InfeasibleBudgetError": "autoac_solver.errors",
    "NoPlanInTimeError": "autoac_solver.errors",
    "PlanMismatchError": "autoac_solver.errors",
    "Policy": "autoac_solver.policies",
    "PolicyConflictError": "autoac_solver.errors",
    "PolicyError": "autoac_solver.errors",
    "ProfileError": "autoac_solver.errors",
    "ProfilingError": "autoac_solver.errors",
}

_MODULES = ("measure", "policies")

__all__ = [
    "AutoacError",
    "BatchTradeoff",
    "BudgetFormatError",
    "InfeasibleBudgetError",
    "NoPlanInTimeError",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "PolicyConflictError",
    "PolicyError",
    "Profile",
    "ProfileError",
    "ProfilingError",
    "Tradeoff",
    "__version__",
    "batch_tradeoff",
    "cross_entropy",
    "measure",
    "plan",
    "policies",
    "profile",
    "solve",
    "tradeoff",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"autoac.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'autoac' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
