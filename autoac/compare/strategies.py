"""Manual strategies: checkpoint all or some blocks, fully or with a policy that saves costly ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
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

from autoac_solver.records.profile import Profile

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
    """A way to trade time for memory.

    Args:
        name: unique within a comparison.
        kind: "none", "other" or "ours".
        install: puts it on a model permanently.
        budget_bytes: its budget, 0 if it takes none.
        predicted_peak_bytes, predicted_overhead: its planner's predictions, None if there are none.
        error: why it could not be made, "" if it could.
        compiled: group of strategies that compile the same modules, "" if none is compiled. Gradients are compared with
            those of the first strategy of the group, within the tolerance of `Plan.verify`.
    """

    name: str
    kind: str
    install: Callable[[nn.Module], object] = field(repr=False)
    budget_bytes: int = 0
    predicted_peak_bytes: int | None = None
    predicted_overhead: float | None = None
    error: str = ""
    compiled: str = ""


AGAIN = "none again"
"""The second of two equal strategies: what differs between them is noise."""


def by_hand(
    blocks: Sequence[str],
    policies: Mapping[str, SavePolicy],
    every: Sequence[int] = (2,),
    early_stops: Sequence[bool] = (True,),
) -> list[Strategy]:
    """No checkpointing, twice (the difference is noise), and all strategies that need no planner.

    Args:
        blocks: names of the modules to checkpoint one by one; without any, the strategies have an error.
        policies: policies by name, from `policies_for`.
        every: checkpoint every 2nd, 3rd, ... block.
        early_stops: whether recomputation under a policy ends with the last value that is needed.
    """
    strategies = [Strategy(name, "none", lambda model: model) for name in ("none", AGAIN)]
    strategies.append(_full("full, each block", blocks))
    for k in every:
        chosen = blocks[::k]
        if len(chosen) > 1 or k == 2:
            strategies.append(_full(f"full, every {k}. block", chosen))
    for name, policy in policies.items():
        for early_stop in early_stops:
            stop = "" if len(early_stops) == 1 else ", early stop" if early_stop else ", no early stop"
            contexts = functools.partial(_policy_contexts, policy)
            strategies.append(_full(f"{name}{stop}", blocks, contexts, early_stop))
    return strategies


def _full(
    name: str,
    blocks: Sequence[str],
    context_fn: Callable[[], tuple[Any, Any]] = noop_context_fn,
    early_stop: bool = True,
) -> Strategy:
    install = functools.partial(_checkpoint_blocks, blocks, context_fn=context_fn, early_stop=early_stop)
    error = "" if blocks else "no list of equal blocks was found in this model: name them with --blocks"
    return Strategy(name, "other", install, error=error)


# -- policies ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavePolicy:
    """A policy like torchtitan's: some ops are always saved, some every second time, the others are recomputed."""

    always: tuple[Any, ...]
    every_other: tuple[Any, ...]


def policies_for(profile: Profile, blocks: Sequence[str]) -> dict[str, SavePolicy]:
    """The policies worth trying on a model, by name, judged by the costly ops in its blocks."""
    ran = _ops_in(profile, blocks)
    if ran & _names(CONVOLUTIONS):
        return {
            "save every other convolution": SavePolicy((), (*CONVOLUTIONS, *MATMULS)),
            "save convolutions": SavePolicy(CONVOLUTIONS, MATMULS),
        }
    found = {
        "save attention, every other matmul": SavePolicy(ATTENTION, MATMULS),
        "save attention and matmuls": SavePolicy((*ATTENTION, *MATMULS), ()),
    }
    if ran & _names(BATCHED_MATMULS) and not ran & _names(ATTENTION):
        # Attention with a trained bias, which no fused kernel supports: it consists of batched matmuls.
        every_other = SavePolicy((*ATTENTION, *BATCHED_MATMULS), MATMULS)
        found["save batched matmuls, every other matmul"] = every_other
    return found


def _names(overloads: Sequence[Any]) -> set[str]:
    return {str(overload) for overload in overloads}


def _ops_in(profile: Profile, blocks: Sequence[str]) -> set[str]:
    """Names of the ops that ran in forward inside modules with these names."""
    inside: list[bool] = []
    for call in profile.calls:
        inside.append(call.fqn in blocks or (call.parent >= 0 and inside[call.parent]))
    return {op.name for op in profile.tape if not op.backward and op.module >= 0 and inside[op.module]}


class _CountingPolicy:
    """Applies a `SavePolicy` in one call of one block."""

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
    """Permanently run a module under `torch.utils.checkpoint`, non-reentrant."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if early_stop else set_checkpoint_early_stop(False):
            return checkpoint(inner, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    module.forward = forward
