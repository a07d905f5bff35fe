"""torch's own activation checkpointing."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from typing import Any

import torch._ops
import torch.utils.checkpoint
from torch.utils.checkpoint import SAC_IGNORED_OPS

from autoac.torch_private.dispatch import on_fake_tensors
from autoac.torch_private.distributed import is_sharded_type, is_wait, is_wrap

POLICIES_SEE_RESULTS = (
    "op_output" in inspect.signature(torch.utils.checkpoint.SelectiveCheckpointContext).parameters
)
"""Whether selective checkpointing asks its policy once, in forward and with the op's result, as engine sac needs it.

Source: `SelectiveCheckpointContext` in torch/utils/checkpoint.py.
"""


def checkpoint_debug_enabled() -> bool | None:
    """The value that `torch.utils.checkpoint.set_checkpoint_debug_enabled` has set; None if it was not called.

    Source: `_checkpoint_debug_enabled` in torch/utils/checkpoint.py.
    """
    return torch.utils.checkpoint._checkpoint_debug_enabled


def is_checkpoint_wrapper(module: torch.nn.Module) -> bool:
    """Whether this module runs another one under torch's checkpoint, as trainers' options for FSDP have it.

    Source: `CheckpointWrapper` in torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py; without that module
    loaded there is none.
    """
    there = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return there is not None and isinstance(module, there.CheckpointWrapper)


def has_checkpoint_rule(op: Any) -> bool:
    """Whether selective checkpointing can run this higher-order op; its error is "There was no rule registered".

    Source: `python_key_table` of `HigherOrderOperator.dispatch` (torch/_ops.py), which `redirect_to_mode` fills, and
    `_CachingTorchDispatchMode` in torch/utils/checkpoint.py.
    """
    mode = torch.utils.checkpoint._CachingTorchDispatchMode
    return mode in op.python_key_table or mode.supports_higher_order_operators


def bypassing_hooks(mode: Any) -> Any:
    """Let selective checkpointing's first mode keep tensors without passing them to saved-tensor hooks.

    Before torch 2.14 it has no other behavior. Newer versions do the same by default, with a warning.

    Source: `respect_saved_tensors_hooks` of `_CachingTorchDispatchMode` in torch/utils/checkpoint.py, which
    `_checkpoint_without_reentrant_generator` sets on a mode that is not wrapped.
    """
    mode.respect_saved_tensors_hooks = False
    return mode


def noting_failures(mode: Any) -> tuple[Any, Counter[tuple[Any, int]]]:
    """Let selective checkpointing's first mode note the ops that raise, which the region's code may catch.

    Returns:
        The mode, and what it notes: how often (overload, n-th call of those that do not raise) raised before it ran.
        Without higher-order ops, which torch may count by more than their overload.

    Source: `func_counter` of `_CachingTorchDispatchMode` in torch/utils/checkpoint.py: it rises once an op has run,
    before the policy is asked.
    """
    mode.__class__ = _noting_failures(type(mode))
    mode.failures = Counter()
    return mode, mode.failures


@functools.cache
def _noting_failures(kind: Any) -> Any:
    class NotingFailures(kind):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            done = self.func_counter[func]
            try:
                return super().__torch_dispatch__(func, types, args, kwargs)
            except BaseException:
                is_counted = isinstance(func, torch._ops.OpOverload) and func not in SAC_IGNORED_OPS
                if is_counted and self.func_counter[func] == done:  # else the policy has raised
                    self.failures[func, done] += 1
                raise

    return _named_as(kind, NotingFailures)


def _named_as(kind: Any, own: Any) -> Any:
    for said in ("__name__", "__qualname__", "__module__"):  # torch's errors name their mode
        setattr(own, said, getattr(kind, said))
    return own


def on_local_parts(mode: Any) -> Any:
    """Let one of selective checkpointing's modes see the local ops and collectives of an op on sharded tensors.

    By default it sees the op itself, with the collectives in it, and could only rerun or save all of it together.

    Source: `_CachingTorchDispatchMode`, `_CachedTorchDispatchMode` (torch/utils/checkpoint.py), which
    `create_selective_checkpoint_contexts` returns.
    """
    mode.__class__ = _on_local_parts(type(mode))
    return mode


@functools.cache
def _on_local_parts(kind: Any) -> Any:
    class OnLocalParts(kind):
        meets_shards = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(map(is_sharded_type, types)):
                self.meets_shards = True
                return NotImplemented
            if self.meets_shards and on_fake_tensors():
                return func(*args, **(kwargs or {}))  # shape inference, done once
            if is_wait(func) or is_wrap(func):
                # Not matched: a second run may have others, and it has its own results of collectives that run again.
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return _named_as(kind, OnLocalParts)
