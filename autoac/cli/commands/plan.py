"""`autoac plan`: what to save and what to recompute under a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoac.cli.options import (
    SOURCES,
    Arguments,
    BudgetOf,
    Engine,
    Gap,
    Granularity,
    Headroom,
    Json,
    MaxOverhead,
    OptionalBudget,
    Regions,
    TimeLimit,
    Verbose,
    budget_value,
    compiling,
    json_file,
)
from autoac.cli.output import Output
from autoac.cli.pretrained import load_pretrained
from autoac.cli.ranks import (
    CpuOffload,
    ParamDtype,
    Prefetch,
    Ranks,
    ReduceDtype,
    Replicas,
    ReshardAfterForward,
    Split,
    Units,
    parts_table,
    sharding,
    sizes,
    sizes_table,
)
from autoac.cli.ranks import document as of_ranks
from autoac.cli.target import Target, is_recorded, load_target, no_arguments, recorded

if TYPE_CHECKING:
    from autoac.parallel import FSDP2, TensorParallel
    from autoac_solver.records.plan import PlanRecord
    from autoac_solver.records.profile import Profile


def main(
    context: typer.Context,
    budget: OptionalBudget = None,
    source: Annotated[
        str | None, typer.Argument(metavar="MODEL_OR_FILE", show_default=False, help=SOURCES)
    ] = None,
    max_overhead: MaxOverhead = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", callback=json_file, show_default=False, help="Write the plan here, .json."
        ),
    ] = None,
    engine: Engine = "auto",
    granularity: Granularity = None,
    headroom: Headroom = "0",
    budget_of: BudgetOf = "allocated",
    regions: Regions = None,
    time_limit: TimeLimit = 60.0,
    gap: Gap = 1e-3,
    details: Annotated[
        bool, typer.Option("--details", help="Say all there is: who holds the peak, and every price.")
    ] = False,
    arguments: Arguments = None,
    hf: Annotated[
        str | None,
        typer.Option(
            "--hf",
            metavar="CONFIG_OR_NAME",
            show_default=False,
            help="In place of MODEL_OR_FILE: a causal language model of transformers: its config.json, its folder, or "
            "its name on the hub. No weights are read.",
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, show_default="1", help="With --hf: rows of a batch.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="With --hf: tokens of a row.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(show_default="the configuration's", help="With --hf: of the parameters."),
    ] = None,
    optimizer: Annotated[
        Literal["adamw", "none"] | None,
        typer.Option(show_default="adamw", help="With --hf: whose state and step are counted."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help="With --hf, --fsdp or --tp: a GPU, h200 and the like, or a cost table (.json).",
        ),
    ] = None,
    fsdp: Ranks = None,
    tp: Split = None,
    units: Units = None,
    reshard_after_forward: ReshardAfterForward = None,
    replicas: Replicas = None,
    prefetch: Prefetch = None,
    param_dtype: ParamDtype = None,
    reduce_dtype: ReduceDtype = None,
    cpu_offload: CpuOffload = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Plan what to save and what to recompute so that a training step stays within a budget.

    Or, with --max-overhead, so that it takes the least memory with which it is
    not slower than that.

    `autoac run MODEL --plan FILE` trains with the plan; so does, in a program,
    autoac.Plan.load(FILE).apply(model).
    """
    out = Output(context)
    with_hf = {"--batch": batch, "--seq": seq, "--dtype": dtype, "--optimizer": optimizer}
    if (source is None) == (hf is None):
        raise typer.BadParameter("give either MODEL_OR_FILE or --hf.", param_hint="'MODEL_OR_FILE'")
    for name, value in with_hf.items():
        if hf is None and value is not None:
            raise typer.BadParameter("it goes with --hf only.", param_hint=f"'{name}'")
    if hf is None and fsdp is None and tp is None and device is not None:
        raise typer.BadParameter("it goes with --hf, --fsdp or --tp only.", param_hint="'--device'")
    if hf is not None and seq is None:
        raise typer.BadParameter("say how many tokens a row has.", param_hint="'--seq'")
    if (budget is None) == (max_overhead is None):
        raise typer.BadParameter("give one of the two.", param_hint="'--budget' or '--max-overhead'")
    sharded = sharding(
        fsdp,
        units,
        reshard_after_forward,
        replicas,
        prefetch,
        param_dtype,
        reduce_dtype,
        cpu_offload,
        split=tp,
        source=source,
        engine=engine,
    )
    options: dict[str, Any] = {
        "max_overhead": None if max_overhead is None else overhead_value(max_overhead),
        **compiling(engine, granularity, source),
        "headroom": budget_value(headroom),
        "budget_of": budget_of,
        "time_limit_s": time_limit,
        "gap": gap,
    }
    limit = None if budget is None else budget_value(budget)
    spec, held = None, []
    if hf is None and sharded is None:
        assert source is not None
        record = planned(out, source, limit, regions, options, arguments)
    else:
        target = _target(hf, source, arguments, batch or 1, seq, dtype, optimizer)
        spec = None if sharded is None else sharded.spec(target)
        record = planned_for_device(out, target, device, limit, regions, options, spec)
        held = [] if spec is None else sizes(spec, target, record.profile, record)
    if output is not None:
        record.save(output)
    from autoac_solver.show.explanation import explain
    from autoac_solver.show.summary import summary

    data = {**document(record), "output": None if output is None else str(output)}
    shown = explain(record) if details else f"{summary(record)} --details says more."
    tables = []
    if spec is not None:
        data |= of_ranks(spec, held)
        tables = [
            "",
            parts_table(spec.ranks or 1, data["peak_parts_bytes"]),
            *([sizes_table(spec, held)] if held else []),
        ]
    written = [f"Written: {output}"] if output is not None else []
    out.results(data, shown, *tables, *written)


