"""Finds the first op whose result differs under a plan."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any

import torch

from autoac.check.any_plan import AnyPlan
from autoac.check.equal import bits_of
from autoac.ops.info import op_info, tensors_in, written_tensors
from autoac.step.step import TrainingStep
from autoac.step.trial import OptimizerStates, trial
from autoac.torch_private import DispatchMode, counted_writes, current_node, parts_of


class _Trace(DispatchMode):
    """Mode that records ops with checksums of their results.

    `rows` has a description and a comparison key per op. The key has neither the node nor the overload: in a planned
    model the node of a cross entropy has another name, and writes its result in place.

    Args:
        forward: record forward as well, not only backward.
    """

    supports_higher_order_operators = True

    def __init__(self, forward: bool) -> None:
        super().__init__()
        self.forward = forward
        self.rows: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        info = op_info(func)
        with counted_writes(written_tensors(info, args, kwargs) if info.writes_lists else []):
            result = func(*args, **kwargs)
        node = current_node()
        if not info.ignored and (self.forward or node is not None):
            words = f"forward op {info.name}" if node is None else f"backward op {info.name} in {node.name()}"
            self.rows.append((words, (info.name.rpartition(".")[0], *map(_digest, tensors_in(result)))))
        return result


def _digest(tensor: torch.Tensor) -> bytes:
    digest = hashlib.sha256()
    for part in parts_of(tensor):
        digest.update(bits_of(part).cpu().numpy().tobytes())
    return digest.digest()


_OF_LOSSES = (
    *("NllLossBackward0", "LogSoftmaxBackward0", "_CrossEntropyBackward"),
    *("forward op aten._log_softmax.default", "forward op aten.nll_loss_forward.default"),
)
"""The nodes and ops of cross entropies, torch's and the lean one."""


def first_op(
    step: TrainingStep,
    plan: AnyPlan,
    optimizers: OptimizerStates,
    in_forward: bool,
) -> str:
    """The first op whose result differs, in backward or from forward on, "" if none is found."""
    model, traces = step.model, []
    for planned in (False, True):
        context = plan.applied(model) if planned else nullcontext()
        with (
            trial(model, step.inputs, step.written, gradient=plan.gradient_at_start, optimizers=optimizers),
            context,
            _Trace(in_forward) as trace,
        ):
            step.run()
        traces.append(trace.rows)
    plain, planned_rows = traces
    if in_forward or plan.record.chunked_losses:  # lean losses run other ops, chunked ones on some rows
        plain = [row for row in plain if not row[0].endswith(_OF_LOSSES)]
    remaining = iter([key for _, key in planned_rows])  # with replayed ops, so plain's must be a subsequence
    for words, key in plain:
        if key not in remaining:
            return words
    return ""
