"""One rank of two, in which one dies: while they plan, in a planned step, where they settle on a plan for a loop; or
raises in a step of a pipeline.

Each case is a process of its own, forked after torch was imported, for that takes longest. They run at the same time,
for what takes longest after that is to wait for the dead.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import ways
from auto_worker import is_clean
from models import batch, make, sharded
from torch.distributed.fsdp import fully_shard  # noqa: F401  (imported before the fork)
from torch.nn.parallel import DistributedDataParallel

import autoac
from autoac.ranks import all_or_none as ranks


def die() -> None:
    """End the process, and tell when."""
    death(running).write_text(repr(time.time()))
    os._exit(1)


running = ""
"""The case of this process."""


def death(case: str) -> Path:
    return Path(sys.argv[1]).with_name(f"death-{case}")


class Dies(torch.autograd.Function):
    """Ends the process in its backward."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grad_outputs: torch.Tensor) -> torch.Tensor:
        die()
        raise AssertionError


def in_planning(rank: int, model: Any) -> None:
    """In the backward of the first recorded step."""
    autoac.plan(model, batch(), "1GB", loss=lambda out: Dies.apply(out) if rank == 1 else out)


def in_forward(rank: int, model: Any) -> None:
    with planned(model):
        if rank == 1:
            model.layers[1].register_forward_hook(lambda *_: die())
        model(batch()).backward()


def in_backward(rank: int, model: Any) -> None:
    with planned(model):
        loss = model(batch())
        (Dies.apply(loss) if rank == 1 else loss).backward()


def before_settling(rank: int, model: Any, dies: int = 1) -> None:
    """Between the first step of a loop and the second, at which the ranks meet; DDP does nothing before that."""
    ranks.PATIENCE_S = 3.0
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoac.auto(model, "1GB", optimizer=optimizer)
    for step in range(2):
        if rank == dies and step == 1:
            die()
        optimizer.zero_grad()
        model(batch()).backward()
        optimizer.step()


def before_settling_rank_0(rank: int, model: Any) -> None:
    """With the one that keeps the store."""
    before_settling(rank, model, dies=0)


def in_a_stage(rank: int, model: Any) -> None:
    """A stage raises, and its process goes on: the other one waits for the gradient of what it has sent."""
    ranks.PATIENCE_S = 3.0
    stage = ways.in_stages("ScheduleGPipe")(make())
    ways.micro_batches(stage, ((batch(),), None))
    broken = stage.part[-1].register_forward_hook(raises) if rank == 1 else None
    try:
        autoac.plan(stage.part, functools.partial(ways.micro_batches, stage, ((batch(),), None)), "1GB")
    except autoac.ParallelError:
        time.sleep(0 if broken is None else 3 * ranks.PATIENCE_S)
        raise


def raises(*_: object) -> None:
    death(running).write_text(repr(time.time()))
    raise ValueError("this stage is broken")


def planned(model: Any) -> Any:
    policies = [autoac.Policy("MUST_RECOMPUTE", op="aten.gelu*")]
    return autoac.plan(model, batch(), "1GB", policies=policies).applied(model)


CASES: tuple[Callable[[int, Any], None], ...] = (
    in_planning,
    in_forward,
    in_backward,
    before_settling,
    before_settling_rank_0,
    in_a_stage,
)


def run(case: Callable[[int, Any], None], path: Path) -> None:
    global running
    running = case.__name__
    rank, store = int(os.environ["RANK"]), f"file://{path.parent}/store-{case.__name__}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    settles = "settling" in case.__name__
    model = make() if settles else sharded(make())
    try:
        case(rank, model)
        words = "no error"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    heard_s = time.time() - float(death(running).read_text())
    told = {"error": words, "seconds": heard_s, "clean": is_clean(model)}
    path.with_suffix(f".{case.__name__}").write_text(json.dumps(told))


def main() -> None:
    path = Path(sys.argv[1])
    children = []
    for case in CASES:
        child = os.fork()
        if child == 0:
            try:
                run(case, path)
            finally:
                os._exit(0)  # without the goodbyes of a job that has lost a rank
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    told = {case.__name__: path.with_suffix(f".{case.__name__}") for case in CASES}
    found = {name: json.loads(file.read_text()) if file.exists() else None for name, file in told.items()}
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
