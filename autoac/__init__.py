"""Activation checkpointing for PyTorch under a budget in bytes: the same gradients, the least extra time.

The public names. They are loaded on first access, so that `autoac --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoac._version import __version__

if TYPE_CHECKING:
    from autoac import measure, parallel, policies
    from autoac.api import batch_tradeoff, plan, plan_buckets, profile, solve, tradeoff
    from autoac.automatic import Auto, auto
    from autoac.buckets import Buckets
    from autoac.execute.cross_entropy.lean import cross_entropy
    from autoac.plans import Plan, Tradeoff
    from autoac.step.samples import Samples
    from autoac_solver.plan.batches import BatchTradeoff
    from autoac_solver.records.errors import (
        AutoacError,
        BudgetFormatError,
        InfeasibleBudgetError,
        NoPlanInTimeError,
        ParallelError,
        PlanMismatchError,
        PolicyConflictError,
        PolicyError,
        ProfileError,
        ProfilingError,
    )
    from autoac_solver.records.policies import Policy
    from autoac_solver.records.profile import Profile

_HOMES = {
    "plan": "autoac.api",
    "profile": "autoac.api",
    "solve": "autoac.api",
    "tradeoff": "autoac.api",
    "batch_tradeoff": "autoac.api",
    "plan_buckets": "autoac.api",
    "auto": "autoac.automatic",
    "Auto": "autoac.automatic",
    "Buckets": "autoac.buckets",
    "cross_entropy": "autoac.execute.cross_entropy.lean",
    "BatchTradeoff": "autoac_solver.plan.batches",
    "Plan": "autoac.plans",
    "Profile": "autoac_solver.show.notebook",  # adds display in notebooks, and peaks
    "Samples": "autoac.step.samples",
    "Tradeoff": "autoac.plans",
    "AutoacError": "autoac_solver.records.errors",
    "BudgetFormatError": "autoac_solver.records.errors",
    "InfeasibleBudgetError": "autoac_solver.records.errors",
    "NoPlanInTimeError": "autoac_solver.records.errors",
    "ParallelError": "autoac_solver.records.errors",
    "PlanMismatchError": "autoac_solver.records.errors",
    "Policy": "autoac_solver.records.policies",
    "PolicyConflictError": "autoac_solver.records.errors",
    "PolicyError": "autoac_solver.records.errors",
    "ProfileError": "autoac_solver.records.errors",
    "ProfilingError": "autoac_solver.records.errors",
}

_MODULES = ("measure", "parallel", "policies")

__all__ = [
    "Auto",
    "AutoacError",
    "BatchTradeoff",
    "Buckets",
    "BudgetFormatError",
    "InfeasibleBudgetError",
    "NoPlanInTimeError",
    "ParallelError",
    "Plan",
    "PlanMismatchError",
    "Policy",
    "PolicyConflictError",
    "PolicyError",
    "Profile",
    "ProfileError",
    "ProfilingError",
    "Samples",
    "Tradeoff",
    "__version__",
    "auto",
    "batch_tradeoff",
    "cross_entropy",
    "measure",
    "parallel",
    "plan",
    "plan_buckets",
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
