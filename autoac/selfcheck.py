"""Does it hold here? Profile, plan, train and measure two models on this device, against no and full checkpointing."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from autoac.measure import measure_peak, unique_storage_bytes
from autoac.planner import profile, solve
from autoac.step import make_step
from autoac.zoo import LLAMA, RESNET, Sample, llama, resnet
from autoac_solver.errors import InfeasibleBudgetError
from autoac_solver.planning import Progress

BUDGETS = 4
_ROUNDS = 5
_PEAK_TOLERANCE = 0.01


@dataclass(frozen=True)
class Row:
    """One way to run the step, measured.

    Args:
        name: "none", "full" or the plan's share of the way from the least feasible budget to the peak of "none".
        budget_bytes, predicted_peak_bytes: of the plan, 0 for the others.
        measured_peak_bytes: resident bytes included.
        step_s: median of the rounds, in which all rows take turns.
        overhead: extra step time over "none", as a fraction; predicted_overhead: what the plan says of it.
        equal: gradients are those of "none" to the bit.
    """

    name: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_s: float
    overhead: float
    predicted_overhead: float
    equal: bool

    @property
    def ok(self) -> bool:
        """Equal, within its budget, and its peak predicted to 1 %."""
        if not self.budget_bytes:
            return self.equal
        error = abs(self.measured_peak_bytes / self.predicted_peak_bytes - 1)
        return self.equal and self.measured_peak_bytes <= self.budget_bytes and error <= _PEAK_TOLERANCE


@dataclass(frozen=True)
class ModelCheck:
    """What was found for one model.

    Args:
        title: model, type, sizes.
        predicted_step_s, measured_step_s: of the step with nothing recomputed.
        rows: no and full checkpointing, then the plans.
    """

    title: str
    predicted_step_s: float
    measured_step_s: float
    rows: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class SelfCheck:
    """What `autoac selfcheck` found.

    Args:
        conditions: device, torch, deterministic kernels, date.
    """

    conditions: dict[str, str]
    models: list[ModelCheck]

    @property
    def ok(self) -> bool:
        """Whether every plan kept its promises."""
        return all(row.ok for model in self.models for row in model.rows if row.name != "full")

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.ok}


def selfcheck(device: torch.device, size: str, progress: Progress | None = None) -> SelfCheck:
    """Check both models on a device; in bf16 on CUDA, with deterministic kernels.

    Args:
        device: CPU or CUDA.
        size: "tiny", "small" or "full", see `autoac.zoo`.
        progress: called with what is done and its share.
    """
    tell = progress or (lambda *_: None)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kind = str(dtype).removeprefix("torch.")
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        tell("Llama-shaped model", 0.0)
        decoder, tokens = llama(LLAMA[size], dtype, device)
        found = [_check(f"Llama-shaped, {kind}, {LLAMA[size]}", decoder, tokens, decoder.layers, device)]
        del decoder, tokens
        tell("ResNet-shaped model", 0.5)
        network, pictures = resnet(RESNET[size], dtype, device)
        found.append(
            _check(f"ResNet-shaped, {kind}, {RESNET[size]}", network, pictures, network.blocks, device)
        )
    finally:
        torch.use_deterministic_algorithms(deterministic)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    conditions = {
        "on": name,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
        "ruler": "max_memory_allocated" if device.type == "cuda" else "the profiler's memory events",
    }
    return SelfCheck(conditions, found)


def _check(title: str, model: Any, sample: Sample, blocks: Any, device: torch.device) -> ModelCheck:
    recorded = profile(model, sample, mode="real")
    full = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    for block in full.get_submodule(_name_of(model, blocks)):
        block.forward = _checkpointed(block.forward)
    bench = _Bench(model, sample, device)
    bench.add("none", model, make_step(model, sample))
    bench.add("full", full, make_step(full, sample))
    most = bench.peaks["none"]
    try:
        least = solve(recorded, 1).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        least = error.minimum_bytes
    plans = {}
    for index in range(BUDGETS):
        share = index / BUDGETS
        plan = solve(recorded, int(least + share * (most - least)))
        planned = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
        name = f"plan at {share:.0%}"
        plans[name] = plan
        bench.add(name, planned, make_step(plan.apply(planned), sample))
    seconds = bench.times()
    rows = []
    for name, step_s in seconds.items():
        plan = plans.get(name)
        rows.append(
            Row(
                name=name,
                budget_bytes=plan.budget_bytes if plan else 0,
                predicted_peak_bytes=plan.predicted_peak_bytes if plan else 0,
                measured_peak_bytes=bench.peaks[name],
                step_s=step_s,
                overhead=step_s / seconds["none"] - 1,
                predicted_overhead=plan.predicted_overhead if plan else 0.0,
                equal=bench.equal[name],
            )
        )
    return ModelCheck(title, recorded.step_s, seconds["none"], rows)


def _name_of(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    return run


class _Bench:
    """Measures steps that share one set of parameters."""

    def __init__(self, model: torch.nn.Module, sample: Sample, device: torch.device) -> None:
        self.parameters = list(model.parameters())
        self.buffers = list(model.buffers())
        self.kept = [buffer.clone() for buffer in self.buffers]
        self.device = device
        self.resident_bytes = unique_storage_bytes([*self.parameters, *self.buffers, *sample])
        self.steps: dict[str, Callable[[], Any]] = {}
        self.peaks: dict[str, int] = {}
        self.equal: dict[str, bool] = {}
        self.gradients: list[torch.Tensor | None] = []

    def add(self, name: str, model: torch.nn.Module, step: Callable[[], Any]) -> None:
        """Run a step twice: first for what is set up once, then for its peak and its gradients."""
        self._start()
        step()
        self._start()
        measured = measure_peak(step, self.device)
        gradients = [parameter.grad for parameter in self.parameters]
        self.gradients = self.gradients or gradients
        self.steps[name] = step
        self.peaks[name] = self.resident_bytes + measured.peak_above_start_bytes
        pairs = zip(gradients, self.gradients, strict=True)
        self.equal[name] = all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
        )

    def times(self) -> dict[str, float]:
        """Median seconds of each step; all take turns."""
        samples: dict[str, list[float]] = {name: [] for name in self.steps}
        for _ in range(_ROUNDS):
            for name, step in self.steps.items():
                self._start()
                samples[name].append(self._seconds(step))
        return {name: statistics.median(values) for name, values in samples.items()}

    def _seconds(self, step: Callable[[], Any]) -> float:
        if self.device.type != "cuda":
            start = time.perf_counter()
            step()
            return time.perf_counter() - start
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def _start(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in zip(self.buffers, self.kept, strict=True):
                buffer.copy_(value)
        torch.manual_seed(0)
