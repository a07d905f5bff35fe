"""Training loops with and without a plan: `python -m benchmarks.loops` prints the table of the docs.

Each loop trains from the same start without a plan, then once to measure the step, then under a budget 30 % of the way
from the least feasible one to the peak without a plan. All weights after the last step are compared by bits, and the
predicted peak with that of a planned step, by the allocator's own count. The loops are those of the tests, and that of
diffusers' page. `--write` puts the table into the page of the docs, and the figures into `benchmarks/results`. A run
that was stopped goes on where it was, if code and libraries are the same: `build/loops.json` has its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import conftest  # noqa: F401 - its settings have to be made before torch is first used

# isort: split

import msgspec
import torch

import autoac
from autoac.measure import measure_peak
from autoac.plans import Plan
from autoac_solver.plan.planning import least_budget_bytes
from autoac_solver.records.disk.files import write_bytes
from tests import real_models
from tests.automatic import test_auto, test_cycles
from tests.integrations import (
    test_accelerate,
    test_lengths,
    test_lightning,
    test_transformers,
    test_trl,
)
from tests.record import test_varying

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "loops" / "index.md"
RESULTS = ROOT / "benchmarks" / "results" / "loops.json"
UNFINISHED = ROOT / "build" / "loops.json"
_BEGIN, _END = "<!-- loops: python -m benchmarks.loops --write -->", "<!-- end of loops -->"
ENOUGH = 10**9
STEPS = 20


@dataclass(frozen=True)
class Trained:
    """Results of one loop; the last two are None if it ran without a plan.

    Args:
        measured_peak_bytes: of a planned step, resident bytes included.
    """

    model: torch.nn.Module
    plan: Plan | None
    measured_peak_bytes: int | None


class Row(msgspec.Struct, frozen=True):
    """One loop's figures."""

    loop: str
    steps: int
    weights_equal: bool
    unplanned_peak_bytes: int
    budget_bytes: int
    measured_peak_bytes: int
    predicted_peak_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the predicted peak."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def kept(self) -> bool:
        """Whether weights are equal and the peak is within the budget."""
        return self.weights_equal and self.measured_peak_bytes <= self.budget_bytes


class Results(msgspec.Struct, frozen=True):
    """All rows, and their conditions."""

    conditions: str
    rows: list[Row]


Loop = Callable[[int | None, int], Trained]


def _plain(name: str) -> Loop:
    def train(budget: int | None, steps: int) -> Trained:
        run = test_auto.Run(test_auto.LOOPS[name](), budget, steps=steps)
        if budget is None:
            return Trained(run.model, None, None)
        return Trained(run.model, run.plan, run.measured_peak_bytes)

    return train


def _lengths(budget: int | None, steps: int) -> Trained:
    run = test_lengths.trained(budget, test_lengths.random_lengths(steps))
    return Trained(run.model, run.plan, max((peak for _, peak in run.peaks), default=None))


def _adversarial(**settings: Any) -> Loop:
    """A step is one of the critic's optimizer, or more, and one of the generator's."""

    def train(budget: int | None, steps: int) -> Trained:
        model, handle = test_cycles.trained(budget, **settings, steps=steps)
        return Trained(model, handle and handle.plan, handle and handle.measured_peak_bytes)

    return train


def _accelerate(**settings: Any) -> Loop:
    def train(budget: int | None, steps: int) -> Trained:
        model, handle = test_accelerate.trained(budget, steps, **settings)
        return Trained(model, handle and handle.plan, handle and handle.measured_peak_bytes)

    return train


def _trainer(**settings: Any) -> Loop:
    def train(budget: int | None, steps: int) -> Trained:
        callback = None if budget is None else test_transformers.AutoACCallback(budget)
        with tempfile.TemporaryDirectory() as folder:
            trainer = test_transformers.trained(Path(folder), callback, steps, **settings)
        return Trained(trainer.model, callback and callback.plan, callback and callback.measured_peak_bytes)

    return train


def _trl(**kind: bool) -> Loop:
    def train(budget: int | None, steps: int) -> Trained:
        callback = None if budget is None else test_trl.AutoACCallback(budget)
        with tempfile.TemporaryDirectory() as folder:
            trainer = test_trl.trained(Path(folder), callback, steps, **kind)
        return Trained(trainer.model, callback and callback.plan, callback and callback.measured_peak_bytes)

    return train


