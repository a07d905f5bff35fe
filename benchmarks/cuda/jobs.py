"""The measurements, most important first; each job is a name and a function that returns its result."""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import autoac
from autoac.calibrate.device_table import calibrate
from autoac.compare import torch_milp
from autoac.compare.compiled import ALL
from autoac.compare.ours import budgets_between
from autoac.compare.selfcheck import selfcheck
from autoac.compare.strategies import Strategy, by_hand, policies_for
from autoac.device import device_for
from autoac.measure import measure_peak
from autoac.plans import Plan
from autoac.price.engine_costs import MOST_BETWEEN_BYTES, engine_costs
from autoac.step.step import TrainingStep
from autoac_solver.allocator.options import options_in_environment
from autoac_solver.plan.planning import least_budget_bytes, plan_profile
from autoac_solver.records.engines import EngineName
from benchmarks.cuda.bandwidth import copies
from benchmarks.cuda.training import Size, Training, flash_attention

Job = tuple[str, Callable[[], Any]]

MODELS = ("gpt", "llama")
COMPILING: EngineName = "compile"
CAPTURED = ("none", "least", "middle")
_SOLVE_S, _GAP = 8.0, 5e-3
_LARGEST_S, _LARGEST_GAP = 4.0, 0.05


def jobs(device: torch.device, size: Size, folder: Path, with_table: bool) -> Iterator[Job]:
    """All of them.

    Args:
        folder: where the device's table is written.
        with_table: whether to make the table; the search for the largest batch uses it.
    """
    yield "environment", functools.partial(environment, device)
    trainings: dict[str, Training] = {}

    def training(name: str) -> Training:
        """The model, made when it is first needed; only one is kept."""
        if name not in trainings:
            trainings.clear()
            device_for(device).release_cache()
            trainings[name] = Training(name, device, size)
        return trainings[name]

    for name in MODELS:
        make = functools.partial(training, name)
        yield f"{name}/profile", functools.partial(about, make)
        yield f"{name}/none", functools.partial(by_hand_job, make, "none")
        for number in range(size.budgets):
            yield f"{name}/ours {number}", functools.partial(ours, make, number)
        for strategy in (
            "full, each block",
            "save attention, every other matmul",
            "save attention and matmuls",
            "none again",
        ):
            yield f"{name}/{strategy}", functools.partial(by_hand_job, make, strategy)
    yield "bandwidth", functools.partial(copies, device, size.copied_bytes)
    yield (
        "engine costs",
        functools.partial(engine_costs, device, MOST_BETWEEN_BYTES if size.size != "tiny" else 0),
    )
    yield "selfcheck", lambda: selfcheck(device, size.size).as_json()
    for name in MODELS:
        for budget in size.compile_budgets:
            yield (
                f"{name}/compiled blocks, budget {budget}",
                functools.partial(compiled, functools.partial(training, name), budget),
            )
    for name in size.compiled:
        make = functools.partial(training, name)
        for number in range(size.compiled_budgets):
            yield f"{name}/ours compiled {number}", functools.partial(ours_compiled, make, number)
    if device.type == "cuda":
        for name in MODELS:
            for what in CAPTURED:
                yield (
                    f"{name}/captured, {what}",
                    functools.partial(captured, functools.partial(training, name), what),
                )
    if with_table:
        path = folder / "device.json"
        yield "device table", functools.partial(device_table, device, size, path)
        yield "gpt/largest batch", functools.partial(largest_batch, functools.partial(training, "gpt"), path)
    for name in MODELS:
        yield f"{name}/sac_milp", functools.partial(sac_milp, functools.partial(training, name))


