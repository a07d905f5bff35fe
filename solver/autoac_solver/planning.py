"""From a profile and a budget to a plan's record, and to the curve over budgets; no torch anywhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

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

ENGINES = ("auto", "replay", "sac")

_MANY_UNITS = 1000


def plan_profile(
    profile: Profile,
    budget: int | str,
    *,
    engine: str = "auto",
    engine_reason: str = "",
    regions: str | Sequence[str] | None = None,
    headroom: int | str = 0,
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress | None = None,
) -> PlanRecord:
    """A plan's record for a profile and a budget.

    Args:
        engine: "replay", "sac", or "auto", which is "replay" here.
        engine_reason: why this engine; "" says it by itself.
        regions: names of modules; None chooses them.
        budget, headroom, time_limit_s, gap, progress: as for `autoac.plan`.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
    """
    start = time.perf_counter()
    engine, reason = resolve_engine(engine)
    budget_bytes, headroom_bytes = limits(budget, headroom, profile.device_bytes or None)
    choices = region_choices(profile, regions)
    built, solution = best_plan(
        profile, budget_bytes - headroom_bytes, engine, choices, time_limit_s, gap, progress
    )
    solution = replace(solution, solve_s=time.perf_counter() - start)
    return make_record(profile, built, solution, budget_bytes, headroom_bytes, engine_reason or reason)


def plan_budgets(
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
    """The curve over a range of budgets; its plans are records. See `autoac.tradeoff`."""
    engine, reason = resolve_engine(engine)
    if points < 2:
        raise ValueError(f"points is {points}; a curve takes at least 2.")
    choices = region_choices(profile, regions)
    if budgets is None:
        least, most = _range(profile, engine, choices, time_limit_s)
        budgets_bytes = [least + (most - least) * i // (points - 1) for i in range(points)]
    else:
        budgets_bytes = sorted(limits(budget, 0, profile.device_bytes or None)[0] for budget in budgets)
    tell = progress or (lambda *_: None)
    found: list[tuple[int, Built, Solution]] = []
    infeasible: InfeasibleBudgetError | None = None
    try:
        for index, limit in enumerate(budgets_bytes):
            tell(f"budget {index + 1} of {len(budgets_bytes)}", index / len(budgets_bytes))
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
    plans = tuple(make_record(profile, built, s, limit, 0, reason) for limit, built, s in found)
    frame = pd.DataFrame(rows, columns=COLUMNS)
    return Tradeoff(profile.model, engine, profile.resident_bytes, step_s, frame, plans)


def resolve_engine(engine: str) -> tuple[str, str]:
    """The engine and why it is that; "auto" is "replay", which is what eager mode takes.

    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; possible are {', '.join(map(repr, ENGINES))}.")
    return ("replay", "auto: eager mode") if engine == "auto" else (engine, "asked for")


def limits(budget: int | str, headroom: int | str, total: int | None) -> tuple[int, int]:
    """Budget and headroom in bytes.

    Args:
        total: the device's memory, for budgets like "80%".

    Raises:
        ValueError: the headroom leaves nothing of the budget.
        BudgetFormatError: one of them is no amount of memory.
    """
    budget_bytes = parse_bytes(budget, total)
    headroom_bytes = 0 if headroom == 0 else parse_bytes(headroom, total)
    if headroom_bytes >= budget_bytes:
        raise ValueError(f"headroom={headroom!r} leaves nothing of budget={budget!r}.")
    return budget_bytes, headroom_bytes


def region_choices(profile: Profile, names: str | Sequence[str] | None) -> list[tuple[int, ...]]:
    """The choices of regions to try, from coarse to fine; only one where the user named them."""
    if names is None:
        return partitions(profile)
    names = [names] if isinstance(names, str) else list(names)
    calls = named_calls(profile, names)
    if not calls:
        raise ProfilingError(
            f"none of the regions {names} was called with gradients on in the profiled step."
        )
    return [tuple(calls)]


def named_calls(profile: Profile, names: Sequence[str]) -> list[int]:
    """The module calls of the modules with these names, without calls inside another one of them."""
    wanted = set(names)
    chosen: set[int] = set()
    for index, call in enumerate(profile.calls):
        inside, parent = False, call.parent
        while parent >= 0 and not inside:
            inside, parent = parent in chosen, profile.calls[parent].parent
        if call.fqn in wanted and call.grad and not inside:
            chosen.add(index)
    return sorted(chosen)


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
        profile=profile,
        decision_columns=_columns(decisions_table(profile, built, recomputed)),
        timeline_columns=_columns(timeline_table(profile, built, recomputed)),
    )


def _columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    return {str(name): frame[name].tolist() for name in frame.columns}
