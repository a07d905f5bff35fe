"""The way through: profile a step, solve for a budget, hand out the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autoac.compat import is_compiled_wrapper
from autoac.optimizer import with_optimizer
from autoac.plans import Plan
from autoac.recorder import check_model, device_bytes, device_of, record, unwrapped
from autoac.regions import RegionChoice, select_modules
from autoac.step import Loss, make_step
from autoac_solver.curve import Tradeoff
from autoac_solver.planning import Progress, limits, plan_budgets, plan_profile, resolve_engine
from autoac_solver.profile import Profile


def plan(
    model: torch.nn.Module,
    sample: Any,
    budget: int | str,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    engine: str = "auto",
    headroom: int | str = 0,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Plan:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    Runs two steps to profile them; model, sample and random states are left as they were. `plan.apply(model)` puts
    the plan on the model.

    Args:
        model: the model as it will be trained (mode, dtype, device).
        sample: a tensor, a tuple (positional arguments), a mapping (keyword arguments), or a callable without
            arguments that runs one whole step (forward, loss, backward).
        budget: limit for the peak of the whole step on the device: bytes, "20GB" (10^9), "20GiB" (2^30), or "80%" of
            the device's memory.
        loss: from the model's output to a scalar; left out, the output's `.loss`, or the output if scalar, else the
            mean of its floating tensors.
        optimizer: if given, its state and what its `step()` takes count as part of the step. It is not run.
        regions: None (found automatically), names or globs of modules, or a predicate `(fqn, module) -> bool`.
        engine: "replay" (runs single ops again), "sac" (a policy for torch's selective checkpointing), or "auto":
            replay, but sac for a compiled model.
        headroom: part of the budget to leave free, for what no plan can see (fragmentation, other libraries).
        time_limit_s: for the solver, seconds.
        gap: how far from the least time the plan may be, as a fraction of the step's time.
        progress: called with a text and the share done.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        ProfilingError: the step could not be recorded.
        ValueError: an argument makes no sense.
    """
    compiled = is_compiled_wrapper(model) or getattr(model, "_compiled_call_impl", None) is not None
    model = unwrapped(model)
    check_model(model)
    _, reason = resolve_engine(engine)
    limits(budget, headroom, device_bytes(device_of(model)))  # refused before anything runs
    if engine == "auto":
        engine = "sac" if compiled else "replay"
        reason = "auto: the model is compiled" if compiled else "auto: eager mode"
    recorded = profile(model, sample, loss=loss, optimizer=optimizer, progress=progress)
    names = select_modules(model, regions)
    return Plan(
        plan_profile(
            recorded,
            budget,
            engine=engine,
            engine_reason=reason,
            regions=names,
            headroom=headroom,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    )


def profile(
    model: torch.nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    mode: str = "auto",
    progress: Progress | None = None,
) -> Profile:
    """Record one training step: time and bytes of every op, and what autograd saves.

    The step is run twice with everything recomputed, so a model that does not fit without checkpointing can be
    profiled. Afterwards model, sample and random states are as they were, also if it fails.

    Args:
        model, sample, loss, optimizer, progress: as for `plan`.
        regions: checked here; the profile does not depend on it.
        mode: "real" or "auto": the step is run for real.

    Raises:
        ProfilingError: the step could not be recorded.
    """
    if mode not in ("auto", "real"):
        raise ValueError(f"mode is {mode!r}; possible are 'auto' and 'real'.")
    model = unwrapped(model)
    check_model(model)
    select_modules(model, regions)
    recorded = record(model, sample, make_step(model, sample, loss), progress)
    return recorded if optimizer is None else with_optimizer(recorded, model, optimizer)


def solve(
    profile: Profile,
    budget: int | str,
    *,
    engine: str = "auto",
    regions: str | Sequence[str] | None = None,
    headroom: int | str = 0,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Plan:
    """Plan from a profile; no model is needed.

    Args:
        profile: recorded by `profile`, or loaded.
        regions: names of modules; None chooses them.
        budget, engine, headroom, time_limit_s, gap, progress: as for `plan`; "auto" is "replay" here.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
    """
    return Plan(
        plan_profile(
            profile,
            budget,
            engine=engine,
            regions=regions,
            headroom=headroom,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    )


def tradeoff(
    profile: Profile,
    budgets: Sequence[int | str] | None = None,
    points: int = 20,
    *,
    engine: str = "auto",
    regions: str | Sequence[str] | None = None,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Tradeoff:
    """Plans over a range of budgets, from the least feasible one to that which needs no recomputation.

    Args:
        budgets: the budgets to plan for; those that no plan meets are left out. None spreads `points` of them evenly.
        points: how many budgets, at least 2.
        time_limit_s: for each budget.
        profile, engine, regions, gap, progress: as for `solve`. Ctrl-C keeps what is done so far.

    Raises:
        InfeasibleBudgetError: `budgets` are given, and no plan meets any of them.
    """
    curve = plan_budgets(
        profile,
        budgets,
        points,
        engine=engine,
        regions=regions,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    )
    return replace(curve, plans=tuple(map(Plan, curve.plans)))
