"""Plan for a model and a sample: profile the step, then solve."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from autoac.api.checks import (
    Mode,
    asked_for,
    check_engine_options,
    check_samples,
    check_together,
    checked,
    kind_of,
)
from autoac.api.choosing import engine_for, engine_to_plan_with
from autoac.api.profiling import profile_each
from autoac.api.solving import plan_recorded
from autoac.api.together import plan_together
from autoac.buckets import Buckets, check_not_compiled
from autoac.calibrate.compiled.table import BLOCKS, NothingCompiled
from autoac.calibrate.compiled.tried import looked_at, tried, with_measured
from autoac.device import device_for
from autoac.outcomes import with_outcomes
from autoac.parallel.protocol import Parallel, Sharded, check_parallel
from autoac.parallel.wrapped import found_on
from autoac.plans import Plan
from autoac.policies import Policies, listed
from autoac.progress import Progress, part, progress_shown
from autoac.ranks.joined import with_all_ranks
from autoac.step.inputs import elements_of
from autoac.step.model import device_of, unwrapped
from autoac.step.modules import RegionChoice
from autoac.step.samples import Samples, alike_in, batches_of, of_loader
from autoac.step.step import Loss, TrainingStep
from autoac_solver.plan.planning import limits
from autoac_solver.plan.reserved import check_budget_of
from autoac_solver.records.arguments import check_effort
from autoac_solver.records.devices import find_device
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.profile import Profile


@with_all_ranks("plan")
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
    parallel: Parallel | None = None,
    progress: Progress = None,
) -> Plan:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    Profiling runs up to four steps, and a few more steps or forward passes to time the engine's bookkeeping if that
    takes a noticeable share of the time. Model, sample and random states are left as they were. `plan.apply(model)`
    puts the plan on the model.

    Args:
        model: the model as it will be trained (mode, dtype, device).
        sample: a tensor, a tuple (positional arguments), a mapping (keyword arguments), or a callable without
            arguments that runs one whole step (forward, loss, backward); it is run twice, and its changes to anything
            but tensors (a learning-rate schedule) persist. Or `Samples`, several batches of different shapes (a pair
            of a DataLoader and a number is `Samples`): the plan is for the one with the highest peak, and
            `Plan.samples` shows the others.
        budget: limit for the peak of the whole step on the device: bytes, "20GB" (10^9), "20GiB" (2^30), or "80%" of
            the device's memory.
        max_overhead: instead of a budget: plan for the least memory with which a step takes at most this much longer,
            "5%" or 0.05; found to within 0.1 % of the peak with nothing recomputed. The plan's budget is then its peak.
        loss: from the model's output to a scalar; left out, the output's `.loss`, or the output if scalar, else the
            mean of its floating tensors.
        optimizer: if given, its state and the memory of its `step()` count as part of the step, with loss and output
            still alive. It is not run.
        regions: None (found automatically), names or globs of modules, or a predicate `(fqn, module) -> bool`. A glob
            selects the outermost modules that it matches.
        policies: constraints and hints for single values: `autoac.Policy` objects, a policy function for torch's
            selective checkpointing, or several of these; see `autoac.policies`.
        engine: "replay" (runs single ops again), "sac" (a policy for torch's selective checkpointing), "compile"
            (torch.compile compiles the regions, and the plan chooses what each saves), or "auto": replay; for a
            compiled model compile on CPU and CUDA, and sac on other devices, or if compile does not support what is
            asked for, or the model was compiled with settings of its own. The plan's explanation says why.
        granularity: for engine compile without named regions: compile each of the model's "blocks" separately, equal
            ones once, or the model as a "whole".
        headroom: part of the budget to leave free, for memory that no plan can see (fragmentation, other libraries).
        budget_of: what the budget limits: "allocated" memory (`torch.cuda.max_memory_allocated`), or on CUDA
            "reserved" memory (`max_memory_reserved`), which is simulated with the options in `PYTORCH_CUDA_ALLOC_CONF`.
        time_limit_s: for the solver, seconds.
        gap: how far from the least time the plan may be, as a fraction of the step's time.
        mode, device: as for `profile`. With `device`, a budget in percent is of that device's memory.
        parallel: how the model will be trained on several processes, if it is not wrapped yet:
            `autoac.parallel.DDP(...)`, `.FSDP2(...)` or `.TensorParallel(...)`. A model that is wrapped, sharded or
            split already is planned for by all ranks together: every rank calls this, and gets the same plan or the
            same error. So do the ranks of a pipeline (`PipelineStage`), each of which gets its own plan or the same
            error, if the sample is a callable: it runs a step of the schedule, and all of them call this. And so do
            the ranks of other process groups that a callable uses (context parallelism, an all_reduce by hand).
        progress: called with a text and the share done; False shows nothing. Left out, a bar is drawn on a terminal or
            in a notebook if it takes more than half a second (not with AUTOAC_PROGRESS=0 in the environment); elsewhere
            lines go to the logger "autoac" at level INFO.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies conflict, or one matches nothing in the step.
        ProfilingError: the step could not be recorded, or a region is no module of the model, or inside another one.
        ParallelError: an error of one of the ranks that plan together, raised on all of them.
        ValueError: an argument is invalid; raised before any work.
    """
    policies, sample = listed(policies), of_loader(sample)
    there = found_on(model)
    check_parallel(parallel, is_sharded=isinstance(there, Sharded))
    if parallel is not None and there.is_here:
        raise ValueError(
            "this model is wrapped or sharded already, and its ranks plan for it together: leave parallel= out."
        )
    wrapped = parallel or there
    if wrapped.is_here:
        check_together(engine, granularity, sample)
        # Options are the same on all ranks; model and sample are each rank's own.
        options = {
            "loss": loss, "optimizer": optimizer, "regions": regions, "policies": policies, "engine": engine,
            "granularity": granularity, "headroom": headroom, "time_limit_s": time_limit_s, "gap": gap, "mode": mode,
            "device": device, "max_overhead": max_overhead, "budget_of": budget_of, "progress": progress,
        }  # fmt: skip
        return plan_together(model, sample, budget, wrapped, options)
    # Argument checks before any work.
    total_bytes = None if device is None else find_device(device).memory_bytes
    names = checked(model, budget, regions, policies, engine, headroom, max_overhead, total_bytes)
    check_budget_of(budget_of, kind_of(model, device))
    for one in batches_of(sample):
        TrainingStep(unwrapped(model), one, loss, optimizer)  # checks it
    check_effort(time_limit_s, gap)
    options = asked_for(policies, max_overhead, budget_of, mode, device, parallel)
    asked = engine
    engine, reason = engine_to_plan_with(model, asked, options)
    check_engine_options(engine, granularity, options)
    check_samples(sample, budget_of)
    with progress_shown("planning", progress) as tell:
        profiled = functools.partial(
            profile_each,
            model,
            alike_in(sample),
            part(tell, 0.0, 0.7),
            loss=loss,
            optimizer=optimizer,
            regions=regions,
            granularity=granularity,
            mode=mode,
            device=device,
            parallel=wrapped,
        )
        solving = part(tell, 0.7, 1.0)

        def solved(recorded: Profile, engine: EngineName, reason: str) -> Plan:
            return plan_recorded(
                model,
                recorded,
                budget,
                max_overhead=max_overhead,
                names=names,
                policies=policies,
                engine=engine,
                engine_reason=reason,
                headroom=headroom,
                budget_of=budget_of,
                time_limit_s=time_limit_s,
                gap=gap,
                progress=solving,
            )

        def found(engine: EngineName, reason: str) -> Plan:
            (batch, recorded), *others = profiled(engine=engine)
            if not compiles(engine):
                return with_outcomes(solved(recorded, engine, reason), [other for _, other in others])
            assert budget is not None
            budget_bytes, headroom_bytes = limits(budget, headroom, recorded.device_bytes or None)
            step_with = functools.partial(TrainingStep, unwrapped(model), loss=loss, optimizer=optimizer)
            solve = functools.partial(solved, engine=engine, reason=reason)
            step = step_with(batch)
            around = functools.partial(wrapped.as_wrapped, step.model)
            look = functools.partial(
                looked_at, step=step, resident_bytes=recorded.resident_bytes, around=around
            )
            plan = tried(recorded, step, budget_bytes, solve, headroom_bytes, look)
            return with_measured(plan, [(step_with(other), profile) for other, profile in others], around)

        try:
            return found(engine, reason)
        except NothingCompiled as error:
            why = f"nothing of the model can be compiled: {error.why}"
            if asked != "auto":
                raise
        except torch.OutOfMemoryError:
            why = "the step does not fit here while its blocks are compiled and measured"
            if asked != "auto" or not compiles(engine):
                raise
        device_for(device_of(unwrapped(model))).release_cache()
        return found(engine_for(model, asked)[0], f"auto: {why}")


