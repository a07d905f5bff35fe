"""Tries a plan of compiled regions on the model before it is returned, and corrects it by the measured peak.

Points are measured one by one. The tape and the points predict their common peak mostly to a fraction of a per cent;
the rest is measured in one planned step, by the allocator.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from autoac.calibrate.compiled.capture import written_parameters
from autoac.calibrate.compiled.table import without_regions
from autoac.device import device_for
from autoac.execute.compiled.engine import NOT_COMPILED
from autoac.measure import ONE_AT_A_TIME, measure_peak
from autoac.outcomes import told_of, unplanned_bytes
from autoac.plans import Plan
from autoac.step.model import device_of
from autoac.step.step import TrainingStep
from autoac.step.trial import OptimizerStates, trial
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import InfeasibleBudgetError
from autoac_solver.records.outcome import Outcome
from autoac_solver.records.profile import Profile

CLOSE = 0.01
"""Accepted error of the predicted peak, as a share of the measured one."""

AroundStep = Callable[[], AbstractContextManager[None]]

Look = Callable[[Plan], tuple[int, Mapping[str, str]]]
"""Runs a step with a plan; returns its measured peak in bytes, and the compiler's errors by region."""

_TRIES = 5
_NEAR = 0.1
"""A least peak above the budget by no more than this share of it is measured before the budget is refused."""


def tried(
    profile: Profile,
    step: TrainingStep,
    budget_bytes: int,
    solve: Callable[[Profile], Plan],
    headroom_bytes: int = 0,
    look: Look | None = None,
) -> Plan:
    """The plan that `solve` finds, after a step with it was measured to be within the limit.

    Args:
        profile: with compiled regions.
        budget_bytes: bytes that a step may take, with the headroom.
        solve: makes a plan within that from a profile.
        look: runs the step; None for one in this process alone.

    Raises:
        InfeasibleBudgetError: as `solve`, or no plan that was tried is within the limit.
    """
    plan, limit = nearly(profile, step.model, solve), budget_bytes - headroom_bytes
    look = look or functools.partial(looked_at, step=step, resident_bytes=profile.resident_bytes)
    if device_for(device_of(step.model)).not_measurable():
        return plan
    best: Plan | None = None
    least: Plan | None = None
    tries = 0
    while tries < _TRIES:
        measured, failed = look(plan)
        if failed:  # each time there are fewer regions
            plan = solve(without_regions(plan.record.profile, failed))
            best = least = None
            continue
        tries += 1
        known = corrected(plan, measured)
        error = known.predicted_peak_bytes - plan.predicted_peak_bytes
        if measured <= limit and (
            best is None or known.record.predicted_extra_s < best.record.predicted_extra_s
        ):
            best = known
        if least is None or known.predicted_peak_bytes < least.predicted_peak_bytes:
            least = known
        if measured <= limit and abs(error) <= CLOSE * measured:
            break
        try:
            plan = solve(known.record.profile)
        except InfeasibleBudgetError:
            if best is None:
                raise
            break
    if best is None:
        assert least is not None
        error = InfeasibleBudgetError(limit, least.predicted_peak_bytes, False, (), -1)
        error.leave(headroom_bytes)
        raise error
    return best


def nearly(profile: Profile, model: torch.nn.Module, solve: Callable[[Profile], Plan]) -> Plan:
    """As `solve`; if no plan fits, that of the least peak if it may fit when it is measured.

    Raises:
        InfeasibleBudgetError: the least peak is too far above the budget, or the profile has no compiled regions.
    """
    try:
        return solve(profile)
    except InfeasibleBudgetError as error:
        over, table = error.minimum_bytes - error.budget_bytes, profile.compiled
        measurable = not device_for(device_of(model)).not_measurable()
        if table is None or not measurable or over > _NEAR * error.budget_bytes:
            raise
        try:
            return solve(replace(profile, compiled=replace(table, unseen_bytes=table.unseen_bytes - over)))
        except InfeasibleBudgetError:
            raise error from None


def looked_at(
    plan: Plan, step: TrainingStep, resident_bytes: int, around: AroundStep = contextlib.nullcontext
) -> tuple[int, Mapping[str, str]]:
    """See `Look`.

    Args:
        resident_bytes: before the step.
        around: as for `peak_with`.
    """
    return resident_bytes + peak_with(plan, step, around), plan.placement.not_compiled


def with_measured(
    plan: Plan,
    others: Sequence[tuple[TrainingStep, Profile]],
    around: AroundStep = contextlib.nullcontext,
) -> Plan:
    """The plan of engine compile, with the outcomes of these steps under it.

    Their peaks are measured: no point of a region was measured with their inputs. Their time is not known.

    Args:
        around: as for `peak_with`.
    """
    return told_of(plan, [_measured(plan, step, profile, around) for step, profile in others])


def _measured(plan: Plan, step: TrainingStep, profile: Profile, around: AroundStep) -> Outcome:
    peak = profile.resident_bytes + peak_with(plan, step, around)
    record = plan.record
    fits = peak <= record.budget_bytes - record.headroom_bytes
    return Outcome(profile.sample, peak, unplanned_bytes(profile), None, fits)


def peak_with(plan: Plan, step: TrainingStep, around: AroundStep = contextlib.nullcontext) -> int:
    """Measured peak bytes of a step with a plan above its start: of the second such step, as the first compiles.

    Args:
        around: makes a context of each step.
    """
    model = step.model
    # Copies of all parameters might not fit beside the step, and only a whole step writes so many.
    parameters = {} if step.is_whole else {id(p): p for p in model.parameters()}
    for parameter in written_parameters(plan.record.profile, model):
        parameters.pop(id(parameter), None)
    written = [tensor for tensor in step.written if id(tensor) not in parameters]
    optimizers = OptimizerStates(copies=True)  # copied in the first step, which is not measured
    peak = 0
    for measures in (False, True):
        with (
            ONE_AT_A_TIME,
            warnings.catch_warnings(),
            trial(
                model,
                step.inputs,
                written,
                places=parameters.values(),
                gradient=plan.gradient_at_start,
                optimizers=optimizers,
            ),
            plan.applied(model),
            around(),
        ):
            warnings.filterwarnings("ignore", NOT_COMPILED)  # `tried` plans again
            if measures:
                peak = measure_peak(step.run, device_of(model)).peak_above_start_bytes
            else:
                step.run()
    return peak


def corrected(plan: Plan, measured_bytes: int, with_optimizer: bool = False) -> Plan:
    """The plan on a profile that predicts the measured peak.

    Args:
        with_optimizer: the measured step went on after backward, with the optimizer's.
    """
    table = plan.record.profile.compiled
    assert table is not None
    # Less than nothing can count as nothing only, so what an earlier correction was worth is not in its number.
    record = plan.on(replace(plan.record.profile, compiled=replace(table, unseen_bytes=0))).record
    step = step_of(record)
    live = step.timeline["live_bytes"].to_numpy()
    backward = (p for p, op in enumerate(step.built.problem.position_op) if record.profile.tape[op].backward)
    ran = len(live) if with_optimizer else 1 + max(backward)
    most = max((p.backward_bytes for region in table.regions for p in region.points), default=0)
    unseen = max(measured_bytes - int(live[:ran].max()), -(record.resident_bytes + most))
    return plan.on(replace(record.profile, compiled=replace(table, unseen_bytes=unseen)))
