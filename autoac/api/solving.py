"""Plan from a profile: for one budget, for a range of budgets, and for `plan` after recording."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autoac.api.checks import check_is_profile
from autoac.api.choosing import engine_for
from autoac.plans import Plan, Tradeoff
from autoac.policies import Policies, as_policies, listed
from autoac.progress import Progress, Tell, progress_shown
from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.records.engines import EngineName
from autoac_solver.records.profile import Profile


def solve(
    profile: Profile,
    budget: int | str | None = None,
    *,
    max_overhead: float | str | None = None,
    engine: EngineName = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    headroom: int | str = 0,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress = None,
) -> Plan:
    """Plan from a profile; no model is needed.

    Args:
        profile: recorded by `profile`, or loaded.
        regions: names or globs of modules of the profiled step; None chooses them.
        budget, max_overhead, policies, engine, headroom, budget_of, time_limit_s, gap, progress: as for `plan`;
            "auto" is "replay" here.

    Raises:
        InfeasibleBudgetError: no plan fits; it says what the least possible budget is.
        PolicyError: policies conflict, or one matches nothing in the step.
        ProfilingError: a region is no module of the profiled step, or inside another one.
        ValueError: an argument is invalid.
    """
    check_is_profile(profile)
    with progress_shown("planning", progress) as tell:
        return Plan(
            plan_profile(
                profile,
                budget,
                max_overhead=max_overhead,
                engine=engine,
                regions=regions,
                policies=as_policies(policies, profile),
                headroom=headroom,
                budget_of=budget_of,
                time_limit_s=time_limit_s,
                gap=gap,
                progress=tell,
            )
        )


def plan_recorded(
    model: torch.nn.Module,
    recorded: Profile,
    budget: int | str | None,
    *,
    max_overhead: float | str | None = None,
    names: list[str] | None,
    policies: Policies,
    engine: EngineName,
    engine_reason: str = "",
    headroom: int | str,
    budget_of: str = "allocated",
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Tell | None = None,
) -> Plan:
    """The plan for a model whose step was recorded.

    Args:
        names: what `checked` returned.
        engine_reason: why it is this engine, if the caller has chosen it.
        budget, max_overhead, policies, engine, headroom, budget_of, time_limit_s, gap: as for `plan`, and checked.
        progress: called with a text and the share done.

    Raises:
        InfeasibleBudgetError, PolicyError, ProfilingError: as for `plan`.
    """
    engine, reason = engine_for(model, engine)
    names = called_among(recorded, names)
    return Plan(
        plan_profile(
            recorded,
            budget,
            max_overhead=max_overhead,
            engine=engine,
            engine_reason=engine_reason or reason,
            regions=names,
            policies=as_policies(listed(policies), recorded),
            headroom=headroom,
            budget_of=budget_of,
            time_limit_s=time_limit_s,
            gap=gap,
            progress=progress,
        )
    )


def called_among(recorded: Profile, names: list[str] | None) -> list[str] | None:
    """The given modules that the step calls, as a glob may match others; all of them if it calls none."""
    called = {call.fqn for call in recorded.calls}
    return None if names is None else [name for name in names if name in called] or names


def tradeoff(
    profile: Profile,
    budgets: int | str | Iterable[int | str] | None = None,
    points: int = 20,
    *,
    engine: EngineName = "auto",
    regions: str | Iterable[str] | None = None,
    policies: Policies = (),
    time_limit_s: float = 60.0,
    gap: float = 1e-3,
    progress: Progress = None,
) -> Tradeoff:
    """Plans over a range of budgets, from the least feasible one to the one that needs no recomputation.

    Args:
        budgets: one or more to plan for; those that no plan meets are left out. None spreads `points` of them evenly.
        points: how many budgets, 2 to 10,000.
        time_limit_s: for each budget; the search starts from the plan of the next smaller budget.
        profile, engine, regions, policies, gap, progress: as for `solve`. Ctrl-C keeps what is done so far.

    Raises:
        InfeasibleBudgetError: `budgets` are given, and no plan meets any of them.
        PolicyError, ProfilingError, ValueError: as for `solve`.
    """
    check_is_profile(profile)
    with progress_shown("planning", progress) as tell:
        curve = plan_budgets(
            profile,
            budgets,
            points,
            engine=engine,
            regions=regions,
            policies=as_policies(policies, profile),
            time_limit_s=time_limit_s,
            gap=gap,
            progress=tell,
        )
    return Tradeoff.of(curve)
