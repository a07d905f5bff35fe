"""Private interfaces of `torch.distributed.pipelining`, in one process that is a job of its own."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from autoac import torch_private


def test_calls_that_set_a_stage_up_are_told_from_those_of_its_step():
    from torch.distributed import pipelining

    dist.init_process_group("gloo", store=cast("Any", dist).HashStore(), rank=0, world_size=1)
    try:
        module, calls = nn.Linear(4, 4), []
        module.register_forward_hook(
            lambda *_: calls.append(torch.is_grad_enabled() and not torch_private.in_stage_setup())
        )
        stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
        schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda found, _: found.sum())
        for _ in range(2):
            schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        assert calls == [False, True, True, True, True]
    finally:
        dist.destroy_process_group()
