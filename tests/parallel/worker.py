"""One rank: runs every case, and writes what came of it. A case that raises tells its error."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import error_of, run_cases
from models import batch, make, same, sharded, trained
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import autoac
from autoac.measure import measure_peak
from autoac.ranks import all_or_none as ranks

AGAIN = autoac.Policy("MUST_RECOMPUTE", op="aten.gelu*")
PATIENCE_S = {"one_that_fails_in_its_step": 10.0}
CASES: dict[str, Callable[[int], Any]] = {}


def case(function: Callable[[int], Any]) -> Callable[[int], Any]:
    CASES[function.__name__] = function
    return function


def peak_bytes(model: Any, x: torch.Tensor, plan: autoac.Plan) -> int:
    """The least of some steps: gloo's threads hold buffers on in some."""

    def step() -> int:
        model.zero_grad(set_to_none=True)
        return measure_peak(lambda: model(x).backward()).peak_above_start_bytes

    found = min(step() for _ in range(5))
    model.zero_grad(set_to_none=True)
    return plan.resident_bytes + found


def fsdp(rank: int, *engines: str, **options: Any) -> dict[str, Any]:
    """Shard, plan, apply."""
    x, found = batch(rank), {}
    plain = trained(sharded(make(), **options), x)
    profile = autoac.profile(sharded(make(), **options), x)
    found["resident"] = profile.resident_bytes
    for engine in engines:
        loose = autoac.solve(profile, "1GB", engine=engine)
        found["unplanned"] = loose.predicted_peak_bytes
        plan = autoac.solve(profile, int(0.72 * loose.predicted_peak_bytes), engine=engine)
        model = plan.apply(sharded(make(), **options))
        peaks = plan.predicted_peak_bytes, peak_bytes(model, x, plan), plan.budget_bytes
        equal = same(plain, trained(plan.apply(sharded(make(), **options)), x))
        found[engine] = {"peaks": peaks, "equal": equal, "wrapped": sum(r.wrapped for r in plan.regions)}
    return found


@case
def fsdp_by_block(rank: int) -> Any:
    return fsdp(rank, "replay", "sac")


@case
def fsdp_not_resharded(rank: int) -> Any:
    return fsdp(rank, "replay", reshard_after_forward=False)


@case
def fsdp_gathers_two_ahead(rank: int) -> Any:
    profile = autoac.profile(sharded(make(), prefetch=2), batch(rank))
    loose = autoac.solve(profile, "1GB")
    return {"resident": profile.resident_bytes, "unplanned": loose.predicted_peak_bytes}


