"""A spread model is trained with a plan and without, and both are compared."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from measured_models import Subject
from ways import Way

import autoac
from autoac.measure import measure_peak

STEPS, MEASURED = 5, 3


@dataclass(frozen=True)
class Outcome:
    """What came of one plan on one rank.

    Args:
        equal: weights after five steps are to the bit those without a plan.
        predicted, measured, budget, unplanned: peaks in bytes; measured is the least of the last steps, for gloo's
            threads hold buffers on in some. Unplanned is predicted.
        recomputing: how many regions recompute something.
    """

    engine: str
    equal: bool
    predicted: int
    measured: int
    budget: int
    unplanned: int
    recomputing: int

    @property
    def off(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def is_right(self) -> bool:
        return self.equal and self.recomputing > 0 and abs(self.off) < 0.01 and self.measured <= self.budget


def outcomes(
    subject: Subject, way: Way, rank: int, engines: Iterable[str], fractions: Iterable[float]
) -> Iterator[dict[str, Any]]:
    """Each engine at each budget, a fraction of the peak without a plan, or the least possible."""
    batch = subject.batch(rank // way.copies)
    plain, _ = trained(way, way.spread(subject.make()), batch)
    model = way.spread(subject.make())
    trained(way, model, batch, steps=2)  # DDP builds its buckets anew after the first
    profile = autoac.profile(model, functools.partial(way.run, model, batch))
    for engine in engines:
        loose = autoac.solve(profile, "1GB", engine=engine)
        for fraction in fractions:
            plan = solved(profile, int(fraction * loose.predicted_peak_bytes), engine)
            if not way.alone:  # times differ between ranks, and so do plans
                plan = autoac.parallel.agree(plan, model).on(profile)
            weights, above_start = trained(way, plan.apply(way.spread(subject.make())), batch)
            yield asdict(
                Outcome(
                    engine,
                    len(plain) == len(weights) and all(map(torch.equal, plain, weights)),
                    plan.predicted_peak_bytes,
                    plan.resident_bytes + above_start,
                    plan.budget_bytes,
                    loose.predicted_peak_bytes,
                    sum(region.wrapped for region in plan.regions),
                )
            )


def solved(profile: autoac.Profile, budget_bytes: int, engine: str) -> autoac.Plan:
    """The plan for this budget, or for the least that is possible."""
    try:
        return autoac.solve(profile, budget_bytes, engine=engine)
    except autoac.InfeasibleBudgetError as error:
        return autoac.solve(profile, error.minimum_bytes, engine=engine)


def trained(way: Way, model: Any, batch: Any, steps: int = STEPS) -> tuple[list[torch.Tensor], int]:
    """The whole parameters after some steps, and the least peak above a step's start of the last ones."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(0)  # of dropout
    peaks = []
    for step in range(steps):
        optimizer.zero_grad()
        if step < steps - MEASURED:
            way.run(model, batch)
        else:
            peaks.append(measure_peak(lambda: way.run(model, batch)).peak_above_start_bytes)
        optimizer.step()
    optimizer.zero_grad()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in parameters], min(peaks, default=0)
