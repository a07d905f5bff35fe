"""The way through: profile a step, solve for a budget, hand out the plan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from autoac.buckets import Buckets
from autoac.calibrate.compiled.table import BLOCKS, GRANULARITIES, with_compiled_regions
from autoac.calibrate.compiled.tried import tried
from autoac.calibrate.in_model import fitted
from autoac.execute.engines import default_engine
from autoac.measure import ONE_AT_A_TIME, unique_storage_bytes
from autoac.ops.info import is_collective
from autoac.outcomes import largest_first, with_others, with_outcomes
from autoac.parallel.elsewhere import record_sharded
from autoac.parallel.fsdp2 import FSDP2
from autoac.parallel.one_plan import needs_most, same_everywhere, shared
from autoac.parallel.protocol import Plain, check_parallel
from autoac.parallel.ranks import together
from autoac.parallel.wrapped import found_on
from autoac.plans import Plan, Tradeoff
from autoac.policies import Policies, as_policies, check_modules, listed
from autoac.progress import Progress, Tell, part, progress_shown
from autoac.record.on_fake import record_fake
from autoac.record.optimizer import with_optimizer
from autoac.record.recorder import recorded_step
from autoac.step.autocast import OFF_IN_BACKWARD
from autoac.step.inputs import elements_of
from autoac.step.model import check_model, device_bytes, device_of, free_bytes, model_fingerprint, unwrapped
from autoac.step.modules import RegionChoice, select_modules
from autoac.step.optimizer_states import OptimizerStates
from autoac.step.samples import Samples, batches_of
from autoac.step.step import Loss, TrainingStep
from autoac.step.units import here
from autoac.torch_private import any_autocast, compiled_attribute, note_untried
from autoac_solver.plan.batches import BatchTradeoff, plan_batches
from autoac_solver.plan.planning import aims, limits, plan_budgets, plan_profile, resolve_engine
from autoac_solver.plan.reserved import check_budget_of
from autoac_solver.records.arguments import check_effort
from autoac_solver.records.devices import DeviceTable, find_device, on_device
from autoac_solver.records.engines import COMPILE, EngineName
from autoac_solver.records.errors import PolicyError, ProfilingError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import Profile
from autoac_solver.show import notebook  # noqa: F401  (what makes profiles show themselves in Jupyter)

Mode = Literal["auto", "real", "fake"]


def plan(
    model: torch.nn.Module,
    sample: Any,
    budget: int | str | None = None,
    *,
    max_overhead: float | str | None = None,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    policies: Policies = (),
    engine: EngineName = "auto",
    granularity: str = BLOCKS,
    headroom: int | str = 0,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    mode: Mode = "auto",
    device: str | Path | None = None,
    parallel: Plain | None = None,
    progress: Progress = None,
) -> Plan:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    Runs up to four steps to profile them, and where the engine's bookkeeping counts some more, or forward passes alone,
    to time it (see `fitting`); model, sample and random states are left as they were. `plan.apply(model)` puts the plan
    on the model.

    Args:
        model: the model as it will be trained (mode, dtype, device).
        sample: a tensor, a tuple (positional arguments), a mapping (keyword arguments), or a callable without
            arguments that runs one whole step (forward, loss, backward); it is run twice, and what it changes besides
            tensors (the schedule of a learning rate, say) stays so. Or `Samples`, several batches of different shapes:
            that with the highest peak is planned for, and `Plan.samples` tells how the others do.
        budget: limit for the peak of the whole step on the device: bytes, "20GB" (10^9), "20GiB" (2^30), or "80%" of
            the device's memory.
        max_overhead: in place of a budget: the least memory with which a step takes at most so much longer, "5%" or
            0.05; to within 0.1 % of the peak with nothing recomputed. The plan's budget is then its peak.
        loss: from the model's output to a scalar; left out, the output's `.loss`, or the output if scalar, else the
            mean of its floating tensors.
        optimizer: if given, its state and what its `step()` takes count as part of the step. It is not run.
        regions: None (found automatically), names or globs of modules, or a predicate `(fqn, module) -> bool`. A glob
            stands for the outermost modules that it finds.
        policies: what you want of some values whatever the plan finds best: `autoac.Policy` objects, a function for
            torch's selective checkpointing, or several of these; see `autoac.policies`.
        engine: "replay" (runs single ops again), "sac" (a policy for torch's selective checkpointing), "compile" (has
            torch.compile compile the regions, and chooses what each keeps), or "auto": replay, but sac for a compiled
            model.
        granularity: of engine compile, where no regions are named: each of the model's "blocks" is compiled by itself,
            those that are alike once; or the model as a "whole".
        headroom: part of the budget to leave free, for what no plan can see (fragmentation, other libraries).
        budget_of: what the budget limits: "allocated" memory (`torch.cuda.max_memory_allocated`), or on CUDA
            "reserved" memory (`max_memory_reserved`), which is simulated with the options in `PYTORCH_CUDA_ALLOC_CONF`.
        time_limit_s: for the solver, seconds.
        gap: how far from the least time the plan may be, as a fraction of the step's time.
        mode, device: as for `profile`. Of a device that is not here, the memory counts for "80%".
        parallel: how the model will be trained on several processes, `autoac.parallel.DDP(...)` or `.FSDP2(...)`, where
            it is not wrapped yet. A model that is wrapped (by DDP, or sharded by FSDP2) is planned for by all ranks
            together: every rank calls this, and gets the same plan or the same error.
        progress: called with a text and the share done; False shows nothing. Left out, a bar is drawn on a terminal or
            in a notebook if it takes more than half a second (not with AUTOAC_PROGRESS=0 in the environment); elsewhere
            lines go to the logger "autoac" at level INFO.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies clash, or one is about nothing in the step.
        ProfilingError: the step could not be recorded, or a region is no module of the model, or inside of another.
        ParallelError: on all ranks that plan together, what one of them raised.
        ValueError: an argument makes no sense; before anything runs.
    """
    check_parallel(parallel)
    wrapped = parallel or found_on(model)
    if wrapped.is_here:
        # Options that say how to plan are the same everywhere; what is planned for, each rank has of its own.
        options = {
            "loss": loss, "optimizer": optimizer, "regions": regions, "policies": policies, "engine": engine,
            "headroom": headroom, "time_limit_s": time_limit_s, "gap": gap, "mode": mode, "device": device,
            "max_overhead": max_overhead, "budget_of": budget_of, "progress": progress,
        }  # fmt: skip
        if engine == COMPILE:
            raise ValueError(
                "engine 'compile' is not for models that several ranks plan together (DDP, FSDP2): take engine='sac' "
                "for a compiled model."
            )
        if isinstance(sample, Samples):
            raise ValueError(
                "several samples are not compared where several ranks plan together (DDP, FSDP2): pass the largest "
                "batch."
            )
        return plan_together(model, sample, budget, wrapped, options)
    policies = listed(policies)
    # What can be refused before anything runs.
    total_bytes = None if device is None else find_device(device).memory_bytes
    names = checked(model, budget, regions, policies, engine, headroom, max_overhead, total_bytes)
    check_budget_of(budget_of, _kind_of(model, device))
    steps = [TrainingStep(unwrapped(model), one, loss, optimizer) for one in batches_of(sample)]
    check_effort(time_limit_s, gap)
    check_compiling(engine, granularity, policies)
    if isinstance(sample, Samples) and (engine == COMPILE or budget_of != "allocated"):
        raise ValueError(
            "several samples are compared by allocated memory, with the engines replay and sac: plan for one of them, "
            "or leave out budget_of and engine='compile'."
        )
    if engine == COMPILE and max_overhead is not None:
        raise ValueError(
            "engine 'compile' plans for a budget, not for max_overhead: autoac.tradeoff over "
            "autoac.profile(..., engine='compile') shows what each budget costs."
        )
    with progress_shown("planning", progress) as tell:
        share = 0.7 / len(steps)
        profiles = [
            profile(
                model,
                one,
                loss=loss,
                optimizer=optimizer,
                regions=regions,
                engine=engine,
                granularity=granularity,
                mode=mode,
                device=device,
                parallel=wrapped,
                progress=part(tell, share * index, share * (index + 1)),
            )
            for index, one in enumerate(batches_of(sample))
        ]
        recorded, *others = largest_first(profiles)
        solving = part(tell, 0.7, 1.0)

        def solved(recorded: Profile) -> Plan:
            return plan_recorded(
                model,
                recorded,
                budget,
                max_overhead=max_overhead,
                names=names,
                policies=policies,
                engine=engine,
                headroom=headroom,
                budget_of=budget_of,
                time_limit_s=time_limit_s,
                gap=gap,
                progress=solving,
            )

        if engine != COMPILE:
            found = solved(recorded)
            return with_outcomes(found, others) if others else found
        assert budget is not None
        budget_bytes, headroom_bytes = limits(budget, headroom, recorded.device_bytes or None)
        return tried(recorded, steps[0], budget_bytes - headroom_bytes, solved)