def environment(device: torch.device) -> dict[str, str]:
    """Conditions of the results. They do not identify the machine."""
    known = device_for(device)
    found = {
        "device": known.name() or "CPU",
        "memory": f"{known.total_bytes()} bytes",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": str(os.cpu_count()),
        "autoac": autoac.__version__,
        "allocator": options_in_environment() or "default",
        "date": time.strftime("%Y-%m-%d"),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        found["compute capability"] = f"{major}.{minor}"
        found["cuDNN"] = str(torch.backends.cudnn.version())
    return found


def about(make: Callable[[], Training]) -> dict[str, Any]:
    """The profile and the range of budgets."""
    start = time.perf_counter()
    training = make()
    profile = training.profile
    nothing = plan_profile(profile, 2**60, time_limit_s=_SOLVE_S)
    return {
        "model": training.model.__class__.__name__,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "dtype": str(device_for(training.device).training_dtype),
        "sample": profile.sample,
        "ops": len(profile.tape),
        "resident_bytes": profile.resident_bytes,
        "least_bytes": training.least_bytes,
        "unplanned_peak_bytes": nothing.predicted_peak_bytes,
        "predicted_step_s": profile.step_s,
        "host_s": profile.lanes.host_s if profile.has_two_clocks else None,
        "device_s": profile.lanes.device_s if profile.has_two_clocks else None,
        "notes": list(profile.notes),
        "seconds": time.perf_counter() - start,
    }


def by_hand_job(make: Callable[[], Training], name: str) -> dict[str, Any]:
    """No checkpointing, or a strategy without a planner."""
    training = make()
    blocks = training.workload.blocks
    strategies = by_hand(blocks, policies_for(training.profile, blocks), every=())
    chosen = [strategy for strategy in strategies if strategy.name == name]
    if not chosen:
        return {"error": f"{name!r} does not go with this model's ops"}
    return training.measure(chosen[0])


def ours(make: Callable[[], Training], number: int) -> dict[str, Any]:
    """Our plan at one of the budgets, predicted and measured."""
    training = make()
    profile = training.profile
    most = plan_profile(profile, 2**60, time_limit_s=_SOLVE_S).predicted_peak_bytes
    budget = budgets_between(training.least_bytes, most, training.size.budgets)[number]
    start = time.perf_counter()
    plan = Plan(plan_profile(profile, budget, time_limit_s=_SOLVE_S, gap=_GAP))
    solve_s = time.perf_counter() - start
    strategy = Strategy(f"ours {number}", "ours", plan.apply, budget)
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_reserved_bytes": plan.predicted_reserved_bytes,
        "predicted_step_s": plan.record.predicted_step_s + plan.record.predicted_extra_s,
        "predicted_overhead": plan.predicted_overhead,
        "status": plan.status,
        "solve_s": solve_s,
        **training.measure(strategy),
    }


def middle(training: Training) -> int:
    """The budget half-way between the least and what a step takes with nothing recomputed."""
    most = plan_profile(training.profile, 2**60, time_limit_s=_SOLVE_S).predicted_peak_bytes
    return (training.least_bytes + most) // 2


def ours_compiled(make: Callable[[], Training], number: int) -> dict[str, Any]:
    """Our plan of engine compile at one of the budgets from the least to that which needs no recomputation."""
    training = make()
    profile = training.profile_of(COMPILING)
    solve = functools.partial(autoac.solve, profile, engine=COMPILING, time_limit_s=_SOLVE_S, gap=_GAP)
    least = least_budget_bytes(profile, engine=COMPILING)
    most = solve(2**60).predicted_peak_bytes
    budget = budgets_between(least, most, training.size.compiled_budgets)[number]
    plan = solve(budget)
    strategy = Strategy(f"ours compiled {number}", "ours", plan.apply, budget, compiled=ALL)
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_overhead": plan.predicted_overhead,
        **training.measure(strategy),
    }


def captured(make: Callable[[], Training], what: str) -> dict[str, Any]:
    """Forward and backward as a CUDA graph, with nothing recomputed or with our plan at the least or middle budget."""
    training = make()
    if what == "none":
        return training.captured(lambda model: None)
    budget = training.least_bytes if what == "least" else middle(training)
    plan = Plan(plan_profile(training.profile, budget, time_limit_s=_SOLVE_S, gap=_GAP))
    return {
        "budget_bytes": budget,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        **training.captured(plan.apply),
    }


