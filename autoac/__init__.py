"""Activation checkpointing for PyTorch under a budget in bytes: the same gradients, the least extra time.

The public names. They are loaded when first asked for, so that `autoac --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from autoac._version import __version__

_HOMES = {
    "plan": "autoac.planner",
    "profile": "autoac.planner",
    "solve": "autoac.planner",
    "tradeoff": "autoac.planner",
    "AutoacError": "autoac_solver.errors",
    "InfeasibleBudgetError": "autoac_solver.errors",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoac' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