def plan_buckets(
    model: torch.nn.Module, samples: Samples | Iterable[Any], budget: int | str, **options: Any
) -> Buckets:
    """A plan for each of several sizes of batches; put on the model, each call runs under the plan for its size.

    A smaller batch needs less recomputation for the same budget, so its steps are faster than under the plan for the
    largest one. Each of the sizes is profiled. A few that cover the lengths are enough: what is in between takes the
    plan of the next larger one.

    Args:
        model, budget: as for `plan`.
        samples: batches of different sizes, the largest among them; `Samples`, or what it takes.
        options: other arguments of `plan`; not engine "compile".

    Raises:
        InfeasibleBudgetError: no plan fits the largest batch, which is planned for first.
        PolicyError, ProfilingError, ValueError: as for `plan`, and if a sample is a callable.
    """
    batches = batches_of(samples if isinstance(samples, Samples) else Samples(samples))
    if options.get("engine") == COMPILE:
        raise ValueError("engine 'compile' cannot be planned by buckets: plan for the largest batch.")
    if (options.get("parallel") or found_on(model)).is_here:
        raise ValueError(
            "several sizes are not planned where several ranks plan together (DDP, FSDP2): plan for the largest batch."
        )
    by_size = {elements_of((batch,), {}): batch for batch in batches}
    return Buckets(plan(model, by_size[size], budget, **options) for size in sorted(by_size, reverse=True))


