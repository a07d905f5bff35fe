"""Messages to the owner of a loop, and the check that a new plan's gradients are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac.automatic.beside import sample_of
from autoac.check.verify import Report, verify
from autoac.plans import Plan
from autoac.record.live import ONE_DRAW
from autoac.step.step import TrainingStep
from autoac.warned import warn
from autoac_solver.build.engines import engine_model
from autoac_solver.plan.recorded.report import about_caches
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.engines import compiles
from autoac_solver.records.errors import AutoacError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import (
    OWN_CHECKPOINTING,
    SIZED_BY_VALUES,
    has_unequal_calls_at_once,
    is_sized_by_values,
)


class Once:
    """Warns at most once per key."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def __call__(self, key: str, words: str) -> None:
        """Warn, unless there was a warning with this key."""
        if key not in self._told:
            self._told.add(key)
            warn(words)


def doubts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Warnings for the owner of a loop when this plan is put on, each with a key."""
    profile = plan.record.profile
    activations = plan.predicted_peak_bytes - plan.resident_bytes
    may_exceed = (
        plan.predicted_peak_bytes + activations > plan.budget_bytes
    )  # by a step of twice the activations
    if is_sized_by_values(profile) and may_exceed:
        yield (
            SIZED_BY_VALUES,
            "sizes of tensors depend on values in this loop's steps, as where tokens choose experts, or a loss leaves "
            "out masked ones (plan.notes says where): a step may take more than the recorded one, and exceed the "
            "budget. Leave headroom=, measure steps and plan anew (measure=True, on_larger='replan'), or plan "
            "beforehand for several batches with autoac.Samples.",
        )
    engine = engine_model(plan.engine)
    recomputes = any(region.wrapped for region in plan.regions)
    if (engine.compiles or (engine.runs_code_twice and recomputes)) and (
        about := about_caches(profile, plan.engine)
    ):
        yield "caches", about
    if OWN_CHECKPOINTING in profile.facts:
        yield OWN_CHECKPOINTING, next(note for note in profile.notes if "own checkpointing" in note)


def in_a_line(verb: str, plan: Plan) -> str:
    """The plan in one line, which begins with a verb."""
    compiled = sum(region.point != EAGER for region in plan.regions)
    recompute = sum(region.wrapped for region in plan.regions) - compiled
    regions = f"{recompute} of {len(plan.regions)} regions recompute"
    if compiles(plan.engine):
        regions += f" and {compiled} are compiled"
    return (
        f"{verb} {plan.record.model} for {plan.record.profile.sample or 'its inputs'}: peak "
        f"{format_bytes(plan.predicted_peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)} (with nothing "
        f"recomputed {format_bytes(plan.record.unplanned_peak_bytes)}), {regions}, step time "
        f"{plan.predicted_overhead:+.1%}"
    )


def may_take_more(plan: Plan) -> bool:
    """Whether a later step like the recorded one may take more: its sizes vary, or it reads a number in forward.

    Mostly such a number decides on nothing, so it is not warned of.
    """
    reads = any(op.read_on_host and not op.backward and op.module >= 0 for op in plan.record.profile.tape)
    return reads or sizes_vary(plan)


def sizes_vary(plan: Plan) -> bool:
    """Whether sizes may differ between steps like the recorded one.

    Values decide on them, or a number that was drawn may (how many tokens a step drops), or calls of different sizes
    come before one backward.
    """
    profile = plan.record.profile
    return is_sized_by_values(profile) or ONE_DRAW in profile.notes or has_unequal_calls_at_once(profile)


def words_on_no_plan_since(error: Exception) -> str:
    """The warning about a step unlike the planned one for which no plan fits, where the plan stays on."""
    refused, _, _ = str(error).partition("\n")
    return f"a step of this loop unlike the first recorded one takes more than the budget under any plan. {refused}"


def words_over_budget(
    plan: Plan,
    measured_bytes: int,
    *,
    is_measured: bool = False,
    is_least: bool = False,
    runs_compiled: bool = False,
) -> str:
    """The warning about a measured step that took more than the budget.

    Args:
        is_measured: whether the plan is one of compiled regions, and others were measured as well.
        is_least: whether no other plan has room for such a step.
        runs_compiled: whether modules that the user has compiled run in it.
    """
    peak = peak_in_a_line(plan, measured_bytes)
    profile = plan.record.profile
    if runs_compiled:
        why = "Compiled code takes more than its ops would one by one"
    elif compiles(plan.engine):
        why = "Its compiled regions take more than was predicted"
    elif has_unequal_calls_at_once(profile):
        why = "Calls of different sizes come before one backward in this loop's steps"
    else:
        by = "values" if is_sized_by_values(profile) else "a number that is drawn or read, it seems,"
        why = f"Sizes of tensors depend on {by} in this loop's steps"
    if is_measured:
        return (
            f"no plan of compiled regions was measured to be within the budget: {peak}. Leave headroom=, or take "
            "engine='replay'."
        )
    if is_least:
        return (
            f"a step under the plan took more than the budget: {peak}. {why}, and no plan has room for one like that: "
            "raise the budget, or take smaller batches."
        )
    if may_take_more(plan):
        return (
            f"a step under the plan took more than the budget: {peak}. {why}: leave headroom=; with "
            "on_larger='replan' it is planned again for what was measured."
        )
    return (
        f"a step under the plan took more than the budget: {peak}. Leave headroom=, or find out what differs from the "
        "recorded step."
    )


def peak_in_a_line(plan: Plan, measured_bytes: int) -> str:
    """The measured peak of a planned step beside the predicted one."""
    measured, budget = format_bytes(measured_bytes), format_bytes(plan.budget_bytes)
    over = measured_bytes - plan.budget_bytes
    more = f" ({over} bytes above the budget)" if over > 0 and measured == budget else ""
    return f"measured peak {measured}{more}, predicted {format_bytes(plan.predicted_peak_bytes)}, budget {budget}"


def refusal(report: Report) -> AutoacError | None:
    """Why a plan is not used after `verify`: its gradients differ, or two steps without a plan do; None if it is."""
    if report.equal:
        return None
    why = "does not give the same gradients" if report.repeats else "cannot be verified"
    return AutoacError(f"the plan {why}, so it is not used:\n{report}")


def verified(
    plan: Plan,
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    trial: Callable[[], torch.Tensor] | None = None,
) -> Report:
    """Run `verify` on a batch, with the output's loss.

    Args:
        model: without wrappers, and without our forward.
        args, kwargs: arguments of the model's call.
        trial: runs a step on the batch, forward to backward, where a trainer does not call the model itself.
    """
    sample = sample_of(model, args, kwargs, trial)
    # The profile already counts the output for as long as the loop keeps it; this step need not keep it.
    step = TrainingStep(model, sample, keeps_output=trial is not None)
    return verify(plan, step, plan.compiled_as_torch_does())
