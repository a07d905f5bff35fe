"""One rank: engine compile, in plans and in loops, and what came of each. A case that raises tells its error."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases import error_of, run_cases
from models import WIDTH, Block, batch, make, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoac
from autoac.calibrate.compiled import table
from autoac.measure import measure_peak

CASES: dict[str, Callable[[int], Any]] = {}
FRACTIONS = 0.95, 0.85
"""Budgets, as shares of the peak with nothing recomputed."""


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[function.__name__] = function
    return function


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: Any = tensor
    return found.full_tensor() if hasattr(found, "full_tensor") else tensor


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).backward()
    found = [whole(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return found


def off(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    """The largest difference, relative to the largest element of a tensor."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(first, second, strict=True))


def measured_compiled(plan: autoac.Plan) -> list[str]:
    """The modules of whose calls compiled points were measured, which a plan then takes where they are faster."""
    profile = plan.record.profile
    assert profile.compiled is not None
    calls = [call for region in profile.compiled.regions if region.points for call in region.calls]
    return sorted(profile.module_name(call) for call in calls)


def planned(spread: Callable[[Any], Any], rank: int, rows: int = 128, **options: Any) -> list[dict[str, Any]]:
    """Plans at some budgets, and steps under them."""
    x = batch(rank, rows)
    plain = gradients(spread(make()), x)
    loose = autoac.plan(spread(make()), (x,), 10**9, engine="compile", **options)
    found = []
    for fraction in FRACTIONS:
        model = spread(make())
        budget = int(fraction * loose.predicted_peak_bytes)
        plan = autoac.plan(model, (x,), budget, engine="compile", **options)
        plan.apply(model)
        # DDP makes its buckets anew in its second step.
        step_off = max(off(gradients(model, x), plain) for _ in range(3))
        peak_bytes = measure_peak(lambda model=model: model(x).backward()).peak_above_start_bytes
        model.zero_grad()
        found.append(
            {
                "id": plan.program_id,
                "budget": budget,
                "predicted": plan.predicted_peak_bytes,
                "measured": plan.resident_bytes + peak_bytes,
                "off": step_off,
                "compiled": measured_compiled(plan),
                "sample": plan.record.profile.sample,
            }
        )
        plan.remove(model)
    return found


@case
def ddp(rank: int) -> Any:
    return planned(DistributedDataParallel, rank)


@case
def ddp_with_gradients_in_buckets(rank: int) -> Any:
    return planned(functools.partial(DistributedDataParallel, gradient_as_bucket_view=True), rank)


@case
def fsdp(rank: int) -> Any:
    return planned(sharded, rank)


@case
def sizes_differ(rank: int) -> Any:
    return planned(sharded, rank, rows=64 * (rank + 1))


class Classifier(nn.Module):
    """Blocks, then a tail: a head and a loss."""

    CLASSES = 1024

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, self.CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), target)


@case
def tails(rank: int) -> Any:
    """Of a model whose blocks are units of FSDP2; then its head is one, too."""
    x = batch(rank)
    target = torch.arange(len(x)) % Classifier.CLASSES
    found = {}
    for name in ("blocks", "head"):
        torch.manual_seed(0)
        model: Any = Classifier()
        for unit in (*model.layers, *([model.head] if name == "head" else [])):
            fully_shard(unit)
        fully_shard(model)
        plan = autoac.plan(model, (x, target), "10MB", engine="compile")
        plan.apply(model)
        model(x, target).backward()
        model.zero_grad()
        peak_bytes = measure_peak(lambda model=model: model(x, target).backward()).peak_above_start_bytes
        found[name] = {
            "compiled": measured_compiled(plan),
            "predicted": plan.predicted_peak_bytes,
            "measured": plan.resident_bytes + peak_bytes,
            "budget": plan.budget_bytes,
            "notes": "\n".join(plan.record.profile.notes),
        }
    return found