def plan_buckets(
    model: torch.nn.Module, samples: Samples | Iterable[Any], budget: int | str, **options: Any
) -> Buckets:
    """A plan for each of several batch sizes; applied to the model, each call runs under the plan for its size.

    A smaller batch needs less recomputation for the same budget, so its steps are faster than under the plan for the
    largest one. Each size is profiled. A few sizes that cover the lengths are enough: a batch in between takes the plan
    of the next larger size.

    Args:
        model, budget: as for `plan`.
        samples: batches of different sizes, the largest among them; `Samples`, or its argument.
        options: other arguments of `plan`; not engine "compile", and only budgets of allocated memory.

    Raises:
        InfeasibleBudgetError: no plan fits the largest batch, which is planned for first.
        PolicyError, ProfilingError, ValueError: as for `plan`, and if a sample is a callable, or the model is compiled.
    """
    samples = of_loader(samples)
    batches = batches_of(samples if isinstance(samples, Samples) else Samples(samples))
    check_engine_options(options.get("engine", "auto"), asked=["sizes"])
    if options.get("budget_of", "allocated") != "allocated":
        raise ValueError(
            "sizes that take turns reserve more memory than each would alone, so a budget of reserved memory is not "
            "planned by buckets: leave out budget_of, with headroom=, or plan for the largest batch."
        )
    check_not_compiled(model)
    options["policies"] = listed(
        options.get("policies", ())
    )  # an iterator would be empty for the second size
    if isinstance(options.get("regions"), Iterator):
        options["regions"] = list(options["regions"])
    if (options.get("parallel") or found_on(model)).is_here:
        raise ValueError(
            "several sizes are not planned where several ranks plan together (DDP, FSDP2): plan for the largest batch."
        )
    by_size: dict[int, list[Any]] = {}
    for batch in batches:
        by_size.setdefault(elements_of((batch,), {}), []).append(batch)
    return Buckets(
        plan(model, same[0] if len(same) == 1 else Samples(same), budget, **options)
        for _, same in sorted(by_size.items(), key=lambda found: -found[0])
    )
