"""Makes a plan's record from a profile and a budget, and the curve over budgets; without torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoac_solver.build.engines import DEFAULT, check_supported, engine_model, planned_for
from autoac_solver.plan.baselines import baselines, checkpointed
from autoac_solver.plan.choices import Choices
from autoac_solver.plan.curve import Tradeoff
from autoac_solver.plan.overhead import least_memory
from autoac_solver.plan.partitions import named_calls, partitions, partitions_in_parts
from autoac_solver.plan.recorded.made import make_record
from autoac_solver.plan.reserved import WithinReserved, allocator_of, check_budget_of
from autoac_solver.plan.sweep import feasible_range, sweep
from autoac_solver.records.arguments import (
    Tell,
    as_patterns,
    check_effort,
    check_points,
    matched,
    outermost_matched,
    several_budgets,
)
from autoac_solver.records.asked import answers
from autoac_solver.records.errors import BudgetFormatError, InfeasibleBudgetError, ProfilingError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile
from autoac_solver.records.units import parse_bytes, parse_overhead


def plan_profile(
    profile: Profile,
    budget: int | str | None,
    *,
    max_overhead: float | str | None = None,
    engine: str = "auto",
    engine_reason: str = "",
    regions: str | Iterable[str] | None = None,
    policies: Sequence[Policy] = (),
    headroom: int | str = 0,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Tell | None = None,
) -> PlanRecord:
    """Make a plan's record for a profile: the least time within a budget, or the least memory within an overhead.

    Args:
        budget, max_overhead: exactly one must be given.
        engine: an engine's name, or "auto", which is "replay" here.
        engine_reason: why this engine; "" for a default text.
        regions: names or globs of modules; None chooses them automatically.
        policies: constraints and hints, see `policies`.
        headroom, budget_of, time_limit_s, gap, progress: as for `autoac.plan`.

    Raises:
        InfeasibleBudgetError: no plan fits; the error names the least possible budget.
        PolicyError: the policies conflict, or one matches nothing, raised before any solving; or they demand more time
            than `max_overhead`.
        ProfilingError: a region is no module of the profiled step, or is inside another one.
        ValueError: an argument is invalid; raised before any work.
    """
    start = time.perf_counter()
    engine, reason = resolve_engine(engine)
    check_effort(time_limit_s, gap)
    check_budget_of(budget_of, profile.device)
    if budget_of == "reserved":
        check_supported(engine, "budget_of")
    budget_bytes, headroom_bytes, overhead = aims(
        budget, max_overhead, headroom, profile.device_bytes or None
    )
    if overhead is not None and budget_of == "reserved":
        raise ValueError("budget_of='reserved' goes with a budget, not with max_overhead.")
    choices = choices_of(profile, regions, engine, policies)
    left_s = max(0.0, time_limit_s - (time.perf_counter() - start))
    tell = progress or (lambda *_: None)
    try:
        if overhead is not None:
            choice, solution = least_memory(choices, overhead, left_s, gap, tell)
            budget_bytes = solution.peak_bytes + headroom_bytes
        elif budget_of == "reserved":
            search = WithinReserved(choices, budget_bytes - headroom_bytes, allocator_of(profile))
            choice, solution = search.solve(left_s, gap, tell)
        else:
            choice, solution = choices.best(budget_bytes - headroom_bytes, left_s, gap, tell)
    except InfeasibleBudgetError as error:
        error.leave(headroom_bytes)
        raise
    solution = replace(solution, solve_s=time.perf_counter() - start)
    return make_record(
        profile,
        choice.stack,
        solution,
        budget_bytes,
        headroom_bytes,
        engine_reason or reason,
        budget_of,
    )


@answers("peak_bytes")
def peak_bytes(profile: Profile) -> int:
    """The peak of the step without a plan, with torch's own loss."""
    return checkpointed(profile, ()).peak_bytes


@answers("least_peak_bytes")
def least_budget_bytes(profile: Profile, engine: str = DEFAULT) -> int:
    """The least peak of any plan."""
    try:
        return plan_profile(profile, max(1, profile.resident_bytes), engine=engine).predicted_peak_bytes
    except InfeasibleBudgetError as error:
        return error.minimum_bytes