@case
def errors(rank: int) -> Any:
    x, model = batch(rank), sharded(make())
    return {
        "infeasible": error_of(lambda: autoac.plan(model, (x,), "100KB", engine="compile")),
        "engines": error_of(lambda: autoac.plan(model, (x,), "10MB", engine="compile" if rank else "replay")),
        "absent": error_of(
            lambda: autoac.plan(make(), (x,), "10MB", engine="compile", parallel=autoac.parallel.FSDP2(4))
        ),
        "samples": error_of(
            lambda: autoac.plan(model, autoac.Samples([(x,), (x[:8],)]), "10MB", engine="compile")
        ),
        "then": autoac.plan(model, (x,), "10MB", engine="compile").engine,  # the model is as it was
    }


@case
def chosen(rank: int) -> Any:
    """The engine that is taken for compiled models, with the reason."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    x = batch(rank)
    blocks = make()
    for block in (*blocks.layers, *blocks.pair):
        block.compile()
    split: Any = make()
    mesh = init_device_mesh("cpu", (2,))
    for block in (*split.layers, *split.pair):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    models = {
        "around": torch.compile(DistributedDataParallel(make())),
        "inside": DistributedDataParallel(torch.compile(make())),
        "blocks": sharded(blocks),
        "split": torch.compile(split),
    }
    found = {}
    for name, model in models.items():
        plan = autoac.plan(model, (batch(0) if name == "split" else x,), "10MB")
        found[name] = plan.engine, plan.record.engine_reason
    return found


def loop(
    model: Any,
    batches: Sequence[torch.Tensor],
    budget: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A user's loop with engine compile; "measured" is the peak of the last step, "judged" whether one was measured."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = None
    if budget is not None:
        handle = autoac.auto(model, budget, optimizer=optimizer, engine="compile", **options)
    ids, judged, peak_bytes = [], False, 0

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    for index, x in enumerate(batches):
        if index < len(batches) - 1:
            step(x)
        else:
            optimizer.zero_grad()
            peak_bytes = measure_peak(lambda x=x: step(x)).peak_above_start_bytes
        ids.append(None if handle is None or handle.plan is None else handle.plan.program_id)
        judged |= handle is not None and handle.measured_peak_bytes is not None
    optimizer.zero_grad()
    found: dict[str, Any] = {"weights": [whole(p).detach().clone() for p in model.parameters()], "ids": ids}
    if handle is not None and (plan := handle.plan) is not None:
        found |= {"predicted": plan.predicted_peak_bytes, "measured": plan.resident_bytes + peak_bytes}
        found |= {"sample": plan.record.profile.sample, "judged": judged}
        found["equal"] = None if handle.report is None else handle.report.equal
        handle.remove()
    return found


def compared(spread: Callable[[Any], Any], batches: Sequence[torch.Tensor], **options: Any) -> dict[str, Any]:
    plain = loop(spread(make()), batches)
    loose = loop(spread(make()), batches[:4], 10**9)
    budget = int(FRACTIONS[1] * loose["predicted"])
    model = spread(make())
    found = loop(model, batches, budget, **options)
    found["off"] = off(found.pop("weights"), plain["weights"])
    found["clean"] = not any("forward" in vars(module) for module in model.modules())
    return {"budget": budget, **found}


@case
def loop_of_ddp(rank: int) -> Any:
    return compared(DistributedDataParallel, [batch(rank + 10 * step) for step in range(7)])


@case
def loop_of_fsdp(rank: int) -> Any:
    return compared(sharded, [batch(rank + 10 * step) for step in range(7)])


@case
def loop_that_is_sharded_later(rank: int) -> Any:
    """The model is sharded after `autoac.auto` was called: the ranks meet in the loop."""
    model = make()
    handle = autoac.auto(model, 10**9, engine="compile")
    sharded(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        model(batch(rank + 10 * step)).backward()
        optimizer.step()
    plan = handle.plan
    handle.remove()
    assert plan is not None
    return plan.program_id, plan.engine, plan.predicted_peak_bytes, handle.measured_peak_bytes


@case
def loop_whose_points_take_more_than_measured(rank: int) -> Any:
    """On one rank, so its first planned step is off, and all ranks plan anew."""
    real = table.measured_points

    def wrong(*args: Any) -> Any:
        return tuple(
            replace(point, backward_bytes=point.backward_bytes // 2, forward_bytes=0) for point in real(*args)
        )

    batches = [batch(rank + 10 * step) for step in range(12)]
    with (
        patch.object(table, "measured_points", wrong),
        patch.object(table.PointsOnDisk, "read", lambda self: None),
        patch.object(table.PointsOnDisk, "write", lambda self, points: None),
    ):
        return compared(sharded, batches)


@case
def loop_of_uneven_ranks(rank: int) -> Any:
    """Rank 0's step takes a little less than the plan predicts, which must not loosen it for rank 1."""
    return compared(sharded, [batch(rank + 10 * step, rows=126 + 2 * rank) for step in range(12)])


