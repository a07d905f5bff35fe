"""Record one training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from autoac.api.checks import Mode, asked_for, check_engine_options
from autoac.api.solving import called_among
from autoac.calibrate.compiled.table import BLOCKS, with_compiled_regions
from autoac.calibrate.in_model import fitted
from autoac.device import device_for
from autoac.measure import ONE_AT_A_TIME, unique_storage_bytes
from autoac.ops.info import is_collective
from autoac.outcomes import largest_first, with_others
from autoac.parallel.elsewhere import record_sharded
from autoac.parallel.protocol import Parallel, Sharded, check_parallel
from autoac.parallel.wrapped import found_on
from autoac.progress import Progress, Tell, part, progress_shown
from autoac.ranks.joined import with_all_ranks
from autoac.record.cuda.cublas import with_workspaces
from autoac.record.cuda.ops import capability_elsewhere
from autoac.record.on_fake import record_fake
from autoac.record.optimizer import with_optimizer
from autoac.record.recorder import recorded_step
from autoac.step.autocast import OFF_IN_BACKWARD
from autoac.step.model import check_model, device_of, free_bytes, runs_compiled, unwrapped
from autoac.step.modules import RegionChoice, select_modules
from autoac.step.samples import Samples, of_loader
from autoac.step.step import Loss, TrainingStep
from autoac.step.trial import OptimizerStates
from autoac.step.units import here, holds_shards
from autoac.torch_private import any_autocast, note_untried
from autoac_solver.build.engines import DEFAULT, engine_model, planned_for
from autoac_solver.records.devices import DeviceTable, find_device, on_device
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import IN_EVAL, NO_AUTOCAST_IN_BACKWARD, Profile, is_sized_by_values
from autoac_solver.show import notebook  # noqa: F401  (makes profiles display in Jupyter)


@with_all_ranks("record a step", of_shards=True)
def profile(
    model: torch.nn.Module,
    sample: Any,
    *,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    regions: RegionChoice = None,
    mode: Mode = "auto",
    device: str | Path | None = None,
    parallel: Parallel | None = None,
    engine: EngineName = "auto",
    granularity: str = BLOCKS,
    progress: Progress = None,
) -> Profile:
    """Record one training step: time and bytes of every op, and what autograd saves.

    The step runs with everything recomputed, so a model that does not fit without checkpointing can be profiled. If the
    engine's bookkeeping takes a noticeable share of the time and the step fits, forward or the whole step also runs
    without recomputation, to time it. On fake tensors nothing is allocated: for a model that does not fit at all, or is
    on the meta device. Afterwards model, sample and random states are as they were, even if profiling fails. Threads
    that profile concurrently take turns, so one thread's step must not wait for another's.

    Args:
        model, sample, loss, optimizer, progress: as for `plan`.
        regions: checked here; the profile does not depend on it, unless its regions are compiled.
        mode: "real" runs the step; "fake" propagates only its shapes, and runs each distinct op once on its own where
            that can be afforded; "auto" takes "real" if the step fits, else "fake", and `Profile.notes` says so.
        device: a GPU that is not here: "h200" and the like, or a cost table written by `autoac calibrate`. Times are
            taken from its table, and mode "auto" is "fake" unless the step depends on values.
        parallel: as for `plan`. The step of a sharded model is recorded with its collectives, so all ranks call this.
            With `world_size=`, `FSDP2` and `TensorParallel` are recorded on fake tensors, in a process that is no rank.
        engine: "compile" also compiles the regions and measures the variants from which engine compile chooses; it runs
            the step for real. "sac" also times steps with its bookkeeping, if that takes a noticeable share of the
            time. The peak is the same for all.
        granularity: as for `plan`.

    Raises:
        ProfilingError: the step could not be recorded.
        ParallelError: an error of one of the ranks that a callable sample or a sharded model brings together, raised on
            all of them.
        ProfileError: there is no such device.
    """
    sample = of_loader(sample)
    if isinstance(sample, Samples):
        with progress_shown("profiling", progress) as tell:
            found = profile_each(
                model,
                sample.alike,
                tell,
                loss=loss,
                optimizer=optimizer,
                regions=regions,
                mode=mode,
                device=device,
                parallel=parallel,
                engine=engine,
                granularity=granularity,
            )
        return with_others([recorded for _, recorded in found])
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}; possible are {', '.join(map(repr, get_args(Mode)))}.")
    there = found_on(model)
    check_parallel(parallel, is_sharded=isinstance(there, Sharded))
    wrapped = parallel or there
    table = None if device is None else find_device(device)
    lean_losses = not runs_compiled(model)  # the compiler has its own loss
    model = unwrapped(model)
    check_model(model)
    names = select_modules(model, regions)
    check_engine_options(engine, granularity, asked_for(mode=mode, device=device))
    is_compiled = compiles(engine)
    if is_compiled:
        mode = "real"
    step = TrainingStep(model, sample, loss, optimizer)
    note_untried()
    with progress_shown("profiling", progress) as tell:
        with ONE_AT_A_TIME, OptimizerStates():
            told = part(tell, 0.0, 0.3) if is_compiled else tell
            if isinstance(wrapped, Sharded) and wrapped.is_elsewhere:
                recorded = record_sharded(wrapped, step, mode, table, lean_losses, told)
            else:
                recorded = _recorded(step, mode, table, lean_losses, told, engine)
                if step.optimizer is not None:
                    recorded = with_optimizer(
                        recorded,
                        step.optimizer,
                        measure=table is None,
                        elsewhere=table.kind if table else "",
                        model=model,
                    )
                recorded = wrapped.with_lifetimes(recorded, model)
        if is_compiled:
            recorded = _compiled(recorded, step, names, granularity, part(tell, 0.3, 1.0))
    if not model.training:
        said = "the model was in eval mode: call model.train() first if it will be trained so"
        recorded = _noted(recorded, said, IN_EVAL)
    if any_autocast() and not step.is_whole:
        recorded = _noted(recorded, OFF_IN_BACKWARD, NO_AUTOCAST_IN_BACKWARD)
    if table is None and recorded.mode == "real":
        return recorded  # the warm-up step has set up cuBLAS's workspaces, which count as what is there before the step
    if table is not None:  # with this process's allocator options, as on the device itself
        recorded = on_device(recorded, table, device_for(torch.device(table.kind)).allocated_bytes)
    return with_workspaces(recorded, table)


def profile_each(
    model: torch.nn.Module,
    alike: Sequence[Sequence[Any]],
    progress: Tell,
    *,
    engine: EngineName = "auto",
    granularity: str = BLOCKS,
    mode: Mode = "auto",
    **options: Any,
) -> list[tuple[Any, Profile]]:
    """Each batch with the profile of its step, that with the highest peak first; its regions are compiled.

    Args:
        alike: batches of the same shapes together: the first is profiled, and all are if shapes depend on values in it.
        engine, granularity, mode, options: as for `profile`.
    """
    if len(alike) == len(alike[0]) == 1:
        [[batch]] = alike
        said = {"engine": engine, "granularity": granularity, "mode": mode, **options}
        return [(batch, profile(model, batch, progress=progress, **said))]
    check_engine_options(engine, granularity, asked_for(mode=mode, device=options["device"]))
    is_compiled = compiles(engine)
    if is_compiled:
        mode = "real"
    told = part(progress, 0.0, 0.5 if is_compiled else 1.0)
    share, done = 1 / sum(map(len, alike)), 0
    profiles: list[tuple[Any, Profile]] = []
    for same in alike:
        for place, batch in enumerate(same, done):
            telling = part(told, share * place, share * (place + 1))
            profiles.append((batch, profile(model, batch, mode=mode, progress=telling, **options)))
            if not is_sized_by_values(profiles[-1][1]):
                break
        done += len(same)
    found = largest_first(profiles)
    if is_compiled:
        batch, recorded = found[0]
        step = TrainingStep(unwrapped(model), batch, options["loss"], options["optimizer"])
        names = select_modules(step.model, options["regions"])
        found[0] = batch, _compiled(recorded, step, names, granularity, part(progress, 0.5, 1.0))
    return found


def _compiled(
    recorded: Profile, step: TrainingStep, names: list[str] | None, granularity: str, progress: Tell
) -> Profile:
    """The profile with its regions compiled; `names` as from `select_modules`."""
    return with_compiled_regions(recorded, step, called_among(recorded, names), granularity, progress)


def _recorded(
    step: TrainingStep,
    mode: str,
    table: DeviceTable | None,
    lean_losses: bool,
    progress: Tell,
    engine: str,
) -> Profile:
    """The profile on this device, for real or on fake tensors.

    Args:
        table: cost table of another device, whose times replace this device's; None to measure.
        lean_losses: as for `recorded_step`.
        engine: as for `profile`.
    """
    timed, model = table is None, step.model
    as_cuda = capability_elsewhere(table, device_of(model))
    fake = functools.partial(record_fake, step, progress, timed, as_cuda, lean_losses)
    real = functools.partial(_recorded_for_real, step, timed, lean_losses, progress, engine)
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
    if holds_shards(model):
        raise ProfilingError(
            f"{reason}, and a sharded model is recorded on real tensors only: pass a smaller batch, or plan in one "
            "process before it is sharded, with parallel=autoac.parallel.FSDP2(world_size=...) and device=."
        )
    return _noted(fake(), f"mode auto: {reason}")


def _recorded_for_real(
    step: TrainingStep,
    timed: bool,
    lean_losses: bool,
    progress: Tell,
    engine: str,
) -> Profile:
    may_be_fitted = timed and not step.is_whole
    told = part(progress, 0.0, 0.6) if may_be_fitted else progress
    profile, gives_gradients_to_its_own = recorded_step(step, told, lean_losses)
    with_others = any(is_collective(op.name) for op in profile.tape)  # others would run as many steps, too
    if not may_be_fitted or not gives_gradients_to_its_own or with_others:
        return profile
    # The Python of code that runs again is in no op's time.
    again = [engine] if engine in planned_for() and engine_model(engine).runs_code_twice else []
    free, share = free_bytes(device_of(step.model)), 0.4 / (1 + len(again))
    for index, name in enumerate([DEFAULT, *again]):
        told = part(progress, 0.6 + share * index, 0.6 + share * (index + 1))
        profile = fitted(profile, step, free, told, name)
    return profile


def _reason_for_fake(model: torch.nn.Module, timed: bool) -> str:
    """Why the step should not be run for real, "" if it may be."""
    device = device_of(model)
    if device.type == "meta":
        return "the model is on the meta device"
    if not timed:
        return "only shapes are needed for another device"
    if holds_shards(model):
        return ""  # they have no fake tensors, and all ranks run alike
    gradients = unique_storage_bytes(here([p for p in model.parameters() if p.requires_grad]))
    free = free_bytes(device)
    if gradients > free:
        return f"gradients alone take {format_bytes(gradients)}, and {format_bytes(free)} are free"
    return ""


def _noted(profile: Profile, note: str, *facts: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note), facts=(*profile.facts, *facts))
