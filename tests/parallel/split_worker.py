"""One rank of four: ranks 0 and 1 split models between them, and all four split and shard; writes what came of it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import split
import torch
import torch.distributed as dist
from cases import error_of, run_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.measure import measure_peak
from autoac_solver.records.collectives import may_repeat

CASES: dict[str, Callable[[], Any]] = {}
BUDGETS = (0.9, 0.8, 0.72)
MOST_STEPS = 20
AGAIN = autoac.Policy("MUST_RECOMPUTE", op="aten.gelu*")


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def trained(model: Any, step: Callable[[], Any], steps: int = 5) -> list[torch.Tensor]:
    """This rank's part of the parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        step()
        optimizer.step()
    optimizer.zero_grad()
    return [local(p).detach().clone() for p in model.parameters()]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def least_peak(
    plan: autoac.Plan, model: Any, step: Callable[[], Any], before: Callable[[], Any] = lambda: None
) -> int:
    """The least of some steps, until on each rank one took no more than predicted: gloo's threads hold buffers on.

    Args:
        before: called before each of them.
    """
    least = 1 << 62
    for _ in range(MOST_STEPS):
        model.zero_grad(set_to_none=True)
        before()
        least = min(least, plan.resident_bytes + measure_peak(step).peak_above_start_bytes)
        is_above = torch.tensor(least > plan.predicted_peak_bytes, dtype=torch.int64)
        dist.all_reduce(is_above, group=GROUP)
        if not is_above:
            break
    model.zero_grad(set_to_none=True)
    return least


def held_to(
    made: Callable[[], Any],
    engines: dict[str, tuple[float, ...]],
    loss: Any = split.loss_of,
    step_of: Callable[[Any], Callable[[], None]] | None = None,
) -> dict[str, Any]:
    """Plans for three budgets: each holds, and changes nothing.

    Args:
        engines: to which part of the peak without recomputation each plans.
        step_of: the step of a model, if it is more than a call of it and of the loss.
    """
    x, plain = split.ids(), made()

    def one_call(model: Any) -> Callable[[], None]:
        def step() -> None:
            output = model(x)  # held while backward runs, as in the recorded step
            loss(output).backward()

        return step

    step = step_of or one_call
    wanted = trained(plain, step(plain))
    if step_of is None:
        profile = autoac.profile(made(), x, loss=loss)
    else:
        profile = autoac.profile(model := made(), step_of(model))
    found: dict[str, Any] = {"notes": [note for note in profile.notes if "varies" in note]}
    found["resident"] = profile.resident_bytes
    for engine, budgets in engines.items():
        loose = autoac.solve(profile, "1GB", engine=engine)
        found["unplanned"] = loose.predicted_peak_bytes
        for part in budgets:
            plan = autoac.solve(profile, int(part * loose.predicted_peak_bytes), engine=engine)
            model = plan.apply(made())
            equal = same(wanted, trained(model, step(model)))
            peak = least_peak(plan, model, step(model))
            found[f"{engine} {part}"] = {
                "peaks": [plan.predicted_peak_bytes, peak, plan.budget_bytes],
                "equal": equal,
                "wrapped": [region.name for region in plan.regions if region.wrapped],
            }
    return found


MESH: Any = None
GROUP: Any = None
"""The ranks of the case."""


def pair(styles: Callable[[], Any], make: Callable[[], Any] = split.make) -> Callable[[], Any]:
    return lambda: split.split(make(), MESH["split"], styles)


@case
def layers_in_parts() -> Any:
    return held_to(pair(split.by_layer), {"replay": BUDGETS, "sac": BUDGETS[2:]})


@case
def sequence_in_parts() -> Any:
    return held_to(pair(split.by_sequence), {"replay": BUDGETS[2:], "sac": BUDGETS[1:2]})


@case
def llama() -> Any:
    from autoac.parallel.tensor import own_plan

    model = split.make_llama()
    return held_to(pair(lambda: own_plan(model), split.make_llama), {"replay": BUDGETS[:1]})


@case
def loss_in_parts() -> Any:
    with loss_parallel():
        return held_to(pair(split.with_loss_in_parts), {"replay": BUDGETS[:1]})


@case
def autocast() -> Any:
    """Its casts of sharded weights are kept, and made once more by a second run."""
    return held_to(pair(split.by_layer, split.make_autocast), {"replay": BUDGETS[1:2], "sac": BUDGETS[1:2]})


