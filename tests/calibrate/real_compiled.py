"""Engine compile on models as people have them: `python -m tests.calibrate.real_compiled [NAME[:bf16|:autocast] ...]`.

Each is planned at budgets from the least to that which needs no recomputation, and every plan is verified: gradients,
loss, buffers and random states against the same regions compiled without a plan, the peak by the allocator. What the
compiler makes takes minutes, so this is no part of the tests that always run; `test_compiled.py` has what is small.
"""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import autoac
from autoac.calibrate.compiled.tried import CLOSE, tried
from autoac.step.step import TrainingStep
from tests.real_models import ALL, RealModel, make

NAMES = ("llama", "t5", "mixtral", "resnet", "vit", "gpt2", "llama:bf16", "llama:autocast", "vit:autocast")


def built(name: str) -> tuple[RealModel, Callable[[], contextlib.AbstractContextManager[Any]]]:
    """A model of `tests.real_models`, and the context around its steps."""
    kind, _, precision = name.partition(":")
    real = make(kind)
    if precision == "bf16":
        real.model.bfloat16()
    if precision == "autocast":
        return real, lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    return real, contextlib.nullcontext


def check(name: str, points: int = 3) -> list[str]:
    """What is wrong with plans for a model, a line each; prints what was found."""
    real, around = built(name)
    start, wrong = time.process_time(), []
    with around():
        profile = autoac.profile(real.model, real.sample, loss=real.loss, engine="compile")
        assert profile.compiled is not None
        for region in profile.compiled.regions:
            said = region.failure or f"{len(region.points)} points: {' '.join(p.name for p in region.points)}"
            print(f"  {len(region.calls)} x {profile.module_name(region.calls[0])!r}: {said}")
        curve = autoac.tradeoff(profile, points=points, engine="compile")
        for budget in sorted({int(b) for b in curve.frame["budget_bytes"]}):
            step = TrainingStep(real.model, real.sample, real.loss)
            try:
                plan = tried(profile, step, budget, lambda p, b=budget: autoac.solve(p, b, engine="compile"))
            except autoac.InfeasibleBudgetError as error:
                print(f"  {budget}: {error!s:.120}")
                wrong.append(f"{name} {budget}: predicted to fit, and does not")
                continue
            report = plan.verify(real.model, real.sample, real.loss)
            off = report.measured_peak_bytes / report.predicted_peak_bytes - 1
            print(
                f"  {budget}: {report.measured_peak_bytes} {off:+.3%} {'ok' if report.ok else report.first_difference}"
            )
            if not report.equal:
                wrong.append(f"{name} {budget}: {report.first_difference} differs")
            if not report.within_budget or abs(off) > CLOSE:
                wrong.append(
                    f"{name} {budget}: {report.measured_peak_bytes}, predicted {report.predicted_peak_bytes}"
                )
    print(f"  {time.process_time() - start:.0f} s of CPU time")
    return wrong


def main(names: list[str]) -> int:
    wrong = []
    for name in names or NAMES:
        assert name.partition(":")[0] in ALL, f"{name} is none of {', '.join(ALL)}"
        print(name)
        try:
            wrong += check(name)
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error!s:.500}")
            traceback.print_exc(file=sys.stdout)
    print("\n".join(wrong) or "all as planned")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
