"""`autoac run`: train some steps with a plan, and compare its predictions with measurements."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoac.cli.options import Arguments, Engine, Json, Model, Threads, Verbose, budget_value
from autoac.cli.output import Output, facts, in_one_unit
from autoac.cli.target import Target, load_target

if TYPE_CHECKING:
    from autoac.check.verify import Report
    from autoac.cli.training import Training
    from autoac.plans import Plan


def main(
    context: typer.Context,
    model: Model,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", "-p", exists=True, dir_okay=False, help="A plan that `autoac plan` wrote."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", "-b", show_default=False, help="Plan for this instead.")
    ] = None,
    engine: Engine = "auto",
    steps: Annotated[
        int, typer.Option(min=3, help="The first warms up, the last is measured, those between are timed.")
    ] = 8,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Of plain SGD, if the factory returns no optimizer.")
    ] = 0.01,
    verify: Annotated[
        bool, typer.Option("--verify", help="First compare a step with and without the plan, to the bit.")
    ] = False,
    threads: Threads = None,
    arguments: Arguments = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Train some steps of a model with a plan, and report peak, step time and losses.

    Exits with 1 if the measured peak exceeds the budget or, with --verify,
    anything differs.
    """
    if (plan is None) == (budget is None):
        raise typer.BadParameter("give one of the two.", param_hint="'--plan' or '--budget'")
    if plan is not None and engine != "auto":
        raise typer.BadParameter("a plan has its engine; leave this out.", param_hint="'--engine'")
    out = Output(context)
    target = load_target(model, arguments)
    import torch

    from autoac.cli.training import train

    if threads is not None:
        torch.set_num_threads(threads)
    the_plan = _plan(out, target, plan, budget, engine)
    report = None
    if verify:
        with out.progress("Comparing a step with and without the plan") as tell:
            tell("to the bit", 0.0)
            report = the_plan.verify(target.model, target.sample, target.loss)
    with out.progress("Training") as tell:
        training = train(target, the_plan, steps, learning_rate, tell)
    out.results(_document(the_plan, training, report), facts(*_rows(the_plan, training, report)))
    if training.measured_peak_bytes > the_plan.budget_bytes or (report is not None and not report.ok):
        raise typer.Exit(1)


def _plan(out: Output, target: Target, file: Path | None, budget: str | None, engine: str) -> Plan:
    import autoac

    if file is not None:
        return autoac.Plan.load(file)
    assert budget is not None
    with out.progress("Planning") as tell:
        return autoac.plan(
            target.model,
            target.sample,
            budget_value(budget),
            loss=target.loss,
            optimizer=target.optimizer,
            engine=engine,
            progress=tell,
        )


def _is_optimizer_planned(plan: Plan) -> bool:
    from autoac.record.optimizer import is_counted

    return is_counted(plan.record.profile)


def _document(plan: Plan, training: Training, report: Report | None) -> dict[str, Any]:
    return {
        "model": plan.record.model,
        "engine": plan.engine,
        "optimizer": training.optimizer,
        "optimizer_state_bytes": training.optimizer_state_bytes,
        "is_optimizer_planned": _is_optimizer_planned(plan),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "measured_peak_bytes": training.measured_peak_bytes,
        "budget_of": plan.record.budget_of,
        "is_within_budget": training.measured_peak_bytes <= plan.budget_bytes,
        "predicted_step_s": plan.record.predicted_step_s + plan.record.predicted_extra_s,
        "step_time_s": training.step_time_s,
        "step_times_s": training.step_times_s,
        "losses": [loss if loss is None or math.isfinite(loss) else str(loss) for loss in training.losses],
        "verified": None
        if report is None
        else {
            "equal": report.equal,
            "tolerance": report.tolerance,
            "first_difference": report.first_difference,
            "repeats": report.repeats,
            "unplanned_peak_bytes": report.unplanned_peak_bytes,
            "is_larger_step": report.is_larger_step,
            "time_ratio": report.time_ratio,
        },
    }


def _rows(plan: Plan, training: Training, report: Report | None) -> list[tuple[str, str]]:
    measured, predicted = training.measured_peak_bytes, plan.predicted_peak_bytes
    mb = _amounts(plan, training, report)
    over_bytes = measured - plan.budget_bytes
    reserved = plan.record.budget_of == "reserved"
    kept = "not measured, it is of reserved memory" if reserved else "within it"
    verdict = kept if over_bytes <= 0 else f"FAILED: {over_bytes} bytes over it"
    rows = [
        ("model", f"{plan.record.model}, engine {plan.engine}, {training.optimizer}"),
        ("peak", f"{mb(measured)} measured, {mb(predicted)} predicted ({measured / predicted - 1:+.3%})"),
        ("budget", f"{mb(plan.budget_bytes)}: {verdict}"),
        *_unplanned_optimizer(plan, training, mb),
        (
            "step time",
            f"{training.step_time_s:.3f} s, median of {len(training.step_times_s)}; extra time predicted "
            f"{plan.predicted_overhead:+.1%}",
        ),
        ("loss", _losses(training.losses)),
    ]
    if report is not None:
        equal = f"{report.equality}: loss, gradients, buffers and random states"
        rows.append(("verified", equal if report.equal else f"FAILED: {report.equality}"))
        ratio = f"a step with the plan takes {report.time_ratio:.2f} x as long"
        # A compiled plan is compared with the same regions compiled as torch does.
        without = "as torch compiles" if report.tolerance else "without plan"
        rows.append((without, f"peak {mb(report.unplanned_peak_bytes)}; {ratio}"))
        if report.is_larger_step:
            profiled = mb(report.profiled_peak_bytes)
            rows.append(
                (
                    "note",
                    f"more than the {profiled} that the profile predicts without a plan: another batch or length?",
                )
            )
    return rows


def _amounts(plan: Plan, training: Training, report: Report | None) -> Callable[[float], str]:
    others = () if report is None else (report.unplanned_peak_bytes,)
    return in_one_unit(training.measured_peak_bytes, plan.budget_bytes, *others)


def _unplanned_optimizer(plan: Plan, training: Training, mb: Callable[[float], str]) -> list[tuple[str, str]]:
    """A note on the larger peak, if the plan does not count the optimizer's state."""
    if not training.optimizer_state_bytes or _is_optimizer_planned(plan):
        return []
    state = f"{training.optimizer}'s state, {mb(training.optimizer_state_bytes)}"
    return [
        (
            "note",
            f"the plan was made without {state}, which is in the measured peak: plan from the factory that returns the "
            "optimizer",
        )
    ]


def _losses(losses: list[float | None]) -> str:
    """The losses of all steps; of many steps, the first and the last few."""
    texts = ["?" if loss is None else f"{loss:.6g}" for loss in losses]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:3], "...", *texts[-3:]])