def _kind_of(model: torch.nn.Module, device: str | Path | None) -> str:
    """The device that is planned for."""
    return str(device_of(unwrapped(model))) if device is None else find_device(device).kind


def plan_together(
    model: torch.nn.Module, sample: Any, budget: int | str | None, wrapped: Plain, options: dict[str, Any]
) -> Plan:
    """One plan, made by all ranks together: for the rank whose step keeps the most.

    Args:
        wrapped: how the model is trained.
        options: the other arguments of `plan`.

    Raises:
        ParallelError: what one of the ranks raised, on all of them.
    """
    alone = replace(wrapped, is_here=False)  # type: ignore[type-var]
    with together("plan") as ranks:
        names = checked(
            model,
            budget,
            options["regions"],
            options["policies"],
            options["engine"],
            options["headroom"],
            options["max_overhead"],
        )
        check_budget_of(options["budget_of"], str(device_of(unwrapped(model))))
        step = TrainingStep(unwrapped(model), sample, options["loss"], options["optimizer"])
        check_effort(options["time_limit_s"], options["gap"])
        fingerprint = model_fingerprint(step.model)
        same_everywhere(
            ranks, {"model (fingerprint)": fingerprint, "budget": str(budget), "regions": str(names)}
        )
        with progress_shown("planning", options.pop("progress")) as tell:
            recorded = profile(
                model,
                sample,
                parallel=alone,
                progress=part(tell, 0.0, 0.7),
                **{name: options.pop(name) for name in ("loss", "optimizer", "mode", "device")},
            )
            owner, made = needs_most(ranks, recorded), None
            if ranks.rank == owner:
                del options["regions"]
                made = plan_recorded(
                    model, recorded, budget, names=names, progress=part(tell, 0.7, 1.0), **options
                )
            return shared(ranks, owner, made, model)


def checked(
    model: torch.nn.Module,
    budget: int | str | None,
    regions: RegionChoice,
    policies: Policies,
    engine: EngineName,
    headroom: int | str,
    max_overhead: float | str | None = None,
    total_bytes: int | None = None,
) -> list[str] | None:
    """Refuse what makes no sense before anything runs, and tell the names of the modules chosen as regions.

    Args, Raises: as for `plan`; `total_bytes` is the memory of another device that is planned for.
    """
    model = unwrapped(model)
    check_model(model)
    resolve_engine(engine)
    aims(budget, max_overhead, headroom, (total_bytes or device_bytes(device_of(model))) or None)
    names = select_modules(model, regions)
    check_modules(listed(policies), model)
    return names