def _target(
    hf: str | None,
    source: str | None,
    arguments: Sequence[str] | None,
    batch: int,
    seq: int | None,
    dtype: str | None,
    optimizer: str | None,
) -> Target:
    if hf is None:
        assert source is not None
        return load_target(source, arguments)
    assert seq is not None
    no_arguments(arguments)
    return load_pretrained(hf, batch, seq, dtype, optimizer or "adamw")


def planned(
    out: Output,
    source: str,
    limit: int | str | None,
    regions: Sequence[str] | None,
    options: dict[str, Any],
    arguments: Sequence[str] | None = None,
) -> PlanRecord:
    """A plan from a model or from a file."""
    if not is_recorded(source):
        target = load_target(source, arguments)
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
    no_arguments(arguments)
    found = recorded(source)
    options |= found.engine_for(options["engine"])
    from autoac_solver.plan.planning import plan_profile

    with out.progress("Planning") as tell:
        return plan_profile(
            found.profile,
            limit,
            regions=matching(found.profile, regions),
            policies=found.policies,
            progress=tell,
            **options,
        )


def planned_for_device(
    out: Output,
    target: Target,
    device: str | None,
    limit: int | str | None,
    regions: Sequence[str] | None,
    options: dict[str, Any],
    spec: FSDP2 | TensorParallel | None = None,
) -> PlanRecord:
    """A plan from a model that is profiled for a device or as one of ranks, which need not be here.

    Raises:
        BudgetFormatError, ValueError: the budget is invalid; raised before anything is profiled.
    """
    import autoac
    from autoac.progress import part
    from autoac_solver.plan.planning import aims
    from autoac_solver.plan.reserved import check_budget_of

    kind, total_bytes = _memory_of(target, device)
    aims(limit, options["max_overhead"], options["headroom"], total_bytes)
    check_budget_of(options["budget_of"], kind)
    with out.progress("Planning") as tell:
        profile = autoac.profile(
            target.model,
            target.sample,
            loss=target.loss,
            optimizer=target.optimizer,
            regions=regions,
            device=device,
            parallel=spec,
            progress=part(tell, 0.0, 0.7),
        )
        return autoac.solve(
            profile, limit, regions=matching(profile, regions), progress=part(tell, 0.7, 1.0), **options
        ).record


def _memory_of(target: Target, device: str | None) -> tuple[str, int | None]:
    """The planned device's kind, and its memory in bytes if known."""
    from autoac.step.model import device_bytes, device_of
    from autoac_solver.records.devices import find_device

    if device is not None:
        table = find_device(device)
        return table.kind, table.memory_bytes
    import torch

    here = device_of(target.model)
    here = torch.device("cpu") if here.type == "meta" else here
    return here.type, device_bytes(here) or None


def overhead_value(text: str) -> float | str:
    """Parse a share ("0.05") or a percentage ("5%").

    Raises:
        typer.BadParameter: it is neither.
    """
    from autoac_solver.records.units import parse_overhead

    try:
        return parse_overhead(float(text) if text.replace(".", "", 1).isdecimal() else text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--max-overhead'") from error


def matching(profile: Profile, patterns: Sequence[str] | None) -> list[str] | None:
    """Names of a recorded step's modules that match the given names or globs.

    Raises:
        typer.BadParameter: one of them matches none, or only modules inside of others.
    """
    if patterns is None:
        return None
    from autoac_solver.records.arguments import matched, outermost_matched
    from autoac_solver.records.errors import ProfilingError

    try:
        return outermost_matched(
            matched(patterns, dict.fromkeys(call.fqn for call in profile.calls), "the profiled step")
        )
    except ProfilingError as error:
        raise typer.BadParameter(str(error), param_hint="'--regions'") from error


def document(record: PlanRecord) -> dict[str, Any]:
    """A plan in numbers, for `--json`."""
    from autoac_solver.plan.recorded.peak import peak_parts
    from autoac_solver.plan.recorded.step import step_of
    from autoac_solver.show.summary import about_times, needless, notes

    step_s = record.predicted_step_s
    return {
        "model": record.model,
        "device": record.device,
        "engine": record.engine,
        "budget_bytes": record.budget_bytes,
        "headroom_bytes": record.headroom_bytes,
        "budget_of": record.budget_of,
        "predicted_peak_bytes": record.predicted_peak_bytes,
        "predicted_reserved_bytes": record.predicted_reserved_bytes,
        "unplanned_peak_bytes": record.unplanned_peak_bytes,
        "resident_bytes": record.resident_bytes,
        "peak_parts_bytes": peak_parts(record),
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
        "peak_where": step_of(record).peak_where,
        "sample": record.profile.sample,
        "times": about_times(record.profile) or "times measured",
        "is_checkpointing_needed": not needless(record),
        "notes": list(notes(record)),
    }
