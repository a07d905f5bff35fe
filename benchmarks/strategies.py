"""What people do by hand today: checkpoint blocks, all or some, whole or with a policy that saves costly ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from benchmarks.models import Workload

aten = torch.ops.aten

MATMULS = (aten.mm.default, aten.addmm.default)
BATCHED_MATMULS = (aten.bmm.default, aten.baddbmm.default)
CONVOLUTIONS = (aten.convolution.default,)
ATTENTION = (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)


@dataclass(frozen=True)
class Strategy:
    """A way to spend time on memory.

    Args:
        name: unique within a benchmark.
        kind: "none", "other" or "ours".
        install: puts it on a model for good.
        budget_bytes: what it was asked to fit, 0 if it takes no budget.
        predicted_peak_bytes, predicted_overhead: what its planner says, None if nobody says anything.
        error: why it could not be made, "" if it could.
    """

    name: str
    kind: str
    install: Callable[[nn.Module], object] = field(repr=False)
    budget_bytes: int = 0
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    error: str = ""


def by_hand(workload: Workload) -> list[Strategy]:
    """No checkpointing, twice (the difference is noise), and everything that needs no planner."""
    blocks = workload.blocks
    strategies = [Strategy(name, "none", lambda model: model) for name in ("none", "none again")]
    strategies.append(Strategy("full, each block", "other", functools.partial(_checkpoint_blocks, blocks)))
    for k in (2, 3, 4):
        chosen = blocks[::k]
        if len(chosen) > 1 or k == 2:
            install = functools.partial(_checkpoint_blocks, chosen)
            strategies.append(Strategy(f"full, every {k}. block", "other", install))
    for name, policy in policies(workload.name).items():
        for early_stop in (True, False):
            contexts = functools.partial(_policy_contexts, policy)
            install = functools.partial(
                _checkpoint_blocks, blocks, context_fn=contexts, early_stop=early_stop
            )
            stop = "early stop" if early_stop else "no early stop"
            strategies.append(Strategy(f"{name}, {stop}", "other", install))
    return strategies


# -- policies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavePolicy:
    """A policy as torchtitan's: some ops are always saved, of some every other one, the rest is recomputed."""

    always: tuple[Any, ...]
    every_other: tuple[Any, ...]


def policies(model: str) -> dict[str, SavePolicy]:
    """The policies worth trying on a model, by name."""
    if model == "resnet":
        return {
            "save every other convolution": SavePolicy((), (*CONVOLUTIONS, *MATMULS)),
            "save convolutions": SavePolicy(CONVOLUTIONS, MATMULS),
        }
    found = {"save attention, every other matmul": SavePolicy(ATTENTION, MATMULS)}
    if (
        model == "t5"
    ):  # its attention has a trained bias, which no fused kernel takes: it is made of batched matmuls
        found["save batched matmuls, every other matmul"] = SavePolicy(
            (*ATTENTION, *BATCHED_MATMULS), MATMULS
        )
    return found


class _CountingPolicy:
    """A `SavePolicy` at work in one call of one block."""

    def __init__(self, policy: SavePolicy) -> None:
        self.policy = policy
        self.counts = {False: 0, True: 0}  # by whether it is the second run

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in self.policy.always:
            return CheckpointPolicy.MUST_SAVE
        if func in self.policy.every_other:
            self.counts[ctx.is_recompute] += 1
            if self.counts[ctx.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _policy_contexts(policy: SavePolicy) -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_CountingPolicy(policy))


# -- installing --------------------------------------------------------------------------------------------------


def _checkpoint_blocks(
    names: Sequence[str],
    model: nn.Module,
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    early_stop: bool = True,
) -> None:
    for name in names:
        checkpoint_module(model.get_submodule(name), context_fn, early_stop)


def checkpoint_module(
    module: nn.Module, context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn, early_stop: bool = True
) -> None:
    """Run a module under `torch.utils.checkpoint`, non-reentrant, for good."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if early_stop else set_checkpoint_early_stop(False):
            return checkpoint(inner, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    module.forward = forward