def plan_recorded(
    model: torch.nn.Module,
    recorded: Profile,
    budget: int | str | None,
    *,
    max_overhead: float | str | None = None,
    names: list[str] | None,
    policies: Policies,
    engine: EngineName,
    headroom: int | str,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Tell | None = None,
) -> Plan:
    """The plan for a model whose step was recorded.

    Args:
        names: what `checked` returned.
        budget, max_overhead, policies, engine, headroom, budget_of, time_limit_s, gap: as for `plan`, and checked.
        progress: called with a text and the share done.

    Raises:
        InfeasibleBudgetError, PolicyError, ProfilingError: as for `plan`.
    """
    _, reason = resolve_engine(engine)
    if engine == "auto":
        compiled = compiled_attribute(model) is not None
        engine = default_engine(compiled=compiled)
        reason = "auto: the model is compiled" if compiled else "auto: eager mode"
    names = _called(recorded, names)
    return Plan(
        plan_profile(
            recorded,
            budget,
            max_overhead=max_overhead,
            engine=engine,
            engine_reason=reason,
            regions=names,
            policies=as_policies(listed(policies), recorded),
            headroom=headroom,
            budget_of=budget_of,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    )


def _called(recorded: Profile, names: list[str] | None) -> list[str] | None:
    """The modules among these that the step calls; a glob may find others. All of them if it calls none."""
    called = {call.fqn for call in recorded.calls}
    return None if names is None else [name for name in names if name in called] or names


def check_compiling(engine: str, granularity: str, policies: Policies) -> None:
    """Refuse what engine compile cannot do, and its options without it.

    Raises:
        PolicyError, ValueError: before anything runs.
    """
    resolve_engine(engine)
    if granularity not in GRANULARITIES:
        known = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(f"granularity is {granularity!r}; possible are {known}.")
    if granularity != BLOCKS and engine != COMPILE:
        raise ValueError(f"granularity={granularity!r} goes with engine='compile', and engine is {engine!r}.")
    if engine == COMPILE and policies:
        raise PolicyError(
            "engine 'compile' follows no policies: what a compiled region keeps is chosen as a whole. Plan without "
            "policies, or with engine='replay' or 'sac'."
        )


def _mode_for_compiling(mode: Mode, device: str | Path | None) -> Mode:
    if mode == "fake" or device is not None:
        asked = "mode='fake'" if mode == "fake" else f"device={device!r}"
        raise ValueError(
            f"engine='compile' measures compiled code on the device at hand, and {asked} runs nothing on it: leave "
            "one of them out."
        )
    return "real"


def profile(
    model: torch.nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    mode: Mode = "auto",
    device: str | Path | None = None,
    parallel: Plain | None = None,
    engine: EngineName = "auto",
    granularity: str = BLOCKS,
    progress: Progress = None,
) -> Profile:
    """Record one training step: time and bytes of every op, and what autograd saves.

    The step is run with everything recomputed, so a model that does not fit without checkpointing can be profiled;
    where the engine's bookkeeping counts and the step fits, its forward or all of it is also run as it is, for the time
    (see `fitting`). On fake tensors nothing of it is allocated: for a model that does not fit at all, or is on the meta
    device. Afterwards model, sample and random states are as they were, also if it fails. Threads that profile at once
    take turns, so the step of one must not wait for another's.

    Args:
        model, sample, loss, optimizer, progress: as for `plan`.
        regions: checked here; the profile does not depend on it, but where its regions are compiled.
        mode: "real" runs the step; "fake" runs only its shapes, and each distinct op once by itself where that can be
            afforded; "auto" takes "real" where the step fits, else "fake", and `Profile.notes` says so.
        device: a GPU one does not have: "h200" and the like, or a cost table that `autoac calibrate` wrote. Times are
            taken from its table, and "auto" is "fake" unless the step depends on values.
        parallel: as for `plan`. The step of a sharded model is recorded with its collectives, so all ranks call this.
            `FSDP2(world_size=...)` is recorded on fake tensors, in one process that is no rank.
        engine: "compile" also compiles the regions and measures what they take, which engine compile chooses from;
            it runs the step for real. Under any other the profile is the same.
        granularity: as for `plan`.

    Raises:
        ProfilingError: the step could not be recorded.
        ProfileError: there is no such device.
    """
    if isinstance(sample, Samples):
        found = [
            profile(
                model,
                one,
                loss=loss,
                optimizer=optimizer,
                regions=regions,
                mode=mode,
                device=device,
                engine=engine,
                granularity=granularity,
                progress=progress,
            )
            for one in sample.batches
        ]
        return with_others(largest_first(found))
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; possible are {', '.join(map(repr, get_args(Mode)))}.")
    check_parallel(parallel)
    wrapped = parallel or found_on(model)
    table = None if device is None else find_device(device)
    lean_losses = compiled_attribute(model) is None  # the compiler makes a loss of its own
    model = unwrapped(model)
    check_model(model)
    names = select_modules(model, regions)
    check_compiling(engine, granularity, ())
    if engine == COMPILE:
        mode = _mode_for_compiling(mode, device)
    step = TrainingStep(model, sample, loss, optimizer)
    note_untried()
    with progress_shown("profiling", progress) as tell:
        compiles = engine == COMPILE
        with ONE_AT_A_TIME, OptimizerStates():
            told = part(tell, 0.0, 0.3) if compiles else tell
            if isinstance(wrapped, FSDP2) and wrapped.world_size is not None:
                recorded = record_sharded(wrapped, step, mode, table, lean_losses, told)
            else:
                recorded = _recorded(step, mode, table, lean_losses, told)
                if step.optimizer is not None:
                    recorded = with_optimizer(recorded, model, step.optimizer, measure=table is None)
                recorded = wrapped.with_lifetimes(recorded, model)
        if compiles:
            called = _called(recorded, names)
            recorded = with_compiled_regions(recorded, step, called, granularity, part(tell, 0.3, 1.0))
    if not model.training:
        recorded = _noted(
            recorded, "the model was in eval mode: call model.train() first if it will be trained so"
        )
    if any_autocast() and not step.is_whole:
        recorded = _noted(recorded, OFF_IN_BACKWARD)
    return recorded if table is None else on_device(recorded, table)


def _recorded(
    step: TrainingStep,
    mode: str,
    table: DeviceTable | None,
    lean_losses: bool,
    progress: Tell,
) -> Profile:
    """The profile on this device, for real or on fake tensors.

    Args:
        table: of another device whose times are wanted in place of this one's.
        lean_losses: as for `recorded_step`.
    """
    timed, model = table is None, step.model
    as_cuda = table is not None and table.kind == "cuda" and device_of(model).type != "cuda"
    fake = functools.partial(record_fake, step, progress, timed, as_cuda, lean_losses)
    real = functools.partial(_recorded_for_real, step, timed, lean_losses, progress)
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
    step: TrainingStep,
    timed: bool,
    lean_losses: bool,
    progress: Tell,
) -> Profile:
    may_be_fitted = timed and not step.is_whole
    told = part(progress, 0.0, 0.6) if may_be_fitted else progress
    profile, gives_gradients_to_its_own = recorded_step(step, told, lean_losses)
    with_others = any(is_collective(op.name) for op in profile.tape)  # which would have to run as many steps
    if not may_be_fitted or not gives_gradients_to_its_own or with_others:
        return profile
    return fitted(profile, step, free_bytes(device_of(step.model)), part(progress, 0.6, 1.0))


