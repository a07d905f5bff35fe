"""One training step on fake tensors: what its ops are, on CUDA and as autoac has it for CUDA."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from autoac.record.cuda.attention import Capability
from autoac.record.cuda.ops import CudaOps, CudaResults
from autoac.record.fake import fake_model
from autoac.step.step import TrainingStep
from autoac.torch_private import TorchDispatchMode, is_fake, tree_leaves, tree_map_only
from tests import real_models
from tests.cuda_ops import families

_NOT_OPS = ("prim.device", "aten.detach")

DECIDED_BY_MODEL = {"mixtral": {"aten._to_copy", "aten.histc"}}
"""Ops, by family, that the model's own code chooses by its device."""


@dataclass
class Ran:
    """Ops with the types, shapes and strides of their results; and what autograd saved of them, in order."""

    forward: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    saved_bytes: int = 0

    def differences(self, other: Ran) -> Counter[str]:
        """How often each op, or saved tensor, is in one of both only, or has other results."""
        parts = [(self.forward, other.forward), (self.saved, other.saved), (self.backward, other.backward)]
        found: Counter[str] = Counter()
        for mine, theirs in parts:
            one, two = Counter(mine), Counter(theirs)
            found.update(line.split(" ")[0] for line in ((one - two) + (two - one)).elements())
            if not found and mine is not self.saved and mine != theirs:
                found["order"] += (
                    1  # hooks of a function of ours see its tensors later than those of a kernel's node
                )
        return found

    def summary(self, family: str) -> dict[str, Any]:
        """What is kept of it: how often each op runs, all bytes saved, and a digest of all that is compared."""
        left_out = DECIDED_BY_MODEL.get(family, set())
        ops = [line for line in (*self.forward, *self.backward) if line.split(" ")[0] not in left_out]
        digest = hashlib.sha256("\n".join((*ops, *sorted(self.saved))).encode()).hexdigest()[:16]
        counts = Counter(line.split(" ")[0].removeprefix("aten.") for line in ops)
        return {"ops": dict(sorted(counts.items())), "saved_bytes": self.saved_bytes, "digest": digest}


class _Log(TorchDispatchMode):
    def __init__(self, ops: list[str]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removesuffix(".default")
        if name not in _NOT_OPS:
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self.ops.append(" ".join((name, *map(_described, made))))
        return result


def _described(tensor: torch.Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.").replace("uint64", "int64")  # a seed, 8 bytes either way
    return f"{kind}{list(tensor.shape)}{list(tensor.stride())}".replace(" ", "")


def kinds() -> dict[str, tuple[torch.dtype, torch.dtype | None]]:
    """How steps are run: the type of parameters and sample, and that of autocast around forward and loss."""
    return {
        "float32": (torch.float32, None),
        "bfloat16": (torch.bfloat16, None),
        "autocast bfloat16": (torch.float32, torch.bfloat16),
        "autocast float16": (torch.float32, torch.float16),
    }


def run(family: str, kind: str, device: torch.device, as_cuda: Capability | None = None) -> Ran:
    """A step of a family, whose tensors are all fake.

    Args:
        kind: one of `kinds`.
        device: where the fake tensors claim to be.
        as_cuda: with the ops that CUDA takes on such a GPU, as `autoac.record.on_fake` records them.
    """
    dtype, half = kinds()[kind]
    made = real_models.make(family, families.ALL)
    made.model.to(dtype)
    sample = tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, made.sample
    )
    loss = made.loss if made.target is None else _mean_square
    fake = fake_model(TrainingStep(made.model, sample, loss), device)
    ran = Ran()

    def save(tensor: torch.Tensor) -> torch.Tensor:
        ran.saved.append(_described(tensor))
        ran.saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    with fake.mode, contextlib.ExitStack() as stack:
        if as_cuda is not None:
            stack.enter_context(CudaResults())
            stack.enter_context(CudaOps(as_cuda))
        # Whole numbers, too: on CUDA they cannot be real.
        sample = tree_map_only(torch.Tensor, lambda tensor: _faked(tensor, device), fake.step.sample)
        step = fake.step.of(fake.step.model, sample)
        # As a loop on a GPU writes it; where fake CPU tensors stand for CUDA's, it is to have the same effect.
        cast = contextlib.nullcontext() if half is None else torch.autocast("cuda", dtype=half)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor), _Log(ran.forward), cast:
            value = loss(step.forward())
        with _Log(ran.backward):
            value.backward()
    return ran


def _faked(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor if is_fake(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _mean_square(output: Any) -> torch.Tensor:
    return (output if isinstance(output, torch.Tensor) else output[0]).square().mean()
