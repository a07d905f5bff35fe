"""One rank: loops under `autoac.auto`, and what came of each. A case that raises tells its error."""

from __future__ import annotations

import functools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import run_cases
from models import Block, batch, make, sharded
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoac
from autoac.execute.placement import Placement
from autoac.measure import measure_peak
from autoac.ranks import all_or_none
from autoac_solver.records.errors import ParallelError

CASES: dict[str, Callable[[int], Any]] = {}


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[function.__name__] = function
    return function


def weights_of(model: Any) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()
    ]


def loop(
    model: Any,
    batches: Sequence[torch.Tensor],
    budget: int | None = None,
    after: Callable[[int, Any], None] = lambda step, handle: None,
    **options: Any,
) -> dict[str, Any]:
    """A user's loop; "peak" is the least one above a step's start of the last steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = None if budget is None else autoac.auto(model, budget, optimizer=optimizer, **options)
    peaks = []
    for index, x in enumerate(batches):
        optimizer.zero_grad()
        if index < 3:
            model(x).backward()
        else:
            peaks.append(measure_peak(lambda x=x: model(x).backward()).peak_above_start_bytes)
        optimizer.step()
        after(index, handle)
    optimizer.zero_grad()
    found: dict[str, Any] = {"weights": weights_of(model), "peak": min(peaks, default=0)}
    if handle is not None:
        assert handle.plan is not None
        found["plan"] = handle.plan
        handle.remove()
    return found


def compared(
    spread: Callable[[], Any], batches: Sequence[torch.Tensor], share: float = 0.8
) -> dict[str, Any]:
    plain = loop(spread(), batches)
    loose = loop(spread(), batches, 10**9)["plan"]
    budget = int(share * loose.predicted_peak_bytes)
    model = spread()
    planned = loop(model, batches, budget)
    plan = planned["plan"]
    return {
        "equal": all(map(torch.equal, plain["weights"], planned["weights"])),
        "id": plan.program_id,
        "predicted": plan.predicted_peak_bytes,
        "measured": plan.resident_bytes + planned["peak"],
        "budget": budget,
        "recomputing": sum(region.wrapped for region in plan.regions),
        "sample": plan.record.profile.sample,
        "clean": is_clean(model),
    }


def is_clean(model: Any) -> bool:
    """Whether nothing of ours is left on a model."""
    return not any(
        "forward" in vars(module) or any("autoac" in name for name in vars(module))
        for module in model.modules()
    )


@case
def ddp(rank: int) -> Any:
    return compared(lambda: DistributedDataParallel(make()), [batch(rank + 10 * step) for step in range(12)])


@case
def fsdp(rank: int) -> Any:
    return compared(lambda: sharded(make()), [batch(rank + 10 * step) for step in range(12)])


@case
def sizes_differ(rank: int) -> Any:
    return compared(lambda: sharded(make()), [batch(rank, rows=64 * (rank + 1)) for _ in range(12)])


@case
def one_rank_meets_a_larger_batch(rank: int) -> Any:
    """It records by itself, and the others join it in the next step, with the plan that they have on the model."""
    budget = 0
    try:
        loop(sharded(make()), [batch(rank, rows=256)] * 3, 10_000)
    except ParallelError as error:
        budget = error.minimum_bytes
    batches = [batch(rank + 10 * step, rows=256 if (rank, step) == (1, 3) else 128) for step in range(6)]
    samples: list[str | None] = []
    recomputing = 0

    def after(step: int, handle: Any) -> None:
        nonlocal recomputing
        if handle is not None:
            if step == 2:
                recomputing = sum(region.wrapped for region in handle.plan.regions)
            samples.append(handle.known_plan and handle.known_plan.record.profile.sample)

    plain = loop(sharded(make()), batches)
    planned = loop(sharded(make()), batches, budget, after, on_larger="replan")
    return {
        "recomputing": recomputing,
        "equal": all(map(torch.equal, plain["weights"], planned["weights"])),
        "samples": samples,
        "id": planned["plan"].program_id,
    }


@case
def one_rank_refuses_a_larger_batch(rank: int) -> Any:
    """In the fifth step; and in the second, in which the ranks settle on the plan."""
    found = []
    for larger in (4, 1):
        batches = [
            batch(rank + 10 * step, rows=256 if (rank, step) == (1, larger) else 128) for step in range(6)
        ]
        done: list[int] = []
        model, started = sharded(make()), time.monotonic()
        try:
            loop(model, batches, 10**9, lambda step, _, done=done: done.append(step), on_larger="error")
            words = "no error"
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        found.append({"error": words, "seconds": seconds, "steps": len(done)})
    return found


@case
def other_parameters_are_trained(rank: int) -> Any:
    """A smaller step is recorded for these, and the next one is as large as the first: no reason to refuse it."""
    model = DistributedDataParallel(make(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, 10**9, optimizer=optimizer, on_larger="error")
    for step, rows in enumerate((128, 128, 64, 64, 128, 128)):
        model.module.stem.requires_grad_(step < 2)
        optimizer.zero_grad()
        model(batch(rank, rows=rows)).backward()
        optimizer.step()
    return {"sample": handle.plan and handle.plan.record.profile.sample}


@case
def no_plan_fits_what_is_trained_later(rank: int) -> Any:
    """The blocks of a sharded model are unfrozen after some steps; rank 1 has the larger batches."""

    def train(model: Any, handle: Any = None) -> tuple[list[torch.Tensor], list[str | None]]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids = []
        for step in range(6):
            for block in model.layers:
                block.requires_grad_(step > 2)
            model.stem.requires_grad_(step > 2)
            model(batch(rank + 10 * step, rows=128 * (1 + rank))).backward()
            optimizer.step()
            optimizer.zero_grad()
            ids.append(handle and handle.known_plan and handle.known_plan.program_id)
        return weights_of(model), ids

    plain, _ = train(sharded(make()))
    model, budget = sharded(make()), 0
    handle = autoac.auto(model, 1000)
    try:
        train(model, handle)
    except ParallelError as error:
        budget = error.minimum_bytes
    model = sharded(make())
    handle = autoac.auto(model, budget)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        weights, ids = train(model, handle)
    plan = handle.plan
    assert plan is not None
    try:
        autoac.solve(plan.record.profile, 1000)
        least = 0
    except autoac.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    return {
        "equal": all(map(torch.equal, plain, weights)),
        "ids": ids,
        "budget": budget,
        "predicted": plan.predicted_peak_bytes,
        "least": least,
        "warned": [str(w.message) for w in warned if "under any plan" in str(w.message)],
    }


def in_turns(rank: int, each: int, steps: int) -> dict[str, Any]:
    """Halves of a sharded model are trained by turns, for so many steps each; without a plan, and in a loop."""
    found, ids = [], []
    handle: Any = None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for model in (sharded(make()), sharded(make())):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = autoac.auto(model, 10**9, optimizer=optimizer) if found else None
            for step in range(steps):
                is_odd = step // each % 2
                for block in model.layers:
                    block.requires_grad_(not is_odd)
                model.pair.requires_grad_(bool(is_odd))
                model(batch(rank + 10 * step)).backward()
                optimizer.step()
                optimizer.zero_grad()
                ids += [handle.known_plan and handle.known_plan.program_id] if found else []
            found.append(weights_of(model))
    return {
        "equal": all(map(torch.equal, *found)),
        "ids": ids,
        "has_plan": handle.plan is not None,
        "warned": [str(w.message) for w in warned if "change from step to step" in str(w.message)],
    }


@case
def trained_by_turns(rank: int) -> Any:
    """One step each: the plan is for one half, and is put on when that is trained."""
    return in_turns(rank, each=1, steps=9)


@case
def phases(rank: int) -> Any:
    """A phase that comes back begins with its plan."""
    return in_turns(rank, each=3, steps=12)


@case
def gradients_in_buckets_are_cleared_after_the_forward(rank: int) -> Any:
    """The recorded step is the one in which DDP makes its buckets anew."""
    model = DistributedDataParallel(make(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = autoac.auto(model, 10**9, optimizer=optimizer, measure=True)
    for step in range(5):
        loss = model(batch(rank + 10 * step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert handle.plan is not None
    return {"predicted": handle.plan.predicted_peak_bytes, "measured": handle.measured_peak_bytes}


class Routed(torch.nn.Module):
    """Layers through which those rows go whose first element is positive."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x[:, 0] > 0).nonzero().flatten()
        for layer in self.layers:
            x = x.index_add(0, rows, layer(x[rows]))
        return x.square().mean()