def compiled(make: Callable[[], Training], budget: float) -> dict[str, Any]:
    """The blocks compiled one by one, with torch's own budget for activations."""
    import torch._functorch.config as config

    training = make()
    # Off a GPU the partitioner is what there is to try: making kernels takes minutes.
    backend = "inductor" if training.known.asynchronous else "aot_eager_decomp_partition"

    def install(model: torch.nn.Module) -> None:
        for name in training.workload.blocks:
            block = model.get_submodule(name)
            block.forward = torch.compile(block.forward, backend=backend)

    torch.compiler.reset()
    with config.patch(activation_memory_budget=budget):
        return training.measure(Strategy(f"compiled, {budget}", "other", install, compiled=ALL))


def sac_milp(make: Callable[[], Training]) -> dict[str, Any]:
    """torch's planner at the middle of the range of budgets, carried out."""
    training = make()
    budget = middle(training)
    found = torch_milp.advised(training.workload, training.device, {f"{budget / 1e6:.1f}MB": budget})
    return {"budget_bytes": budget, **training.measure(found[0])}


def device_table(device: torch.device, size: Size, path: Path) -> dict[str, Any]:
    """The cost table of this device, in a file of its own."""
    table = calibrate("this", device, size.size)
    table.save(path)
    return {
        "entries": len(table.entries),
        "matrix_flops": table.matrix_flops,
        "bandwidth": table.bandwidth,
        "launch_s": table.launch_s,
    }


def largest_batch(make: Callable[[], Training], table: Path) -> dict[str, Any]:
    """The largest batch within a budget: twice what a batch takes with nothing recomputed, or half of the device."""
    training = make()
    on_gpu = training.known.asynchronous
    total = training.known.total_bytes() if on_gpu else 0
    nothing = plan_profile(training.profile, 2**60, time_limit_s=_SOLVE_S).predicted_peak_bytes
    budget = total // 2 or 2 * nothing
    curves = autoac.batch_tradeoff(
        lambda count: (training.model, training.batch(count)),
        budget,
        optimizer=lambda model: training.optimizer,
        device=table if on_gpu else None,  # on a CPU times of ops by themselves will do
        time_limit_s=_LARGEST_S,
        gap=_LARGEST_GAP,
    )
    found: dict[str, Any] = {"budget_bytes": budget, "ours": curves.largest_batch()}
    for batch, curve in curves.curves.items():
        peaks = zip(curve.baselines["name"].tolist(), curve.baselines["peak_bytes"].tolist(), strict=True)
        for name in [name for name, peak in peaks if peak <= budget]:
            found[name] = max(found.get(name, 0), batch)
    return found | {"ours, measured": _measured_at(training, found["ours"], budget)}


def _measured_at(training: Training, batch: int, budget: int) -> dict[str, Any]:
    """A plan made on this device for so large a batch, carried out."""
    sample = training.batch(batch)
    step = TrainingStep(training.model, sample, None)

    def whole() -> None:
        step.run()
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)

    try:
        with flash_attention():
            plan = autoac.plan(
                training.model,
                sample,
                budget,
                optimizer=training.optimizer,
                time_limit_s=_SOLVE_S,
                gap=_GAP,
                progress=False,
            )
            with plan.applied(training.model):
                whole()
                training.known.release_cache()
                peak = measure_peak(whole, training.device)
    except autoac.InfeasibleBudgetError as error:
        return {"batch": batch, "error": f"does not fit: {error.minimum_bytes} bytes are the least"}
    except torch.OutOfMemoryError:
        return {"batch": batch, "error": "out of memory"}
    measured = plan.resident_bytes + peak.peak_above_start_bytes
    return {"batch": batch, "peak_bytes": measured, "within": measured <= budget}
