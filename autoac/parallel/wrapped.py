"""Detection of a model's wrappers for several processes."""

from __future__ import annotations

import torch

from autoac.parallel.ddp import DDP
from autoac.parallel.fsdp2 import FSDP2
from autoac.parallel.protocol import Parallel, Plain
from autoac.parallel.tensor import TensorParallel
from autoac.step.units import has_units, holds_shards
from autoac.torch_private import (
    ddp_around,
    is_compiled_wrapper,
    is_ddp,
    is_one_of_several_ranks,
    wrapped_module,
)


def found_on(model: torch.nn.Module) -> Parallel:
    """The parallelism of a model's training, according to its wrappers; `Plain` for one process.

    Args:
        model: as the training loop calls it. For `ddp.module` the buckets of `ddp` count, but the ranks do not plan
            together.
    """
    together = is_one_of_several_ranks()
    while is_compiled_wrapper(model):
        model = wrapped_module(model)
    if not isinstance(model, torch.nn.Module):
        return Plain()  # it is refused elsewhere, with a message of its own
    if is_ddp(model):
        return DDP.of(model, is_here=together)
    if has_units(model):
        return FSDP2(is_here=together)
    if holds_shards(model):
        return TensorParallel(is_here=together)
    ddp = ddp_around(model)
    return Plain() if ddp is None else DDP.of(ddp, is_here=False)


def is_spread(model: torch.nn.Module) -> bool:
    """Whether several processes train this model together, each calling it in step with the others."""
    return is_one_of_several_ranks() and type(found_on(model)) is not Plain
