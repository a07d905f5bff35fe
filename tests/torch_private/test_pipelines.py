"""Private interfaces of `torch.distributed.pipelining`, in one process that is a job of its own."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoac import torch_private


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=cast("Any", dist).HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_calls_that_set_a_stage_up_are_told_from_those_of_its_step():
    from torch.distributed import pipelining

    module, calls = nn.Linear(4, 4), []
    module.register_forward_hook(
        lambda *_: calls.append(torch.is_grad_enabled() and not torch_private.in_stage_setup())
    )
    stage = pipelining.PipelineStage(module, 0, 1, torch.device("cpu"))
    schedule = pipelining.ScheduleGPipe(stage, 2, loss_fn=lambda found, _: found.sum())
    for _ in range(2):
        schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert calls == [False, True, True, True, True]


def test_the_ranks_of_stages(monkeypatch: pytest.MonkeyPatch):
    """Stages that are no more are not asked: their making has failed, or their group was destroyed."""
    from torch.distributed import pipelining

    module = nn.Linear(2, 2)
    stages = [pipelining.PipelineStage(module, 0, 1, torch.device("cpu")) for _ in range(3)]
    assert torch_private.ranks_of_stages(module) is None  # it is alone
    del stages[1].submod
    stages[2].group = cast("Any", "destroyed")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: {None: [0, 1]}[group])
    assert torch_private.ranks_of_stages(module) == (0, 1)
    assert torch_private.ranks_of_stages(nn.Sequential(module)) == (0, 1)
    assert torch_private.ranks_of_stages(nn.Linear(2, 2)) is None
