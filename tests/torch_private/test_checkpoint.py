"""torch's own checkpointing."""

import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac import torch_private


def test_checkpoint_debug_enabled():
    assert torch_private.checkpoint_debug_enabled() is None
    for enabled in (True, False):
        with torch.utils.checkpoint.set_checkpoint_debug_enabled(enabled):
            assert torch_private.checkpoint_debug_enabled() is enabled


def test_is_checkpoint_wrapper():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = torch.nn.Linear(2, 2)
    assert torch_private.is_checkpoint_wrapper(checkpoint_wrapper(inner))
    assert not torch_private.is_checkpoint_wrapper(inner)


def test_has_checkpoint_rule():
    from torch._higher_order_ops.flex_attention import flex_attention

    assert torch_private.has_checkpoint_rule(flex_attention)
    assert not torch_private.has_checkpoint_rule(torch.ops.higher_order.cond)


def test_a_policy_is_asked_once_and_sees_the_result():
    """What `POLICIES_SEE_RESULTS` tells by a parameter's name."""
    seen: list[tuple[bool, bool]] = []

    def policy(context, func, *args, **kwargs):
        if func is torch.ops.aten.sin.default:
            seen.append((context.is_recompute, torch.is_tensor(getattr(context, "op_output", None))))
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch_private.POLICIES_SEE_RESULTS
    assert seen == [(False, True)]


def test_tensors_that_a_policy_keeps_bypass_hooks():
    """On every version, without torch's warning (warnings are errors here)."""
    first, _ = create_selective_checkpoint_contexts(lambda context, op, *_, **__: CheckpointPolicy.MUST_SAVE)
    packed: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: packed.append(tensor), lambda packed: packed
    )
    with hooks, torch_private.bypassing_hooks(first):
        torch.ones(3).sin()
    assert not packed


def test_noting_failures():
    """By overload and number of the calls before that did not raise; not where the policy raises."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.cos.default:
            raise LookupError("the policy")
        return CheckpointPolicy.MUST_SAVE

    first, _ = create_selective_checkpoint_contexts(policy)
    mode, failures = torch_private.noting_failures(first)
    assert type(mode).__name__ == "_CachingTorchDispatchMode"
    x = torch.ones(2, 3)
    with mode:
        x.view(3, 2)
        for shape in ((4,), (5,)):
            with pytest.raises(RuntimeError, match="invalid for input of size"):
                x.view(shape)
        x.view(6)
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            x.view(7)
        with pytest.raises(LookupError):
            x.cos()
    assert failures == {(torch.ops.aten.view.default, 1): 2, (torch.ops.aten.view.default, 2): 1}