@case
def fsdp_in_bfloat16(rank: int) -> Any:
    return fsdp(rank, "sac", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@case
def region_over_units(rank: int) -> Any:
    x, found = batch(rank), {}
    model = sharded(make())
    for engine in ("replay", "sac"):
        plan = autoac.plan(model, x, "1GB", engine=engine, regions=["pair"])
        found[engine] = [plan.why("pair"), plan.explain(), sum(region.wrapped for region in plan.regions)]
    return found


@case
def sharded_after_the_plan(rank: int) -> Any:
    """A region that is too large is refused where the plan is applied, or at the first call."""
    x, found = batch(rank), {}
    plan = autoac.plan(make(), x, "1GB", regions=["pair"], policies=[AGAIN])
    model = sharded(make())
    found["applied"] = error_of(lambda: plan.apply(model))
    model = sharded(plan.apply(make()))
    found["called"] = error_of(lambda: model(x))
    return found


@case
def plan_shard_apply(rank: int) -> Any:
    """Names and fingerprint are those of the model before it is sharded."""
    x = batch(rank)
    plain = trained(sharded(make()), x)
    plan = autoac.plan(make(), x, "1GB", regions=["layers.*"], policies=[AGAIN])
    before = trained(sharded(plan.apply(make())), x)
    after = trained(plan.apply(sharded(make())), x)
    model = plan.apply(sharded(make()))
    return {
        "equal": same(plain, before) and same(plain, after),
        "regions": [region.name for region in plan.regions if region.wrapped],
        "model": plan.record.model,
        "names": sorted(model.state_dict()) == sorted(make().state_dict()),
    }


@case
def checkpoints(rank: int) -> Any:
    """torch's distributed checkpoints of a planned model have the names they had, and load into one without a plan."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    x = batch(rank)
    model = sharded(make())
    plan = autoac.plan(model, x, "1GB", policies=[AGAIN])
    trained(plan.apply(model), x)
    state = get_model_state_dict(model)
    folder = Path(sys.argv[1]).with_name("checkpoint")
    save(state, checkpoint_id=folder)
    other = sharded(make())
    loaded = get_model_state_dict(other)
    load(loaded, checkpoint_id=folder)
    set_model_state_dict(other, loaded)
    return {
        "names": sorted(state) == sorted(make().state_dict()),
        "equal": same(trained(model, x, 0), trained(other, x, 0)),
    }


@case
def fsdp1_is_refused(rank: int) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(make(), device_id=torch.device("cpu"))
    given = [error_of(lambda: autoac.profile(model, batch(rank)))]
    return [*given, error_of(lambda: autoac.auto(model, "1GB"))]


@case
def leaves_no_trace(rank: int) -> Any:
    """What FSDP2 sets up once is still there after profiling: a state dict after forward alone holds the shards."""
    x, model = batch(rank), sharded(make())
    before = [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    autoac.profile(model, x)
    after = [p.detach().to_local() for p in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        model(x)
    kinds = {type(value).__name__ for value in model.state_dict().values()}
    return {
        "same": same(before, after),
        "grads": any(p.grad is not None for p in model.parameters()),
        "kinds": sorted(kinds),
    }


@case
def ddp(rank: int) -> Any:
    x, found = batch(rank), {}
    for name, view in (("wrapped", False), ("inside", True), ("before", False)):
        plain = trained(DistributedDataParallel(make(), gradient_as_bucket_view=view), x, 3)
        model = DistributedDataParallel(make(), gradient_as_bucket_view=view)
        trained(model, x, 2)  # the buckets are built anew after the first step
        model.module.load_state_dict(make().state_dict())
        parallel = autoac.parallel.DDP(gradient_as_bucket_view=view) if name == "before" else None
        given = {"wrapped": model, "inside": model.module, "before": make()}[name]
        profile = autoac.profile(given, x, parallel=parallel)
        plan = autoac.solve(profile, int(0.8 * autoac.solve(profile, "1GB").predicted_peak_bytes))
        measured = peak_bytes(plan.apply(model), x, plan)
        found[name] = plan.predicted_peak_bytes, measured, same(plain, trained(model, x))
    return found


@case
def ddp_with_a_static_graph(rank: int) -> Any:
    x = batch(rank)
    plain = trained(DistributedDataParallel(make(), static_graph=True), x, 4)
    model = DistributedDataParallel(make(), static_graph=True)
    early = [error_of(lambda: autoac.profile(model, x)), error_of(lambda: autoac.profile(model.module, x))]
    trained(model, x, 1)
    plan = autoac.plan(model, x, "1GB", policies=[AGAIN])
    late = same(plain, trained(plan.apply(model), x, 3))
    first = autoac.plan(make(), x, "1GB", policies=[AGAIN]).apply(make())
    return {
        "early": early,
        "late": late,
        "first": same(plain, trained(DistributedDataParallel(first, static_graph=True), x, 4)),
    }


@case
def compiled(rank: int) -> Any:
    """torch.compile around the wrapper and inside of it, the plan applied before and after both."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    def whole(model: Any) -> Any:
        return torch.compile(model, backend="aot_eager")  # torch's own kernels: equal to the bit

    def blocks(model: Any) -> Any:
        for block in (*model.layers, *model.pair):
            block.compile(backend="aot_eager")
        return model

    x, found, ddp = batch(rank), {}, DistributedDataParallel
    plans = {engine: autoac.plan(make(1), x, "1GB", engine=engine, regions=["layers.*", "pair.*"],
                                 policies=[AGAIN]) for engine in ("replay", "sac")}  # fmt: skip
    for name, engine, wrapper, model in (
        ("compile(DDP(planned))", "sac", ddp, lambda put: whole(ddp(put(make(1))))),
        ("planned(DDP(compile))", "replay", ddp, lambda put: put(ddp(whole(make(1))))),
        ("planned(fully_shard(compile))", "sac", sharded, lambda put: put(sharded(blocks(make(1))))),
        ("compile(fully_shard(planned))", "replay", sharded, lambda put: whole(sharded(put(make(1))))),
    ):
        torch._dynamo.reset()
        plan, plain = plans[engine], wrapper(make(1))
        planned = model(plan.apply)
        found[name] = {
            "equal": same(trained(plain, x), trained(planned, x)),
            "saved": peak_bytes(plain, x, plan) - peak_bytes(planned, x, plan),
            "names": sorted(get_model_state_dict(planned)) == sorted(make(1).state_dict()),
        }
    inside = ddp(whole(make(1)))
    made = autoac.plan(inside, x, "1GB", policies=[AGAIN], regions=["layers.*"])
    return found, made.record.engine, [region.name for region in made.regions if region.wrapped]


@case
def one_plan(rank: int) -> Any:
    """Ranks with batches of different sizes get one plan, for the larger one."""
    model = DistributedDataParallel(make())
    plan = autoac.plan(model, batch(rank, rows=64 * (rank + 1)), "1GB", policies=[AGAIN])
    given = autoac.plan(make(), batch(), "1GB", policies=[AGAIN]) if rank == 0 else None
    taken = autoac.parallel.agree(given, model)
    own = autoac.plan(make(), batch(rank, rows=64 * (rank + 1)), "1GB", policies=[AGAIN])
    largest = autoac.parallel.agree(own, model)
    return {
        "id": plan.program_id,
        "sample": plan.record.profile.sample,
        "given": taken.program_id,
        "largest": largest.record.profile.sample,
        "shared": largest.on(largest.record.profile).is_shared,
    }


def failing(rank: int, act: Callable[[], Any]) -> dict[str, Any]:
    started = time.monotonic()
    return {"error": error_of(act), "seconds": time.monotonic() - started}


@case
def another_model(rank: int) -> Any:
    model = DistributedDataParallel(make())
    other = sharded(make(blocks=3 + rank))
    plan = autoac.plan(make(blocks=4), batch(), "1GB") if rank == 0 else None
    optimizer = (torch.optim.SGD, torch.optim.AdamW)[rank](model.parameters())
    whole = sharded(make())
    asked = (lambda: autoac.plan(whole, batch(), "1GB"), lambda: autoac.profile(whole, batch()))[rank]
    return [
        failing(rank, lambda: autoac.plan(other, batch(rank), "1GB")),
        failing(rank, lambda: autoac.parallel.agree(plan, model)),
        failing(rank, lambda: autoac.plan(model, batch(rank), "1GB", optimizer=optimizer)),
        failing(rank, asked),
    ]


@case
def a_batch_refused(rank: int) -> Any:
    model, sample = DistributedDataParallel(make()), batch(rank) if rank == 0 else [batch(rank)]
    return failing(rank, lambda: autoac.plan(model, sample, "1GB"))


@case
def no_plan_fits(rank: int) -> Any:
    return failing(rank, lambda: autoac.plan(DistributedDataParallel(make()), batch(rank), 1000))


@case
def a_batch_too_large_on_one(rank: int) -> Any:
    """The budget is enough for rank 0."""
    model = DistributedDataParallel(make())
    assert autoac.plan(make(), batch(), "1MB").budget_bytes == 10**6
    return failing(rank, lambda: autoac.plan(model, batch(rank, rows=128 + 4096 * rank), "1MB"))


@case
def one_that_fails_in_its_step(rank: int) -> Any:
    """The last one: a collective that was left alone breaks gloo's connections."""

    def loss(output: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ArithmeticError("the loss of rank 1 is odd")
        return output

    return failing(rank, lambda: autoac.plan(sharded(make()), batch(rank), "1GB", loss=loss))


def main() -> None:
    dist.init_process_group("gloo")

    def run(name: str) -> Any:
        if name in PATIENCE_S:
            dist.barrier()
            ranks.PATIENCE_S = PATIENCE_S[name]
        return CASES[name](dist.get_rank())

    run_cases({name: functools.partial(run, name) for name in CASES})


if __name__ == "__main__":
    main()