def plan_budgets(
    profile: Profile,
    budgets: int | str | Iterable[int | str] | None = None,
    points: int = 20,
    *,
    engine: str = "auto",
    engine_reason: str = "",
    regions: str | Iterable[str] | None = None,
    policies: Sequence[Policy] = (),
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Tell | None = None,
) -> Tradeoff:
    """Make the curve over a range of budgets; its plans are records.

    Args:
        engine_reason: as for `plan_profile`; all other arguments as for `autoac.tradeoff`.

    Raises:
        InfeasibleBudgetError, PolicyError, ProfilingError, ValueError: as for `autoac.tradeoff`.
    """
    engine, reason = resolve_engine(engine)
    check_effort(time_limit_s, gap)
    check_points(points, budgets)
    total = profile.device_bytes or None
    given = None if budgets is None else [limits(b, 0, total)[0] for b in several_budgets(budgets)]
    choices = choices_of(profile, regions, engine, policies)
    tell = progress or (lambda *_: None)
    tell("what people do by hand", 0.0)
    by_hand = baselines(profile)
    if given is None:
        tell("the least feasible budget", 0.0)
        least, most = feasible_range(choices, time_limit_s)
        given = [least + (most - least) * i // (points - 1) for i in range(points)]
    found, notes = sweep(choices, given, time_limit_s, gap, tell)
    curve = Tradeoff(profile, engine, engine_reason or reason, found, by_hand, notes, tuple(policies))
    if curve.step_s != profile.step_s:  # compiled at its fastest points: one base for all
        by_hand["extra_s"] += profile.step_s - curve.step_s
        by_hand["overhead"] = by_hand["extra_s"] / curve.step_s
    return curve


def resolve_engine(engine: str) -> tuple[str, str]:
    """The engine and the reason for it; "auto" is the engine of eager mode.

    Raises:
        ValueError: unknown engine.
    """
    known = ("auto", *planned_for())
    if engine not in known:
        raise ValueError(f"engine is {engine!r}; possible are {', '.join(map(repr, known))}.")
    return (DEFAULT, "auto: eager mode") if engine == "auto" else (engine, "asked for")


def aims(
    budget: int | str | None, max_overhead: float | str | None, headroom: int | str, total: int | None
) -> tuple[int, int, float | None]:
    """Budget in bytes (0 if there is none), headroom in bytes, and the maximum overhead (None with a budget).

    Args:
        total: the device's memory, for budgets like "80%".

    Raises:
        BudgetFormatError: neither or both are given; or as for `limits`.
        ValueError: `max_overhead` is invalid.
    """
    if (budget is None) == (max_overhead is None):
        given = "neither" if budget is None else "both"
        raise BudgetFormatError(
            f"{given} of budget and max_overhead {'is' if budget is None else 'are'} given: give budget for the least "
            "time within it, or max_overhead for the least memory."
        )
    if max_overhead is not None:
        return 0, 0 if headroom == 0 else parse_bytes(headroom, total), parse_overhead(max_overhead)
    assert budget is not None
    return *limits(budget, headroom, total), None


def limits(budget: int | str, headroom: int | str, total: int | None) -> tuple[int, int]:
    """Budget and headroom in bytes.

    Args:
        total: the device's memory, for budgets like "80%".

    Raises:
        BudgetFormatError: one of them is no amount of memory, or the headroom is not less than the budget.
    """
    budget_bytes = parse_bytes(budget, total)
    headroom_bytes = 0 if headroom == 0 else parse_bytes(headroom, total)
    if headroom_bytes >= budget_bytes:
        raise BudgetFormatError(f"headroom={headroom!r} leaves nothing of budget={budget!r}.")
    return budget_bytes, headroom_bytes


def choices_of(
    profile: Profile, regions: str | Iterable[str] | None, engine: str, policies: Sequence[Policy] = ()
) -> Choices:
    """The choices of regions to plan with; arguments and errors as for `region_choices`."""
    calls = region_choices(profile, regions, engine)
    further = partitions_in_parts(profile, engine) if regions is None else ()
    return Choices(profile, calls, engine, policies, further)


def region_choices(
    profile: Profile, regions: str | Iterable[str] | None, engine: str
) -> list[tuple[int, ...]]:
    """The choices of regions to try, from coarse to fine; a single one if the user named regions.

    Args:
        regions: names or globs of modules; each must match a module of the profiled step.
        engine: as for `partitions`.

    Raises:
        ProfilingError: one matches no module, or only modules inside others, or was not compiled for engine compile; or
            no module was called with gradients on.
        ValueError: they are no names.
    """
    if regions is None:
        return partitions(profile, engine)
    called = dict.fromkeys(call.fqn for call in profile.calls)
    names = outermost_matched(matched(as_patterns(regions), called, "the profiled step"))
    calls = named_calls(profile, names)
    if not calls:
        raise ProfilingError(
            f"none of the regions {names} was called with gradients on in the profiled step."
        )
    if engine_model(engine).compiles and profile.compiled is not None:
        measured = {profile.spans[call].fqn for region in profile.compiled.regions for call in region.calls}
        if missing := sorted({profile.calls[call].fqn for call in calls} - measured):
            raise ProfilingError(
                f"region {missing[0]!r} was not compiled and measured when this profile was made; these were: "
                f"{', '.join(sorted(measured))}. Profile again with engine='compile' and these regions=."
            )
    return [tuple(calls)]
