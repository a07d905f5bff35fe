"""The comparison that `autoac compare` makes: manual strategies, torch's planner, and our plans at the same peaks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

import autoac
from autoac.compare import ours, torch_milp
from autoac.compare.measure import Bench, Configuration, from_zero_grad
from autoac.compare.results import ModelResult
from autoac.compare.strategies import AGAIN, Strategy, by_hand, policies_for
from autoac.compare.workload import Workload
from autoac.device import device_for, processor
from autoac.progress import Tell, part
from autoac.record.optimizer import without_its_step
from autoac.step.model import device_bytes, device_of
from autoac.step.step import TrainingStep
from autoac_solver.build.engines import DEFAULT
from autoac_solver.records.engines import compiles
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.units import parse_bytes

AT_PEAK = "ours at the peak of "
AT_BUDGET = "ours at a budget of "


def compare(
    workload: Workload,
    budgets: Sequence[int | str] = (),
    *,
    engine: str = DEFAULT,
    rounds: int = 8,
    progress: Tell | None = None,
) -> ModelResult:
    """Measure peak, gradients and step time of strategies on a model, side by side.

    Our plans are made for the peak of each other strategy that runs and has the right gradients, and for each budget.
    The model is restored afterwards. With engine compile, the other strategies include blocks compiled at torch's own
    budgets and under its checkpoint.

    Args:
        budgets: bytes, or text as for `autoac.plan`.
        rounds: samples of the step time of each strategy.

    Raises:
        ProfilingError: the step could not be recorded, or leaves no gradients to compare.
        BudgetFormatError: a budget is no amount of memory.
    """
    tell = progress or (lambda *_: None)
    device = device_of(workload.modules)
    asked = {str(b): parse_bytes(b, device_bytes(device) or None) for b in budgets}
    start = time.perf_counter()
    with from_zero_grad(workload):
        profile = autoac.profile(
            workload.model,
            workload.sample,
            loss=workload.loss,
            optimizer=workload.optimizer,
            engine=engine,
            progress=part(tell, 0.0, 0.1),
        )
    profile = without_its_step(profile)  # as the steps that are measured
    profile_s = time.perf_counter() - start
    bench = Bench(workload, device, profile.resident_bytes)
    strategies = by_hand(workload.blocks, policies_for(profile, workload.blocks))
    if compiles(engine):
        from autoac.compare.compiled import by_torch

        strategies += by_torch(profile)
    found = examine(bench, strategies, part(tell, 0.1, 0.25))
    if not bench.tells_gradients:
        raise ProfilingError(
            "the step leaves no gradients to compare: it drops them itself. Have it leave them; a comparison drops "
            "them before each step."
        )
    again = next(c for c in found if c.strategy.name == AGAIN)
    if not again.error and not (again.gradients_equal and again.buffers_equal):
        raise ProfilingError(
            "two steps without checkpointing differ by themselves, so no strategy can be compared with them: some "
            "kernels sum in another order each time. Call torch.use_deterministic_algorithms(True) where the model is "
            "made, or, on CPU, compare with one thread."
        )
    tell("torch's sac_milp", 0.25)
    advice_for = asked or _middle([c.peak_bytes for c in found if not c.error])
    found += examine(bench, torch_milp.advised(workload, device, advice_for), part(tell, 0.3, 0.35))
    peaks = {c.peak_bytes: c.strategy.name for c in found if c.gradients_equal and c.strategy.kind == "other"}
    targets = {AT_PEAK + name: peak for peak, name in peaks.items()}
    targets |= {AT_BUDGET + name: budget for name, budget in asked.items()}
    tell("our plans", 0.35)
    start = time.perf_counter()
    step = TrainingStep(workload.modules, workload.sample, workload.loss, workload.optimizer)
    with from_zero_grad(workload):
        plans = ours.planned(profile, targets, engine, step)
    solve_s = time.perf_counter() - start
    found += examine(bench, plans, part(tell, 0.4, 0.5))
    bench.time(found, rounds, part(tell, 0.5, 1.0))
    budgets = sorted(targets.values())
    return ModelResult.of(
        bench, found, profile, engine=engine, budgets=budgets, profile_s=profile_s, solve_s=solve_s
    )


def examine(bench: Bench, strategies: Sequence[Strategy], tell: Tell) -> list[Configuration]:
    """Peak and gradients of each strategy, one after the other."""
    found = []
    for index, strategy in enumerate(strategies):
        tell(f"peak and gradients: {strategy.name}", index / len(strategies))
        found.append(bench.examine(strategy))
    return found


def conditions(device: torch.device, dtypes: Iterable[torch.dtype], rounds: int) -> dict[str, str]:
    """The conditions that the results depend on."""
    known = device_for(device)
    cpu_time = "is CPU time of the process, waiting threads asleep, freed memory kept by glibc"
    return {
        "on": known.name() or f"{processor()}, {_threads(torch.get_num_threads())}",
        "torch": torch.__version__,
        "precision": ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})),
        "time": "by CUDA events" if known.asynchronous else cpu_time,
        "rounds": str(rounds),
        "date": time.strftime("%Y-%m-%d"),
    }


def _threads(count: int) -> str:
    return f"{count} thread{'' if count == 1 else 's'}"


def _middle(peaks: Sequence[int]) -> dict[str, int]:
    """A budget between the least and the highest peak."""
    middle = (min(peaks) + max(peaks)) // 2 if peaks else 0
    return {f"{middle / 1e6:.1f}MB": middle} if peaks else {}
