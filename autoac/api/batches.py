"""Plan for several batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoac.api.checks import Mode
from autoac.api.profiling import profile
from autoac.plans import Tradeoff
from autoac.progress import Progress, progress_shown
from autoac_solver.plan.batches import BatchTradeoff, plan_batches
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.profile import Profile


def batch_tradeoff(
    make: Callable[[int], tuple[Any, ...]] | Mapping[int, Profile],
    budgets: int | str | Iterable[int | str],
    batch_sizes: Iterable[int] | None = None,
    *,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    mode: Mode | None = None,
    device: str | Path | None = None,
    engine: EngineName = "auto",
    regions: str | Iterable[str] | None = None,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress = None,
) -> BatchTradeoff:
    """Plans for several batch sizes: the largest that fits a budget, and which trains the most samples per second.

    Args:
        make: from a batch size to `(model, sample)` or `(model, sample, loss)`; or the profile of each batch size.
        budgets: one or more.
        batch_sizes: the sizes to plan for. None takes all given profiles; with a function it searches for the largest
            batch that fits the largest budget, by doubling from 1 and then bisecting.
        optimizer: from a model to its optimizer, which then counts as in `profile`.
        mode, device: as for `profile`. Left out, no step is run, so nothing has to fit; engine compile runs steps.
        engine, regions, gap, progress: as for `solve`.
        time_limit_s: solver seconds for each batch size and budget.

    Raises:
        InfeasibleBudgetError: not even the smallest batch fits the largest budget.
        ProfilingError: a step could not be recorded, or a region is no module of it, or inside another one.
        ValueError: an argument is invalid; raised before anything is profiled, unless only a call of `make` shows it.
    """

    def recorded(batch: int) -> Profile:
        assert not isinstance(make, Mapping)
        made = make(batch)
        if not isinstance(made, (tuple, list)) or len(made) not in (2, 3):
            size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
            raise ValueError(
                f"make({batch}) returned a {type(made).__name__}{size}; make must return (model, sample) or (model, "
                "sample, loss)."
            )
        model, sample, *loss = made
        return profile(
            model,
            sample,
            loss=loss[0] if loss else None,
            optimizer=None if optimizer is None else optimizer(model),
            mode=mode or ("real" if compiles(engine) else "fake"),
            device=device,
            engine=engine,
            regions=regions if compiles(engine) else None,  # these are compiled while profiling
            progress=False,
        )

    if isinstance(make, Mapping) and (optimizer is not None or mode is not None or device is not None):
        raise ValueError("optimizer, mode and device are for profiles to be made; these are there already.")
    with progress_shown("planning", progress) as tell:
        found = plan_batches(
            make if isinstance(make, Mapping) else recorded,
            budgets,
            batch_sizes,
            engine=engine,
            regions=regions,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=tell,
        )
    return replace(found, curves={batch: Tradeoff.of(curve) for batch, curve in found.curves.items()})
