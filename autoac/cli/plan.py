"""`autoac plan`: what to save and what to recompute under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoac.cli.options import (
    Budget,
    Engine,
    Gap,
    Headroom,
    Json,
    Regions,
    Source,
    TimeLimit,
    Verbose,
    budget_value,
    writable,
)
from autoac.cli.output import Output
from autoac.cli.target import is_recorded, load_target, recorded

if TYPE_CHECKING:
    from autoac_solver.plan_record import PlanRecord
    from autoac_solver.profile import Profile


def main(
    context: typer.Context,
    source: Source,
    budget: Budget,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=writable, show_default=False, help="Write the plan here, .json."
        ),
    ] = None,
    engine: Engine = "auto",
    headroom: Headroom = "0",
    regions: Regions = None,
    time_limit: TimeLimit = 60.0,
    gap: Gap = 1e-3,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    `autoac run MODEL --plan FILE` trains with the plan; so does, in a program,
    autoac.Plan.load(FILE).apply(model).
    """
    out = Output(context)
    options: dict[str, Any] = {
        "engine": engine,
        "headroom": budget_value(headroom),
        "time_limit_s": time_limit,
        "gap": gap,
    }
    record = planned(out, source, budget, regions, options)
    if output is not None:
        record.save(output)
    from autoac_solver.explanation import explain

    shown = explain(record) + (f"\nWritten: {output}" if output is not None else "")
    out.results({**document(record), "output": None if output is None else str(output)}, shown)


def planned(
    out: Output, source: str, budget: str, regions: Sequence[str] | None, options: dict[str, Any]
) -> PlanRecord:
    """A plan from a model or from a file."""
    limit = budget_value(budget)
    if not is_recorded(source):
        target = load_target(source)
        import autoac

        with out.progress("Planning") as tell:
            return autoac.plan(
                target.model,
                target.sample,
                limit,
                loss=target.loss,
                optimizer=target.optimizer,
                regions=regions,
                progress=tell,
                **options,
            ).record
    found = recorded(source)
    options |= found.engine_for(options["engine"])
    from autoac_solver.planning import plan_profile

    with out.progress("Planning") as tell:
        return plan_profile(
            found.profile,
            limit,
            regions=matching(found.profile, regions),
            policies=found.policies,
            progress=tell,
            **options,
        )


def matching(profile: Profile, patterns: Sequence[str] | None) -> list[str] | None:
    """Names of the modules of a recorded step that names or globs match.

    Raises:
        typer.BadParameter: one of them matches none, or only modules inside of others.
    """
    if patterns is None:
        return None
    from autoac_solver.arguments import matched, outermost
    from autoac_solver.errors import ProfilingError

    try:
        return outermost(
            matched(patterns, dict.fromkeys(call.fqn for call in profile.calls), "the profiled step")
        )
    except ProfilingError as error:
        raise typer.BadParameter(str(error), param_hint="'--regions'") from error


def document(record: PlanRecord) -> dict[str, Any]:
    """A plan in numbers, for `--json`."""
    step_s = record.predicted_step_s
    return {
        "model": record.model,
        "device": record.device,
        "engine": record.engine,
        "budget_bytes": record.budget_bytes,
        "headroom_bytes": record.headroom_bytes,
        "predicted_peak_bytes": record.predicted_peak_bytes,
        "unplanned_peak_bytes": record.unplanned_peak_bytes,
        "resident_bytes": record.resident_bytes,
        "predicted_step_s": step_s,
        "predicted_extra_s": record.predicted_extra_s,
        "predicted_overhead": record.predicted_extra_s / step_s if step_s else 0.0,
        "optimality_gap": record.gap,
        "status": record.status,
        "solver": record.solver,
        "solve_s": record.solve_s,
        "regions": len(record.regions),
        "regions_untouched": sum(not region.wrapped for region in record.regions),
        "chunked_losses": record.chunked_losses,
        "peak_where": record.peak_where,
    }