def _reason_for_fake(model: torch.nn.Module, timed: bool) -> str:
    """Why the step should not be run for real, "" if it may be."""
    device = device_of(model)
    if device.type == "meta":
        return "the model is on the meta device"
    if not timed:
        return "only shapes are needed for another device"
    gradients = unique_storage_bytes(here([p for p in model.parameters() if p.requires_grad]))
    free = free_bytes(device)
    if gradients > free:
        return f"gradients alone take {format_bytes(gradients)}, and {format_bytes(free)} are free"
    return ""


def _noted(profile: Profile, note: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note))


def solve(
    profile: Profile,
    budget: int | str | None = None,
    *,
    max_overhead: float | str | None = None,
    engine: EngineName = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    headroom: int | str = 0,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress = None,
) -> Plan:
    """Plan from a profile; no model is needed.

    Args:
        profile: recorded by `profile`, or loaded.
        regions: names or globs of modules of the profiled step; None chooses them.
        budget, max_overhead, policies, engine, headroom, budget_of, time_limit_s, gap, progress: as for `plan`;
            "auto" is "replay" here.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies clash, or one is about nothing in the step.
        ProfilingError: a region is no module of the profiled step, or inside of another.
        ValueError: an argument makes no sense.
    """
    _check_is_profile(profile)
    with progress_shown("planning", progress) as tell:
        return Plan(
            plan_profile(
                profile,
                budget,
                max_overhead=max_overhead,
                engine=engine,
                regions=regions,
                policies=as_policies(policies, profile),
                headroom=headroom,
                budget_of=budget_of,
                time_limit_s=time_limit_s,
                gap=gap,
                progress=tell,
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
    engine: EngineName = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress = None,
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
    with progress_shown("planning", progress) as tell:
        curve = plan_budgets(
            profile,
            budgets,
            points,
            engine=engine,
            regions=regions,
            policies=as_policies(policies, profile),
            time_limit_s=time_limit_s,
            gap=gap,
            progress=tell,
        )
    return Tradeoff.of(curve)


def batch_tradeoff(
    make: Callable[[int], tuple[Any, ...]] | Mapping[int, Profile],
    budgets: int | str | Iterable[int | str],
    batch_sizes: Iterable[int] | None = None,
    *,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    mode: Mode = "fake",
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
            engine=engine,
            progress=False,
        )

    if isinstance(make, Mapping) and (optimizer is not None or mode != "fake" or device is not None):
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
