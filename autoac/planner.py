"""The way through: profile a step, solve for a budget, hand out the plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch

from autoac.compat import is_compiled_wrapper
from autoac.optimizer import with_optimizer
from autoac.plans import Plan
from autoac.recorder import check_model, device_bytes, device_of, record, unwrapped
from autoac.regions import RegionChoice, named_calls, select_modules
from autoac.step import Loss, make_step
from autoac_solver.build import Built, build
from autoac_solver.curve import COLUMNS, Tradeoff
from autoac_solver.errors import InfeasibleBudgetError, ProfilingError
from autoac_solver.ilp import solve as solve_problem
from autoac_solver.partitions import partitions
from autoac_solver.plan_record import PlanRecord, RegionPlan
from autoac_solver.profile import Profile
from autoac_solver.report import (
    decisions_table,
    describe_position,
    fixed_bytes_at,
    holders_at,
    suggestions,
    timeline_table,
)
from autoac_solver.simulator import Simulator
from autoac_solver.solution import Solution
from autoac_solver.units import parse_bytes

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""

_MANY_UNITS = 1000

ENGINES = ("auto", "replay", "sac")


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
    _check_engine(engine)
    total = device_bytes(device_of(model))
    budget_bytes, _ = _limits(budget, headroom, total)
    reason = "asked for"
    if engine == "auto":
        engine = "sac" if compiled else "replay"
        reason = "auto: the model is compiled" if compiled else "auto: eager mode"
    recorded = profile(model, sample, loss=loss, optimizer=optimizer, progress=progress)
    names = select_modules(model, regions)
    return _solve(recorded, budget_bytes, engine, reason, names, headroom, time_limit_s, gap, progress)


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
    _check_engine(engine)
    budget_bytes, _ = _limits(budget, headroom, profile.device_bytes or None)
    names = [regions] if isinstance(regions, str) else None if regions is None else list(regions)
    reason = "auto: eager mode" if engine == "auto" else "asked for"
    engine = "replay" if engine == "auto" else engine
    return _solve(profile, budget_bytes, engine, reason, names, headroom, time_limit_s, gap, progress)


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
    _check_engine(engine)
    if points < 2:
        raise ValueError(f"points is {points}; a curve takes at least 2.")
    names = [regions] if isinstance(regions, str) else None if regions is None else list(regions)
    choices = region_choices(profile, names)
    reason = "auto: eager mode" if engine == "auto" else "asked for"
    engine = "replay" if engine == "auto" else engine
    if budgets is None:
        least, most = _range(profile, engine, choices, time_limit_s)
        limits = [least + (most - least) * i // (points - 1) for i in range(points)]
    else:
        limits = sorted(_limits(budget, 0, profile.device_bytes or None)[0] for budget in budgets)
    tell = progress or (lambda *_: None)
    found: list[tuple[int, Built, Solution]] = []
    infeasible: InfeasibleBudgetError | None = None
    try:
        for index, limit in enumerate(limits):
            tell(f"budget {index + 1} of {len(limits)}", index / len(limits))
            try:
                built, solution = best_plan(profile, limit, engine, choices, time_limit_s, gap)
            except InfeasibleBudgetError as error:
                infeasible = error
                continue
            if found and found[-1][2].extra_s < solution.extra_s:
                # within the gap, a smaller budget's plan may turn out faster; it fits this budget too
                _, built, better = found[-1]
                solution = replace(better, bound_s=solution.bound_s)
            found.append((limit, built, solution))
    except KeyboardInterrupt:
        if not found:
            raise
    if not found and infeasible is not None:
        raise infeasible
    return _curve(profile, engine, reason, found)


def _range(
    profile: Profile, engine: str, choices: Sequence[Sequence[int]], time_limit_s: float
) -> tuple[int, int]:
    """The least feasible budget, and the peak with nothing recomputed."""
    unplanned = [Simulator(build(profile, calls, engine).problem) for calls in choices[:1]]
    most = unplanned[0].simulate([False] * len(unplanned[0].problem.units)).peak_bytes
    try:
        best_plan(profile, profile.resident_bytes, engine, choices, time_limit_s, 1e-3)
    except InfeasibleBudgetError as error:
        return error.minimum_bytes, most
    return profile.resident_bytes, most


def _curve(profile: Profile, engine: str, reason: str, found: list[tuple[int, Built, Solution]]) -> Tradeoff:
    step_s = profile.step_s
    rows = [
        (limit, s.peak_bytes, s.extra_s, s.extra_s / step_s, s.bound_s / step_s, s.status, len(built.regions))
        for limit, built, s in found
    ]
    plans = tuple(Plan(make_record(profile, built, s, limit, 0, reason)) for limit, built, s in found)
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return Tradeoff(profile.model, engine, profile.resident_bytes, step_s, frame, plans)


def _check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; possible are {', '.join(map(repr, ENGINES))}.")


def _limits(budget: int | str, headroom: int | str, total: int | None) -> tuple[int, int]:
    budget_bytes = parse_bytes(budget, total)
    headroom_bytes = 0 if headroom == 0 else parse_bytes(headroom, total)
    if headroom_bytes >= budget_bytes:
        raise ValueError(f"headroom={headroom!r} leaves nothing of budget={budget!r}.")
    return budget_bytes, headroom_bytes


def _solve(
    profile: Profile,
    budget_bytes: int,
    engine: str,
    reason: str,
    names: Sequence[str] | None,
    headroom: int | str,
    time_limit_s: float,
    gap: float,
    progress: Progress | None,
) -> Plan:
    start = time.perf_counter()
    headroom_bytes = _limits(budget_bytes, headroom, profile.device_bytes or None)[1]
    limit = budget_bytes - headroom_bytes
    built, solution = best_plan(
        profile, limit, engine, region_choices(profile, names), time_limit_s, gap, progress
    )
    solution = replace(solution, solve_s=time.perf_counter() - start)
    return Plan(make_record(profile, built, solution, budget_bytes, headroom_bytes, reason))


def region_choices(profile: Profile, names: Sequence[str] | None) -> list[tuple[int, ...]]:
    """The choices of regions to try, from coarse to fine; only one where the user named them."""
    if names is None:
        return partitions(profile)
    calls = named_calls(profile, names)
    if not calls:
        raise ProfilingError(
            f"none of the regions {list(names)} was called with gradients on in the profiled step."
        )
    return [tuple(calls)]


def best_plan(
    profile: Profile,
    limit: int,
    engine: str,
    choices: Sequence[Sequence[int]],
    time_limit_s: float,
    gap: float,
    progress: Progress | None = None,
) -> tuple[Built, Solution]:
    """The fastest plan over the choices of regions: from coarse to fine, as long as finer ones help.

    Coarse regions are nearly always the faster ones, so in large models the first choice that fits is taken.

    Raises:
        InfeasibleBudgetError: for the choice with the least possible peak.
    """
    tell = progress or (lambda *_: None)
    deadline = time.perf_counter() + time_limit_s
    best: tuple[Built, Solution] | None = None
    infeasible: tuple[Built, InfeasibleBudgetError] | None = None
    for index, calls in enumerate(choices):
        tell(f"solving with {len(calls)} regions", index / len(choices))
        built = build(profile, calls, engine)
        left = max(0.1, deadline - time.perf_counter())
        try:
            solution = solve_problem(built.problem, limit, gap=gap, time_limit_s=left)
        except InfeasibleBudgetError as error:
            if infeasible is None or error.minimum_bytes < infeasible[1].minimum_bytes:
                infeasible = built, error
            continue
        if best is not None and solution.extra_s >= best[1].extra_s:
            break
        best = built, solution
        if solution.extra_s <= gap * built.problem.step_s or len(built.problem.units) > _MANY_UNITS:
            break
    if best is not None:
        return best
    if infeasible is None:
        raise ProfilingError(
            "no module of the profiled step has anything to recompute, so there is nothing to plan."
        )
    built, error = infeasible
    error.where = describe_position(profile, built, error.peak_position)
    error.holders = holders_at(profile, built, error.recomputed, error.peak_position)[:10]
    error.suggestions = suggestions(error.holders, finer_regions=len(choices) == 1)
    raise error


def make_record(
    profile: Profile, built: Built, solution: Solution, budget_bytes: int, headroom_bytes: int, reason: str
) -> PlanRecord:
    """The plan's record: decisions by region, what was predicted and proved, and the tables to look at."""
    recomputed = solution.recomputed
    simulator = Simulator(built.problem)
    timeline = simulator.simulate(recomputed)
    nothing = simulator.simulate([False] * len(recomputed))
    again_in = {unit.region for unit, again in zip(built.problem.units, recomputed, strict=True) if again}
    calls_of = Counter(call.fqn for call in profile.calls if call.grad)
    regions = tuple(
        RegionPlan(
            fqn=profile.calls[tape.call].fqn,
            call=profile.calls[tape.call].call,
            calls=calls_of[profile.calls[tape.call].fqn],
            wrapped=index in again_in,
            steps=built.steps(profile, index, recomputed),
        )
        for index, tape in enumerate(built.regions)
    )
    return PlanRecord(
        model=profile.model,
        model_fingerprint=profile.model_fingerprint,
        op_fingerprint=profile.op_fingerprint,
        device=profile.device,
        torch_version=profile.torch_version,
        root_calls=sum(call.fqn == "" and call.grad for call in profile.calls),
        engine=built.engine,
        engine_reason=reason,
        budget_bytes=budget_bytes,
        headroom_bytes=headroom_bytes,
        resident_bytes=profile.resident_bytes,
        predicted_peak_bytes=timeline.peak_bytes,
        unplanned_peak_bytes=nothing.peak_bytes,
        predicted_extra_s=timeline.extra_s,
        predicted_step_s=profile.step_s,
        bound_s=solution.bound_s,
        gap=solution.gap,
        status=solution.status,
        solver=solution.solver,
        solve_s=solution.solve_s,
        peak_where=describe_position(profile, built, timeline.peak_position),
        peak_fixed_bytes=fixed_bytes_at(built, timeline.peak_position),
        peak_holders=holders_at(profile, built, recomputed, timeline.peak_position),
        regions=regions,
        decision_columns=_columns(decisions_table(profile, built, recomputed)),
        timeline_columns=_columns(timeline_table(profile, built, recomputed)),
    )


def _columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): frame[name].tolist() for name in frame.columns}
