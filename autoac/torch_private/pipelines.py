"""Stages of a pipeline (`torch.distributed.pipelining`)."""

from __future__ import annotations

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
