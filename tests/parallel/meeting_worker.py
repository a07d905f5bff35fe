"""One rank of two or four that plans for callable steps, which wait for the other ranks in ways that only they know.

Each case is a process of its own for each rank, forked after torch was imported and a step was recorded, for that takes
longest. They run at the same time, for what takes longest after that is to wait.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import context
import split
import torch
import torch.distributed as dist
from cases import error_of
from models import batch, make, sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard  # noqa: F401  (imported before the fork)

import autoac
from autoac.ranks import all_or_none as ranks

PATIENCE_S = 3.0
TOO_LITTLE = 1000
FOR_FOUR = {"in_two_groups_of_two"}


def planned(model: Any, sample: Any, budget: int | str = "1GB") -> dict[str, Any]:
    """What came of planning, and when."""
    return told_of(lambda: autoac.plan(model, sample, budget))


def told_of(act: Callable[[], object]) -> dict[str, Any]:
    words = error_of(act)
    return {"error": words, "over": time.time()}


def reducing(model: Any, *groups: Any) -> Callable[[], None]:
    """A step that reduces gradients by hand, as it comes to their parameters."""

    def step() -> None:
        model(batch()).backward()
        for group in groups or (None,):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)

    return step


def raises(*_: object) -> None:
    raise ValueError("it is broken here")


def breaks(module: torch.nn.Module) -> None:
    module.register_forward_hook(raises)


def in_the_ring(rank: int) -> Any:
    """After the exchanges of one layer, before those of the next: context parallelism."""
    if importlib.util.find_spec("torch.distributed.tensor.experimental._context_parallel") is None:
        return None
    context.enable_on_cpu()
    model = split.make()
    if rank == 1:
        breaks(model.layers[1].norm)

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    mesh = init_device_mesh("cpu", (2,))
    return [planned(model, context.step_of(model, mesh, split.ids(), split.ids(1), loss))]


def before_it_reduces(rank: int) -> Any:
    """Before this rank has met the other one."""
    model = make()
    if rank == 1:
        breaks(model.head)
    return [planned(model, reducing(model))]


def before_it_receives(rank: int) -> Any:
    """gloo's receive has no time limit of its own."""
    model = make()

    def step() -> None:
        model(batch()).backward()
        if rank == 1:
            raises()
        dist.recv(torch.empty(1), 1)

    return [planned(model, step)]


def with_one_that_dies(rank: int) -> Any:
    """In its first step."""
    model = make()

    def die(*_: object) -> None:
        told_in(with_one_that_dies, rank).write_text("[]")
        os._exit(1)

    if rank == 1:
        model.head.register_forward_hook(die)
    return [planned(model, reducing(model))]


def sharded_by_fsdp(rank: int) -> Any:
    model = sharded(make())
    if rank == 1:
        breaks(model.pair)
    return [planned(model, lambda: model(batch()).backward())]


def sharded_and_profiled(rank: int) -> Any:
    """With the model's input as sample: no step of the caller's own tells the ranks of each other."""
    model = sharded(make())
    if rank == 1:
        breaks(model.pair)
    return [told_of(lambda: autoac.profile(model, batch()))]


def sharded_and_verified(rank: int) -> Any:
    model = sharded(make())
    plan = autoac.plan(model, batch(), "1GB")
    if rank == 1:
        breaks(model.pair)
    return [told_of(lambda: plan.verify(model, batch()))]


def sharded_and_at_odds(rank: int) -> Any:
    model = sharded(make())
    plan = autoac.plan(model, batch(), "1GB")
    return [told_of(lambda: plan.verify(model, batch(), steps=1 + rank))]


def sharded_and_slow(rank: int) -> Any:
    """A rank comes late, and another one is slow in the middle of its step: both are waited for."""
    model, waits = sharded(make()), [2 * PATIENCE_S] if rank == 1 else []
    model.pair.register_forward_pre_hook(lambda *_: time.sleep(waits.pop() if waits else 0))
    time.sleep(1.5 * PATIENCE_S if rank == 1 else 0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = planned(model, batch())
    return [{**found, "warned": [str(warning.message) for warning in warned]}]


def sharded_and_not_there(rank: int) -> Any:
    """A rank does something else for longer than the process group waits."""
    model = sharded(make())
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=2 * PATIENCE_S))
    time.sleep(3 * PATIENCE_S if rank == 1 else 0)
    return [planned(model, batch())]


def in_two_groups_of_two(rank: int) -> Any:
    """Rank 0 meets ranks 1 and 2, and never rank 3, which fails."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    model = make()
    step = reducing(model, mesh["columns"].get_group(), mesh["rows"].get_group())
    return [planned(model, step, TOO_LITTLE if rank == 3 else "1GB"), planned(model, step)]


def one_after_another(rank: int) -> Any:
    """Plans that one rank makes alone are no concern of the other one, nor are failures of earlier plans."""
    model = make()
    alone, both = (lambda: model(batch()).backward()), reducing(model)
    found = [planned(model, alone, TOO_LITTLE), planned(model, alone)] if rank == 0 else [{}, {}]
    found.append(planned(model, both, TOO_LITTLE if rank == 1 else "1GB"))
    if rank == 1:
        found.append(planned(model, alone, TOO_LITTLE))
    found.append(planned(model, both))
    if rank == 1:
        time.sleep(2)  # the other one waits in its step
        found.append(planned(model, raises))
    return [*found, planned(model, both)]


def slow(rank: int) -> Any:
    """It comes late, takes long in its first step, and has not failed."""
    model, waits = make(), [2 * PATIENCE_S] if rank == 1 else []
    step = reducing(model)

    def with_waits() -> None:
        time.sleep(waits.pop() if waits else 0)
        step()

    time.sleep(1.5 * PATIENCE_S if rank == 1 else 0)
    return [planned(model, with_waits)]


CASES: tuple[Callable[[int], Any], ...] = (
    in_the_ring,
    before_it_reduces,
    before_it_receives,
    with_one_that_dies,
    sharded_by_fsdp,
    sharded_and_profiled,
    sharded_and_verified,
    sharded_and_at_odds,
    sharded_and_slow,
    sharded_and_not_there,
    in_two_groups_of_two,
    one_after_another,
    slow,
)


def told_in(case: Callable[[int], Any], rank: int) -> Path:
    return Path(sys.argv[1]).with_name(f"told-{case.__name__}-{rank}")


def run(case: Callable[[int], Any], rank: int, size: int) -> None:
    """One case on one rank. A rank that fails stays, so that no closed connection tells the others."""
    store = Path(sys.argv[1]).with_name(f"store-{case.__name__}")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ranks.PATIENCE_S = PATIENCE_S
    file = told_in(case, rank)
    file.with_suffix(".new").write_text(json.dumps(case(rank)))
    file.with_suffix(".new").rename(file)
    until = time.monotonic() + 100
    while not all(told_in(case, other).exists() for other in range(size)) and time.monotonic() < until:
        time.sleep(0.05)


def main() -> None:
    first = int(os.environ["RANK"])
    autoac.profile(make(), batch())
    children, told = [], {}
    for case in CASES:
        size = 4 if case.__name__ in FOR_FOUR else 2
        own = range(first, size, 2)
        told[case.__name__] = [told_in(case, rank) for rank in own]
        for rank in own:
            child = os.fork()
            if child == 0:
                try:
                    run(case, rank, size)
                finally:
                    os._exit(0)  # without the goodbyes of a job that has lost a rank
            children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found = {
        name: [json.loads(file.read_text()) if file.exists() else None for file in files]
        for name, files in told.items()
    }
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