@case
def planned_within_a_step(rank: int) -> Any:
    """Between two micro-batches, of which only the second reduces gradients: refused, and the step goes on."""
    found, refused = [], ""
    for plans in (False, True):
        model: Any = sharded(make())
        model.set_requires_gradient_sync(False)
        model(batch(rank)).backward()
        if plans:
            refused = error_of(lambda model=model: autoac.plan(model, (batch(rank),), "10MB"))
        model.set_requires_gradient_sync(True)
        model(batch(rank + 2)).backward()
        found.append([whole(p.grad) for p in model.parameters()])
    return refused, all(map(torch.equal, *found))


@case
def loop_with_gradients_reduced_later(rank: int) -> Any:
    """Two micro-batches, of which the second reduces: no parameter has a gradient between them."""
    model: Any = sharded(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, 10**9, optimizer=optimizer, engine="compile")
    for step in range(6):
        optimizer.zero_grad()
        for reduces in (False, True):
            model.set_requires_gradient_sync(reduces)
            (model(batch(rank + 10 * step + reduces)) / 2).backward()
        optimizer.step()
    plan, peak_bytes = handle.plan, handle.measured_peak_bytes
    handle.remove()
    assert plan is not None
    return plan.record.profile.n_root_calls, plan.predicted_peak_bytes, peak_bytes


@case
def restart(rank: int) -> Any:
    """With the plan of the first run, verified; DDP makes its buckets anew in the second step."""
    found: dict[str, Any] = {}
    batches = [batch(rank + 10 * step) for step in range(8)]
    for name, spread in (("ddp", DistributedDataParallel), ("fsdp", sharded)):
        path = Path(sys.argv[1]).parent / f"{name}.json"
        first = loop(spread(make()), batches, 10**9, path=path)
        dist.barrier()
        again = loop(spread(make()), batches, 10**9, path=path, verify=True)
        found[name] = first["ids"][-1], again["ids"], again["equal"], again["measured"], again["predicted"]
    return found


class Repeated(nn.Module):
    """Calls its blocks as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        return x.square().mean()


@case
def calls_differ(rank: int) -> Any:
    """One unit, whose blocks are called twice on one rank and three times on the other."""
    model: Any = fully_shard(Repeated())
    return autoac.plan(model, (batch(rank), 2 + rank), "10MB", engine="compile").program_id


@case
def one_rank_runs_out_of_memory(rank: int) -> Any:
    def fails(*args: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    model: Any = torch.compile(DistributedDataParallel(make()))
    with patch("autoac.calibrate.compiled.tried.peak_with", fails) if rank else nullcontext():
        plan = autoac.plan(model, (batch(rank),), "10MB")
        error = error_of(
            lambda: autoac.plan(DistributedDataParallel(make()), (batch(rank),), "10MB", engine="compile")
        )
    return plan.engine, plan.record.engine_reason, error


@case
def loop_with_a_larger_batch(rank: int) -> Any:
    """Rank 1 meets it in the fifth step; all record again. Then batches become smaller."""
    found = []
    for smaller in (0, 1):
        rows = [128] * 4 + [192 if rank else 128] + [127 - smaller * step for step in range(10)]
        batches = [batch(rank + 10 * step, rows=n) for step, n in enumerate(rows)]
        found.append(loop(sharded(make()), batches, 10**9, on_larger="replan")["ids"])
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    table.MOST_COMPILED = 3
    only = sys.argv[2:]
    run_cases({name: functools.partial(run, rank) for name, run in CASES.items() if not only or name in only})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
