"""The way through: profile a step, solve for a budget, hand out the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoac.compat import is_compiled_wrapper
from autoac.fitting import fitted
from autoac.measure import ONE_AT_A_TIME, unique_storage_bytes
from autoac.optimizer import check_optimizer, with_optimizer
from autoac.plans import Plan, Tradeoff
from autoac.policies import Policies, as_policies, check_modules, listed
from autoac.recorder import (
    check_model,
    device_bytes,
    device_of,
    free_bytes,
    record_fake,
    recorded_step,
    unwrapped,
)
from autoac.regions import RegionChoice, select_modules
from autoac.step import Loss, is_whole_step
from autoac_solver.arguments import check_effort
from autoac_solver.batches import BatchTradeoff, plan_batches
from autoac_solver.devices import DeviceTable, find_device, on_device
from autoac_solver.errors import ProfilingError
from autoac_solver.format import format_bytes
from autoac_solver.planning import Progress, limits, plan_budgets, plan_profile, resolve_engine
from autoac_solver.profile import Profile

MODES = ("auto", "real", "fake")


def plan(
    model: torch.nn.Module,
    sample: Any,
    budget: int | str,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    policies: Policies = (),
    engine: str = "auto",
    headroom: int | str = 0,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Plan:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    Runs up to four steps to profile them, and where the engine's bookkeeping counts some more, or forward passes alone,
    to time it (see `fitting`); model, sample and random states are left as they were. `plan.apply(model)` puts the plan
    on the model.

    Args:
        model: the model as it will be trained (mode, dtype, device).
        sample: a tensor, a tuple (positional arguments), a mapping (keyword arguments), or a callable without
            arguments that runs one whole step (forward, loss, backward); it is run twice, and what it changes besides
            tensors (the schedule of a learning rate, say) stays so.
        budget: limit for the peak of the whole step on the device: bytes, "20GB" (10^9), "20GiB" (2^30), or "80%" of
            the device's memory.
        loss: from the model's output to a scalar; left out, the output's `.loss`, or the output if scalar, else the
            mean of its floating tensors.
        optimizer: if given, its state and what its `step()` takes count as part of the step. It is not run.
        regions: None (found automatically), names or globs of modules, or a predicate `(fqn, module) -> bool`. A glob
            stands for the outermost modules that it finds.
        policies: what you want of some values whatever the plan finds best: `autoac.Policy` objects, a function for
            torch's selective checkpointing, or several of these; see `autoac.policies`.
        engine: "replay" (runs single ops again), "sac" (a policy for torch's selective checkpointing), or "auto":
            replay, but sac for a compiled model.
        headroom: part of the budget to leave free, for what no plan can see (fragmentation, other libraries).
        time_limit_s: for the solver, seconds.
        gap: how far from the least time the plan may be, as a fraction of the step's time.
        progress: called with a text and the share done.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies clash, or one is about nothing in the step.
        ProfilingError: the step could not be recorded, or a region is no module of the model, or inside of another.
        ValueError: an argument makes no sense; before anything runs.
    """
    given, compiled = model, _runs_compiled(model)
    model = unwrapped(model)
    check_model(model)
    _, reason = resolve_engine(engine)
    # What can be refused before anything runs.
    limits(budget, headroom, device_bytes(device_of(model)) or None)
    check_effort(time_limit_s, gap)
    names = select_modules(model, regions)
    policies = listed(policies)
    check_modules(policies, model)
    if engine == "auto":
        engine = "sac" if compiled else "replay"
        reason = "auto: the model is compiled" if compiled else "auto: eager mode"
    recorded = profile(given, sample, loss=loss, optimizer=optimizer, progress=progress)
    if names is not None:  # a glob may find modules that this step does not call
        called = {call.fqn for call in recorded.calls}
        names = [name for name in names if name in called] or names
    return Plan(
        plan_profile(
            recorded,
            budget,
            engine=engine,
            engine_reason=reason,
            regions=names,
            policies=as_policies(policies, recorded),
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
    device: str | Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Record one training step: time and bytes of every op, and what autograd saves.

    The step is run with everything recomputed, so a model that does not fit without checkpointing can be profiled;
    where the engine's bookkeeping counts and the step fits, its forward or all of it is also run as it is, for the time
    (see `fitting`). On fake tensors nothing of it is allocated: for a model that does not fit at all, or is on the meta
    device. Afterwards model, sample and random states are as they were, also if it fails. Threads that profile at once
    take turns, so the step of one must not wait for another's.

    Args:
        model, sample, loss, optimizer, progress: as for `plan`.
        regions: checked here; the profile does not depend on it.
        mode: "real" runs the step; "fake" runs only its shapes, and each distinct op once by itself where that can be
            afforded; "auto" takes "real" where the step fits, else "fake", and `Profile.notes` says so.
        device: a GPU one does not have: "h200" and the like, or a cost table that `autoac calibrate` wrote. Times are
            taken from its table, and "auto" is "fake" unless the step depends on values.

    Raises:
        ProfilingError: the step could not be recorded.
        ProfileError: there is no such device.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; possible are {', '.join(map(repr, MODES))}.")
    table = None if device is None else find_device(device)
    lean_losses = not _runs_compiled(model)  # the compiler makes a loss of its own
    model = unwrapped(model)
    check_model(model)
    select_modules(model, regions)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    with ONE_AT_A_TIME:
        recorded = _recorded(model, sample, loss, mode, table, lean_losses, progress)
        if optimizer is not None:
            recorded = with_optimizer(recorded, model, optimizer, measure=table is None)
    if not model.training:
        recorded = _noted(
            recorded, "the model was in eval mode: call model.train() first if it will be trained so"
        )
    return recorded if table is None else on_device(recorded, table)


def _recorded(
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None,
    mode: str,
    table: DeviceTable | None,
    lean_losses: bool,
    progress: Progress | None,
) -> Profile:
    """The profile on this device, for real or on fake tensors.

    Args:
        table: of another device whose times are wanted in place of this one's.
        lean_losses: as for `recorded_step`.
    """
    timed = table is None
    as_cuda = table is not None and table.kind == "cuda" and device_of(model).type != "cuda"
    fake = functools.partial(record_fake, model, sample, loss, progress, timed, as_cuda, lean_losses)
    real = functools.partial(_recorded_for_real, model, sample, loss, timed, lean_losses, progress)
    if mode == "fake":
        return fake()
    if mode == "real":
        return real()
    reason = _reason_for_fake(model, timed)
    if reason:
        try:
            return _noted(fake(), f"mode auto: {reason}")
        except ProfilingError:
            if timed or device_of(model).type == "meta":
                raise
        return _noted(real(), "mode auto: fake tensors will not do for this model")
    try:
        return real()
    except (torch.OutOfMemoryError, MemoryError) as error:
        reason = f"the step did not fit here ({error!s:.80})"  # the error holds the step's tensors until it is handled
    return _noted(fake(), f"mode auto: {reason}")


def _recorded_for_real(
    model: torch.nn.Module,
    sample: Any,
    loss: Loss | None,
    timed: bool,
    lean_losses: bool,
    progress: Progress | None,
) -> Profile:
    profile, gives_gradients_to_its_own = recorded_step(model, sample, loss, progress, lean_losses)
    if not timed or is_whole_step(sample) or not gives_gradients_to_its_own:
        return profile
    return fitted(profile, model, sample, loss, free_bytes(device_of(model)), progress)


def _runs_compiled(model: torch.nn.Module) -> bool:
    """Whether calls of the model as a whole run compiled."""
    return is_compiled_wrapper(model) or getattr(model, "_compiled_call_impl", None) is not None


def _reason_for_fake(model: torch.nn.Module, timed: bool) -> str:
    """Why the step should not be run for real, "" if it may be."""
    device = device_of(model)
    if device.type == "meta":
        return "the model is on the meta device"
    if not timed:
        return "only shapes are needed for another device"
    gradients = unique_storage_bytes(p for p in model.parameters() if p.requires_grad)
    free = free_bytes(device)
    if gradients > free:
        return f"gradients alone take {format_bytes(gradients)}, and {format_bytes(free)} are free"
    return ""


def _noted(profile: Profile, note: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note))


def solve(
    profile: Profile,
    budget: int | str,
    *,
    engine: str = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    headroom: int | str = 0,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Plan:
    """Plan from a profile; no model is needed.

    Args:
        profile: recorded by `profile`, or loaded.
        regions: names or globs of modules of the profiled step; None chooses them.
        budget, policies, engine, headroom, time_limit_s, gap, progress: as for `plan`; "auto" is "replay" here.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies clash, or one is about nothing in the step.
        ProfilingError: a region is no module of the profiled step, or inside of another.
        ValueError: an argument makes no sense.
    """
    _check_is_profile(profile)
    return Plan(
        plan_profile(
            profile,
            budget,
            engine=engine,
            regions=regions,
            policies=as_policies(policies, profile),
            headroom=headroom,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    )


def _check_is_profile(profile: Any) -> None:
    if not isinstance(profile, Profile):
        hint = (
            "autoac.Profile.load reads one from a file"
            if isinstance(profile, (str, Path))
            else "autoac.profile makes it"
        )
        raise ValueError(f"profile is a {type(profile).__name__}, not a recorded step: {hint}.")


def tradeoff(
    profile: Profile,
    budgets: int | str | Iterable[int | str] | None = None,
    points: int = 20,
    *,
    engine: str = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> Tradeoff:
    """Plans over a range of budgets, from the least feasible one to that which needs no recomputation.

    Args:
        budgets: one or more to plan for; those that no plan meets are left out. None spreads `points` of them evenly.
        points: how many budgets, at least 2.
        time_limit_s: for each budget; the plan of one budget is where the search for the next larger one starts.
        profile, engine, regions, policies, gap, progress: as for `solve`. Ctrl-C keeps what is done so far.

    Raises:
        InfeasibleBudgetError: `budgets` are given, and no plan meets any of them.
        PolicyError, ProfilingError, ValueError: as for `solve`.
    """
    _check_is_profile(profile)
    curve = plan_budgets(
        profile,
        budgets,
        points,
        engine=engine,
        regions=regions,
        policies=as_policies(policies, profile),
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    )
    return Tradeoff.of(curve)


def batch_tradeoff(
    make: Callable[[int], tuple[Any, ...]] | Mapping[int, Profile],
    budgets: int | str | Iterable[int | str],
    batch_sizes: Iterable[int] | None = None,
    *,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    mode: str = "fake",
    device: str | Path | None = None,
    engine: str = "auto",
    regions: str | Iterable[str] | None = None,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> BatchTradeoff:
    """Plans for several batch sizes: the largest that fits a budget, and which trains the most samples per second.

    Args:
        make: from a batch size to `(model, sample)` or `(model, sample, loss)`; or the profile of each batch size.
        budgets: one or more.
        batch_sizes: which ones. None takes all profiles that are given; with a function it looks for the largest batch
            that fits the largest budget, doubling from 1 on and then halving the interval.
        optimizer: from a model to its optimizer, which then counts as in `profile`.
        mode, device: as for `profile`; by default no step is run, so nothing has to fit.
        engine, regions, gap, progress: as for `solve`.
        time_limit_s: for each batch size and budget.

    Raises:
        InfeasibleBudgetError: not even the smallest batch fits the largest budget.
        ProfilingError: a step could not be recorded, or a region is no module of it, or inside of another.
        ValueError: an argument makes no sense; before anything is profiled, but for what only `make` can tell.
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
            mode=mode,
            device=device,
        )

    if isinstance(make, Mapping) and (optimizer is not None or mode != "fake" or device is not None):
        raise ValueError("optimizer, mode and device are for profiles to be made; these are there already.")
    found = plan_batches(
        make if isinstance(make, Mapping) else recorded,
        budgets,
        batch_sizes,
        engine=engine,
        regions=regions,
        time_limit_s=time_limit_s,
        gap=gap,
        progress=progress,
    )
    return replace(found, curves={batch: Tradeoff.of(curve) for batch, curve in found.curves.items()})