class Gathers(TorchDispatchMode):
    """Counts the collectives of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "_local_tensor") for kind in types):
            return NotImplemented
        self.count += may_repeat(str(func))
        return func(*args, **(kwargs or {}))


@case
def collectives_again() -> Any:
    """Where a policy lets them, and cheaper than it is without; all ranks run the same ones."""
    x, made, found = split.ids(), pair(split.by_sequence), {}
    profile = autoac.profile(made(), x, loss=split.loss_of)
    may = autoac.policies.REPEAT_COLLECTIVES

    def step_of(model: Any) -> Callable[[], None]:
        def step() -> None:
            output = model(x)
            split.loss_of(output).backward()

        return step

    wanted = trained(plain := made(), step_of(plain))
    for engine in ("replay", "sac"):
        least = []
        for policies in ((), (may,)):
            try:
                autoac.solve(profile, 1, engine=engine, policies=policies)
            except autoac.InfeasibleBudgetError as error:
                least.append(error.minimum_bytes)
        own = autoac.solve(profile, max(least[1:]), engine=engine, policies=may)
        alone = error_of(lambda own=own: own.apply(made()))
        plan = autoac.parallel.agree(own, made())  # the first of them
        model = plan.apply(made())
        step, counts = step_of(model), []
        for counted in (step_of(plain), step):
            with Gathers() as gathers:
                counted()
            counts.append(gathers.count)
        model.zero_grad()
        steps = [op for region in plan.record.regions if region.wrapped for op in region.steps]
        found[engine] = {
            "least": least,
            "alone": alone,
            "again": sum(again and may_repeat(name) for name, again in steps),
            "counts": counts,
            "id": plan.program_id,
            "equal": same(wanted, trained(model, step)),
            "peaks": [plan.predicted_peak_bytes, least_peak(plan, model, step)],
        }
    return found


@case
def orders() -> Any:
    """Planned before and after it is split; names are those of the whole model."""
    x, made = split.ids(), pair(split.by_layer)
    plain = made()
    wanted = trained(plain, lambda: split.loss_of(plain(x)).backward())
    plan = autoac.plan(split.make(), x, "1GB", loss=split.loss_of, policies=[AGAIN])
    before = split.split(plan.apply(split.make()), MESH["split"], split.by_layer)
    after = plan.apply(made())
    again = autoac.plan(made(), x, "1GB", loss=split.loss_of, policies=[AGAIN])
    return {
        "equal": [
            same(wanted, trained(model, lambda: split.loss_of(model(x)).backward()))  # noqa: B023
            for model in (before, after)
        ],
        "names": [[r.name for r in one.regions if r.wrapped] for one in (plan, again)],
        "id": again.program_id,
    }


@case
def split_and_sharded() -> Any:
    def made() -> Any:
        model = split.split(split.make(), MESH["split"], split.by_layer)
        for layer in model.layers:
            fully_shard(layer, mesh=MESH["shard"])
        return fully_shard(model, mesh=MESH["shard"])

    return held_to(made, {"replay": BUDGETS[:1], "sac": BUDGETS[:1]})


def pipeline(schedule: str, *engines: str) -> dict[str, Any]:
    """Each rank plans for its stage, or its two, from a step with all micro-batches."""
    from torch.distributed import pipelining

    rank, x, target = dist.get_rank(), split.ids(), split.ids(1)
    group = MESH["split"].get_group()
    each = 2 if schedule == "ScheduleInterleaved1F1B" else 1

    def made() -> tuple[torch.nn.ModuleList, Callable[[], None], Callable[[], None]]:
        whole = split.make()
        parts = [torch.nn.Sequential(whole.words, whole.layers[0]), whole.layers[1], whole.norm, whole.head]
        if each == 1:
            parts = [parts[0], torch.nn.Sequential(*parts[1:])]
        mine = torch.nn.ModuleList(parts[rank::2])
        stages = [
            pipelining.PipelineStage(module, rank + 2 * i, len(parts), torch.device("cpu"), group=group)
            for i, module in enumerate(mine)
        ]

        def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        kind: Any = getattr(pipelining, schedule)
        runs = kind(stages if each == 2 else stages[0], n_microbatches=4, loss_fn=loss)

        def forget() -> None:
            for stage in stages:
                stage.clear_runtime_states()  # the last step's results, which are kept until the next begins

        def step() -> None:
            if rank == 0:
                runs.step(x)
            else:
                runs.step(target=target)

        step()  # the schedule sets itself up
        mine.zero_grad()
        return mine, step, forget

    plain, step, _ = made()
    wanted = trained(plain, step)
    model, step, _ = made()
    profile = autoac.profile(model, step)
    loose = autoac.solve(profile, "1GB")
    found: dict[str, Any] = {"unplanned": loose.predicted_peak_bytes, "notes": profile.notes}
    for engine in engines:
        budget = (loose.predicted_peak_bytes + profile.least_peak_bytes) // 2
        plan = autoac.solve(profile, budget, engine=engine)
        model, step, forget = made()
        equal = same(wanted, trained(plan.apply(model), step))
        peak = least_peak(plan, model, step, forget)
        found[engine] = {
            "peaks": [plan.predicted_peak_bytes, peak, plan.budget_bytes],
            "equal": equal,
            "wrapped": [f"{r.name} {r.call}" for r in plan.regions if r.wrapped],
        }
    if schedule == "ScheduleGPipe":  # a budget that only one of the ranks can keep
        model, step, _ = made()
        found["refused"] = error_of(lambda: autoac.plan(model, step, "1GB" if rank == 0 else 1000))
    return found


@case
def gpipe() -> Any:
    return pipeline("ScheduleGPipe", "replay", "sac")


@case
def one_forward_one_backward() -> Any:
    return pipeline("Schedule1F1B", "replay")


@case
def interleaved() -> Any:
    return pipeline("ScheduleInterleaved1F1B", "replay")


def stage_of_many(spread: Callable[[Any], Any], kind: str) -> dict[str, Any]:
    """A pipeline of two stages, each of them on two ranks."""
    from torch.distributed import pipelining

    index = dist.get_rank() // 2
    group = MESH["shard"].get_group()
    x, target = split.ids(), split.ids(1)

    def made() -> tuple[torch.nn.Module, Callable[[], None], Callable[[], None]]:
        whole = spread(split.make())
        parts = [
            torch.nn.Sequential(whole.words, whole.layers[0]),
            torch.nn.Sequential(whole.layers[1], whole.norm, whole.head),
        ]
        mine = parts[index]
        stage = pipelining.PipelineStage(mine, index, 2, torch.device("cpu"), group=group)

        def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

        runs = getattr(pipelining, kind)(stage, n_microbatches=4, loss_fn=loss)

        def step() -> None:
            if index == 0:
                runs.step(x)
            else:
                runs.step(target=target)

        step()
        mine.zero_grad()
        return mine, step, stage.clear_runtime_states

    plain, step, _ = made()
    wanted = trained(plain, step)
    model, step, _ = made()
    plan = autoac.plan(model, step, "1GB", policies=[autoac.Policy("MUST_RECOMPUTE", op="aten.gelu")])
    model, step, forget = made()
    return {
        "equal": same(wanted, trained(plan.apply(model), step)),
        "id": plan.program_id,
        "wrapped": [f"{r.name} {r.call}" for r in plan.regions if r.wrapped],
        "peaks": [plan.predicted_peak_bytes, least_peak(plan, model, step, forget)],
    }


@case
def stages_sharded() -> Any:
    def spread(whole: Any) -> Any:
        for layer in whole.layers:
            fully_shard(layer, mesh=MESH["split"])
        return whole

    return stage_of_many(spread, "ScheduleGPipe")


@case
def stages_in_parts() -> Any:
    return stage_of_many(lambda whole: split.split(whole, MESH["split"], split.by_layer), "Schedule1F1B")


@case
def context_in_parts() -> Any:
    """Ring attention. On CPU torch has none of its own, and says so."""
    if importlib.util.find_spec("torch.distributed.tensor.experimental._context_parallel") is None:
        return None
    import context

    def loss(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def step_of(model: Any) -> Callable[[], None]:
        return context.step_of(model, MESH["split"], split.ids(), split.ids(1), loss)

    model = split.make()
    refused = error_of(lambda: autoac.plan(model, step_of(model), "1GB"))
    context.enable_on_cpu()
    whole = split.make()
    loss(whole(split.ids()), split.ids(1)).backward()
    step_of(model)()
    right = []
    for known, own in zip(whole.parameters(), model.parameters(), strict=True):
        assert known.grad is not None
        assert own.grad is not None
        dist.all_reduce(own.grad, group=MESH["split"].get_group())
        right.append(torch.allclose(known.grad, own.grad / 2, atol=1e-6))
    held = held_to(split.make, {"replay": BUDGETS[1:2], "sac": BUDGETS[:1]}, step_of=step_of)
    return {**held, "refused": refused, "right": right}


FOR_ALL = {"split_and_sharded", "stages_sharded", "stages_in_parts"}


def main() -> None:
    global MESH
    dist.init_process_group("gloo")
    MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "split"))
    chosen = [name for name in sys.argv[2:] or CASES if dist.get_rank() < 2 or name in FOR_ALL]

    def run(name: str) -> Any:
        global GROUP
        GROUP = None if name in FOR_ALL else MESH["split"].get_group()
        return CASES[name]()

    run_cases({name: functools.partial(run, name) for name in chosen})
    dist.barrier()


if __name__ == "__main__":
    main()
