"""Self-check: profile, plan, train and measure two models on this device, against no and full checkpointing."""

from __future__ import annotations

import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from autoac._version import __version__
from autoac.api import profile
from autoac.calibrate.models import LLAMA, RESNET, Sample, llama, resnet
from autoac.compare.blocks import find_blocks
from autoac.compare.measure import Bench, Configuration
from autoac.compare.ours import planned
from autoac.compare.strategies import by_hand
from autoac.compare.workload import Workload
from autoac.device import cuda_of_build, device_for
from autoac.price.engine_costs import engine_costs
from autoac.progress import Tell
from autoac_solver.allocator.options import options_in_environment
from autoac_solver.build.engines import DEFAULT
from autoac_solver.plan.planning import least_budget_bytes

BUDGETS = 4
_ROUNDS = 5
_PEAK_TOLERANCE = 0.01
_SPARE_BYTES = 8_000_000
"""Bytes by which a peak may exceed its budget on a device that counts blocks, for their rests: see `Reserved memory` in
docs/guides/on-a-gpu.md."""


@dataclass(frozen=True)
class Row:
    """One way to run the step, measured.

    Args:
        name: "none", "none again", "full, each block", or where the plan's budget lies between the least
            feasible one (0 %) and the peak of "none".
        budget_bytes, predicted_peak_bytes: of the plan, 0 for the others.
        measured_peak_bytes: resident bytes included.
        step_s: median of the rounds, in which all rows take turns.
        overhead: extra step time over "none", as a fraction; predicted_overhead: the plan's prediction.
        equal: gradients and buffers are those of "none" to the bit.
        spare_bytes: bytes by which the measured peak may exceed the budget, for parts of blocks that no plan sees.
    """

    name: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    step_s: float
    overhead: float
    predicted_overhead: float
    equal: bool
    spare_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether a plan's row is equal, within its budget, and its peak predicted to 1 %; true for other rows."""
        if not self.budget_bytes:
            return True
        error = abs(self.measured_peak_bytes / self.predicted_peak_bytes - 1)
        within = self.measured_peak_bytes <= self.budget_bytes + self.spare_bytes
        return self.equal and within and error <= _PEAK_TOLERANCE


@dataclass(frozen=True)
class ModelCheck:
    """Results for one model.

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
    """Results of `autoac selfcheck`.

    Args:
        conditions: device, torch, threads, date, and the method that measured the peaks.
    """

    conditions: dict[str, str]
    models: list[ModelCheck]

    @property
    def ok(self) -> bool:
        """Whether every plan kept its promises."""
        return all(row.ok for model in self.models for row in model.rows)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "ok": self.ok}


def selfcheck(device: torch.device, size: str, progress: Tell | None = None) -> SelfCheck:
    """Check both models on a device; in bf16 on CUDA, with deterministic kernels.

    Args:
        device: CPU or CUDA.
        size: "tiny", "small" or "full", see `autoac.calibrate.models`.
        progress: called with a text and the share done.
    """
    tell = progress or (lambda *_: None)
    dtype = device_for(device).training_dtype
    kind = str(dtype).removeprefix("torch.")
    deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        tell("Llama-shaped model", 0.0)
        decoder, tokens = llama(LLAMA[size], dtype, device)
        found = [_check(f"Llama-shaped, {kind}, {LLAMA[size]}", decoder, tokens, device)]
        del decoder, tokens
        tell("ResNet-shaped model", 0.5)
        network, pictures = resnet(RESNET[size], dtype, device)
        found.append(_check(f"ResNet-shaped, {kind}, {RESNET[size]}", network, pictures, device))
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warned_only)
    conditions = {
        "on": device_for(device).name() or "CPU",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "date": time.strftime("%Y-%m-%d"),
        "ruler": device_for(device).ruler,
    }
    return SelfCheck(conditions, found)


def for_an_issue(found: SelfCheck, device: torch.device) -> dict[str, Any]:
    """Data for a bug report, without anything that identifies the machine, the model or data."""
    known = device_for(device)
    return {
        "schema": "autoac.selfcheck",
        "schema_version": 1,
        "autoac": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "CUDA": cuda_of_build(),
        "device_bytes": known.total_bytes(),
        "allocator": options_in_environment(),
        "engine_costs": engine_costs(device),
        "selfcheck": found.as_json(),
    }


def _check(title: str, model: torch.nn.Module, sample: Sample, device: torch.device) -> ModelCheck:
    recorded = profile(model, sample, mode="real")
    bench = Bench(
        Workload("selfcheck", title, model, sample, find_blocks(model)), device, recorded.resident_bytes
    )
    found = [bench.examine(strategy) for strategy in by_hand(bench.workload.blocks, {}, every=())]
    least, most = least_budget_bytes(recorded), found[0].peak_bytes
    shares = [index / BUDGETS for index in range(BUDGETS)]
    budgets = {f"plan at {share:.0%}": int(least + share * (most - least)) for share in shares}
    found += [bench.examine(strategy) for strategy in planned(recorded, budgets, DEFAULT)]
    failed = next((c for c in found if c.error), None)
    if failed is not None:
        raise RuntimeError(f"{title}: {failed.strategy.name} cannot be run here: {failed.error}")
    bench.time(found, _ROUNDS, lambda *_: None)
    step_s = {c.strategy.name: statistics.median(c.wall_s) for c in found}
    spare = _SPARE_BYTES if device_for(device).block_bytes > 1 else 0
    rows = [_row(c, step_s, spare) for c in found]
    return ModelCheck(title, recorded.step_s, step_s["none"], rows)


def _row(configuration: Configuration, step_s: dict[str, float], spare_bytes: int) -> Row:
    strategy = configuration.strategy
    return Row(
        name=strategy.name,
        budget_bytes=strategy.budget_bytes,
        predicted_peak_bytes=strategy.predicted_peak_bytes or 0,
        measured_peak_bytes=configuration.peak_bytes,
        step_s=step_s[strategy.name],
        overhead=step_s[strategy.name] / step_s["none"] - 1,
        predicted_overhead=strategy.predicted_overhead or 0.0,
        equal=configuration.gradients_equal and configuration.buffers_equal,
        spare_bytes=spare_bytes,
    )