def _lightning(setting: str) -> Loop:
    def train(budget: int | None, steps: int) -> Trained:
        callback = None if budget is None else test_lightning.AutoACCallback(budget)
        task = test_lightning.trained(setting, callback, steps)
        return Trained(task, callback and callback.plan, callback and callback.measured_peak_bytes)

    return train


def _diffusers(budget: int | None, steps: int) -> Trained:
    """Noise prediction with a UNet, at random timesteps."""
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    torch.manual_seed(0)
    model = real_models.unet().model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = DDPMScheduler()
    handle = None if budget is None else autoac.auto(model, budget, measure=True)
    for _ in range(steps):
        noise = torch.randn(8, 3, 16, 16)
        times = torch.randint(scheduler.config["num_train_timesteps"], noise.shape[:1])
        noisy = scheduler.add_noise(torch.randn_like(noise), noise, times)  # type: ignore[arg-type]
        torch.nn.functional.mse_loss(model(noisy, times).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(model, handle and handle.plan, handle and handle.measured_peak_bytes)


def _resumed(budget: int | None, steps: int) -> Trained:
    """Half of the steps, then the other half by a second trainer from the first one's checkpoint."""
    half = steps // 2
    with tempfile.TemporaryDirectory() as folder:
        for resume, count in ((False, half), (True, steps)):
            callback = None if budget is None else test_transformers.AutoACCallback(budget)
            trainer = test_transformers.trained(
                Path(folder), callback, count, resume, save_strategy="steps", save_steps=half
            )
    return Trained(trainer.model, callback and callback.plan, callback and callback.measured_peak_bytes)


def _varying(build: Callable[[], tuple[torch.nn.Module, dict[str, Any]]]) -> Loop:
    """A plan made before the loop, for the step that calls all layers."""

    def train(budget: int | None, steps: int) -> Trained:
        test_varying.seed(0)
        model, sample = build()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        plan = None if budget is None else autoac.plan(model, sample, budget)
        if plan is not None:
            plan.apply(model)
        test_varying.seed(1)
        peaks = []

        def step() -> None:
            output = model(**sample)  # alive until the step is over, as in the usual loop
            output.loss.backward()

        for _ in range(steps):
            taken = measure_peak(step)
            peaks.append(taken.peak_above_start_bytes)
            optimizer.step()
            optimizer.zero_grad()
        if plan is None:
            return Trained(model, None, None)
        return Trained(model, plan, plan.resident_bytes + max(peaks))

    return train


LOOPS: dict[str, tuple[Loop, int]] = {
    "bare loop": (_plain("bare"), STEPS),
    "bare, 2 micro-batches and clipping": (_plain("accumulating"), STEPS),
    "bare, autocast to bfloat16": (_plain("under autocast"), STEPS),
    "bare, autocast to float16 and `GradScaler`": (_plain("scaled"), STEPS),
    "GAN, two optimizers by turns": (_adversarial(), STEPS),
    "GAN, two steps of the critic for one of the generator": (_adversarial(critics=2), STEPS),
    "accelerate": (_accelerate(), STEPS),
    "accelerate, bf16": (_accelerate(mixed_precision="bf16"), STEPS),
    "accelerate, 2 micro-batches": (_accelerate(gradient_accumulation_steps=2), STEPS),
    "Trainer, fp32": (_trainer(), STEPS),
    "Trainer, bf16": (_trainer(bf16=True), STEPS),
    "Trainer, 4 micro-batches": (_trainer(gradient_accumulation_steps=4), STEPS),
    "Trainer, its own checkpointing asked for, evaluation every 5 steps": (
        _trainer(gradient_checkpointing=True, eval_strategy="steps", eval_steps=5),
        STEPS,
    ),
    "Trainer, resumed from a checkpoint after 10 steps": (_resumed, STEPS),
    "SFTTrainer, its defaults (bf16)": (_trl(), STEPS),
    "SFTTrainer, LoRA": (_trl(lora=True), STEPS),
    "DPOTrainer, its defaults (bf16)": (_trl(dpo=True), STEPS),
    "Lightning": (_lightning("fp32"), STEPS),
    "Lightning, bf16-mixed": (_lightning("bf16"), STEPS),
    "Lightning, 2 micro-batches and clipping": (_lightning("accumulation"), STEPS),
    "Lightning, manual optimization": (_lightning("manual"), STEPS),
    "Lightning, GAN with two optimizers": (_lightning("two optimizers"), STEPS),
    "diffusers UNet": (_diffusers, STEPS),
    "30 random lengths, planned anew for the longest": (_lengths, 30),
    "WavLM, layer drop 0.2": (_varying(test_varying.speech), 30),
    "LED, layer drop 0.2": (_varying(test_varying.long_documents), 30),
    "Swin, drop path 0.2": (_varying(test_varying.pictures), 30),
}


def measure(name: str, steps: int | None = None) -> Row:
    """Train one loop without a plan and under a budget that requires recomputation.

    Args:
        name: a key of `LOOPS`.
        steps: fewer than the table's, for a test.
    """
    train, count = LOOPS[name]
    steps = steps or count
    without = train(None, steps)
    ample = train(ENOUGH, steps).plan
    assert ample is not None
    full, least = ample.record.unplanned_peak_bytes, least_budget_bytes(ample.record.profile)
    planned = train(int(least + 0.3 * (full - least)), steps)
    assert planned.plan is not None
    assert planned.measured_peak_bytes is not None
    assert any(region.wrapped for region in planned.plan.regions)
    weights = planned.model.state_dict()
    return Row(
        loop=name,
        steps=steps,
        weights_equal=all(
            torch.equal(value, weights[key]) for key, value in without.model.state_dict().items()
        ),
        unplanned_peak_bytes=planned.plan.record.unplanned_peak_bytes,
        budget_bytes=planned.plan.budget_bytes,
        measured_peak_bytes=planned.measured_peak_bytes,
        predicted_peak_bytes=planned.plan.predicted_peak_bytes,
    )


def table(results: Results) -> str:
    """The table as in the docs, with its conditions."""
    names = [
        "loop",
        "steps",
        "weights equal",
        "peak without a plan",
        "budget",
        "measured peak",
        "within",
        "prediction",
    ]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in results.rows:
        cells = [
            row.loop,
            str(row.steps),
            "yes" if row.weights_equal else "NO",
            *(
                f"{size / 1e6:.3f} MB"
                for size in (row.unplanned_peak_bytes, row.budget_bytes, row.measured_peak_bytes)
            ),
            "yes" if row.measured_peak_bytes <= row.budget_bytes else "NO",
            f"{row.error:+.4%}".replace("%", " %"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Measured with {results.conditions}.", ""])


def in_docs() -> str:
    """The table on the page of the docs."""
    return PAGE.read_text().partition(f"{_BEGIN}\n")[2].partition(_END)[0]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Train the loops with and without a plan, and make the docs' table."
    )
    parser.add_argument("--write", action="store_true", help="into the docs and benchmarks/results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # the trainers', about machines without accelerators
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    results = measure_all(UNFINISHED, f"{_conditions()}; code {_code()}")
    rows = results.rows
    if arguments.write:
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
        before, _, rest = PAGE.read_text().partition(f"{_BEGIN}\n")
        PAGE.write_text(f"{before}{_BEGIN}\n{table(results)}{_END}{rest.partition(_END)[2]}")
    else:
        sys.stdout.write(table(results))
    UNFINISHED.unlink()
    return 0 if all(row.kept for row in rows) else 1


def measure_all(unfinished: Path, state: str) -> Results:
    """Measure all loops, without those that a stopped run has measured.

    Args:
        unfinished: a file that is written after each row.
        state: of code and libraries; rows of another state are measured again.
    """
    rows: list[Row] = []
    if unfinished.exists():
        earlier = msgspec.json.decode(unfinished.read_bytes(), type=Results)
        rows = earlier.rows if earlier.conditions == state else []
    unfinished.parent.mkdir(exist_ok=True)
    for name in list(LOOPS)[len(rows) :]:
        print(name, file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(io.StringIO()):  # the trainers print their logs
            rows.append(measure(name))
        write_bytes(unfinished, msgspec.json.encode(Results(state, rows)))
    return Results(_conditions(), rows)


def _code() -> str:
    """A digest of all code that the rows depend on."""
    folders = ("autoac", "solver", "tests", "benchmarks")
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def load() -> Results:
    """The stored results."""
    return msgspec.json.decode(RESULTS.read_bytes(), type=Results)


def _conditions() -> str:
    import accelerate
    import diffusers
    import lightning
    import peft
    import transformers
    import trl

    found = [
        f"{m.__name__} {m.__version__}" for m in (accelerate, transformers, trl, peft, lightning, diffusers)
    ]
    return f"torch {torch.__version__.partition('+')[0]} on CPU, one thread, {', '.join(found)}"


if __name__ == "__main__":
    sys.exit(main())
