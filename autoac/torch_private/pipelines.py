"""Stages of a pipeline (`torch.distributed.pipelining`)."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch


def in_stage_setup() -> bool:
    """Whether the running forward is a stage's own, before its first step, to find out the shapes of its outputs.

    It is one call more than the step has micro-batches, with gradients enabled since torch 2.13. Such a setup runs
    once for each schedule, so a plan that is applied before it would otherwise count its calls off by one for ever.

    Source: `PipelineStage._forward_metadata_inference` (torch/distributed/pipelining/stage.py); older releases have
    `_shape_inference`, which disables gradients.
    """
    if torch.compiler.is_compiling():
        return False
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None:
        return False
    setup: Any = getattr(stages.PipelineStage, "_forward_metadata_inference", None)
    if setup is None:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is setup.__code__:
            return True
        frame = frame.f_back
    return False


def ranks_of_stages(model: torch.nn.Module) -> tuple[int, ...] | None:
    """The ranks of the pipeline of which this model, or modules of it, are stages; None if it is in none.

    A module does not know its stage, so the stages are looked for among all objects that the garbage collector tracks
    (after `gc.freeze()` none are found).

    Source: `_PipelineStageBase.submod` and `.group`, None for all ranks (torch/distributed/pipelining/stage.py), and
    `_world.pg_map`, which has the groups that are not destroyed.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    distributed = torch.distributed
    if stages is None or not distributed.is_initialized():
        return None
    modules = {id(module) for module in model.modules()}
    kind: type[Any] = stages._PipelineStageBase
    found: set[int] = set()
    for stage in gc.get_objects():
        if not issubclass(type(stage), kind):
            continue
        known = vars(stage)  # without the module where making the stage has failed
        group = known.get("group")
        is_alive = group is None or group in distributed.distributed_c10d._world.pg_map
        if id(known.get("submod")) in modules and is_alive:
            found.update(distributed.get_process_group_ranks(group))
    return tuple(sorted(found)) if len(found) > 1 else None
