"""torch's own planner of selective checkpointing, with which `autoac compare` compares ours."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch

_SAC_TOOLS = {
    "sac_ilp": ("sac_milp", "get_optimal_checkpointing_policy_per_module", "logger"),
    "ilp_utils": ("aggregate_stats", "parse_module_info"),
    "sac_estimator": ("SACEstimator", "OPS_TO_ALWAYS_SKIP"),
    "mem_tracker": ("MemTracker",),
    "runtime_estimator": ("RuntimeEstimator",),
}


@functools.cache
def sac_tools() -> types.SimpleNamespace:
    """torch's own planner of selective checkpointing and its estimators, by name, from `torch.distributed._tools`.

    Source: torch/distributed/_tools.

    Raises:
        ImportError: pwlf, which they need, is not installed, or this torch has no such tools.
    """
    importlib.import_module("pwlf")  # torch would say so late
    found: dict[str, Any] = {}
    for file, names in _SAC_TOOLS.items():
        module = importlib.import_module(f"torch.distributed._tools.{file}")
        found |= {name: getattr(module, name) for name in names}
    return types.SimpleNamespace(**found)


def time_ops_with(
    estimator: Any, timed: Callable[[Any, Any, Any], tuple[Any, float]], device: torch.device
) -> None:
    """Let a `SACEstimator` take op times in ms from a function, except on CUDA, the only device of its own benchmark.

    Source: `SACEstimator._estimate_runtime` in torch/distributed/_tools/sac_estimator.py.
    """
    if device.type != "cuda":
        estimator._estimate_runtime = timed


def time_nothing(estimator: Any) -> None:
    """Let a `RuntimeEstimator` record only the order of modules.

    Source: `RuntimeEstimator._estimate` in torch/distributed/_tools/runtime_estimator.py.
    """
    estimator._estimate = lambda func, args, kwargs: (func(*args, **(kwargs or {})), 0.0)
    estimator._estimate_mode_type = "order only"