@case
def values_decide_on_sizes(rank: int) -> Any:
    """Later steps of rank 1 keep more, by values in them: it records one of these."""
    found = []
    for budget in (None, 10**9, 0):
        model: Any = Routed()
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = None
        if budget is not None:
            if not budget:
                half = torch.tensor((found[1]["first"] + found[1]["peak"]) // 2)
                dist.broadcast(half, 1)
                budget = int(half)
            handle = autoac.auto(model, budget, optimizer=optimizer, measure=True, on_larger="replan")
        first = 0
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for step in range(12):
                x = batch(rank + 10 * step)
                x[:, 0] = torch.where(
                    torch.arange(len(x)) < (100 if rank == 1 and step > 2 else 10), 1.0, -1.0
                )
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
                first = first or (handle and handle.measured_peak_bytes) or 0
        found.append(
            {
                "weights": weights_of(model),
                "budget": budget,
                "first": first,
                "peak": handle and handle.measured_peak_bytes,
                "id": handle and handle.plan and handle.plan.program_id,
                "warned": [str(w.message) for w in warned if "took more than the budget" in str(w.message)],
            }
        )
    plain, _, planned = (one.pop("weights") for one in found)
    return {**found[2], "equal": all(map(torch.equal, plain, planned)), "loose": found[1]["peak"]}


@case
def sharded_later(rank: int) -> Any:
    """The first step is recorded within its first call, for the sake of its peak; the second one is planned for."""
    found: dict[str, Any] = {}
    for order in ("before", "after"):
        model = make()
        handle = autoac.auto(model, 10**9) if order == "before" else None
        sharded(model)
        handle = autoac.auto(model, 10**9) if handle is None else handle
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        peaks, plans = [], []
        for step in range(4):
            x = batch(rank + 10 * step)
            peaks.append(measure_peak(lambda model=model, x=x: model(x).backward()).peak_above_start_bytes)
            optimizer.step()
            optimizer.zero_grad()
            plans.append(handle.plan is not None)
        found[order] = {"peaks": peaks, "plans": plans, "id": handle.plan and handle.plan.program_id}
        found[f"weights {order}"] = weights_of(model)
        handle.remove()
    before, after = found.pop("weights before"), found.pop("weights after")
    return {**found, "equal": all(map(torch.equal, before, after))}


@case
def restarted(rank: int) -> Any:
    """Only rank 0 has the file, and the others take its plan up from it."""
    path = Path(sys.argv[1]).with_name(f"plan-of-{rank}.json")
    batches = [batch(rank + 10 * step) for step in range(3)]
    budget = 1_500_000
    first = loop(sharded(make()), batches, budget, path=path)["plan"]
    has_plan: list[bool] = []
    started = loop(
        sharded(make()),
        batches[:1],
        budget,
        lambda step, handle: has_plan.append(handle.known_plan is not None),
        path=path,
    )["plan"]
    return {
        "files": path.exists(),
        "at_once": has_plan,
        "same": first.program_id == started.program_id,
        "id": started.program_id,
    }


@case
def one_rank_is_late(rank: int) -> Any:
    """It writes a checkpoint, say, after the first step."""
    batches = [batch(rank + 10 * step) for step in range(4)]

    def after(step: int, handle: Any) -> None:
        time.sleep(3.0 if (rank, step) == (1, 0) and handle is not None else 0)

    plain = loop(sharded(make()), batches)
    patience_s, all_or_none.PATIENCE_S = all_or_none.PATIENCE_S, 1.5
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        planned = loop(sharded(make()), batches, 10**9, after)
    all_or_none.PATIENCE_S = patience_s
    return {
        "equal": all(map(torch.equal, plain["weights"], planned["weights"])),
        "id": planned["plan"].program_id,
        "warned": [str(warning.message) for warning in warned],
    }


def failing(model: Any, rank: int, budget: int, **options: Any) -> dict[str, Any]:
    started = time.monotonic()
    try:
        loop(model, [batch(rank)] * 3, budget, **options)
        words = "no error"
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    return {"error": words, "seconds": time.monotonic() - started, "clean": is_clean(model)}


@case
def no_plan_fits(rank: int) -> Any:
    return failing(sharded(make()), rank, 1000)


@case
def budgets_differ(rank: int) -> Any:
    return failing(DistributedDataParallel(make()), rank, 10**9 + rank)


@case
def cannot_be_put_on_one(rank: int) -> Any:
    original = Placement.attach

    def attach(self: Placement, inner: torch.nn.Module) -> None:
        if rank == 1:
            raise MemoryError("rank 1 has none left")
        original(self, inner)

    Placement.attach = attach
    try:
        return failing(sharded(make()), rank, 10**9)
    finally:
        Placement.attach = original


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run_cases({name: functools.partial(function, rank) for name, function in CASES.items()})


if __name__ == "__main__":
    main()
