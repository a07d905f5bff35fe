"""Our plans as strategies, one for each budget."""

from __future__ import annotations

from collections.abc import Mapping

from autoac.calibrate.compiled.table import NothingCompiled
from autoac.calibrate.compiled.tried import tried
from autoac.compare.compiled import ALL, at_fraction
from autoac.compare.strategies import Strategy
from autoac.plans import Plan
from autoac.step.step import TrainingStep
from autoac_solver.plan.planning import plan_profile
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.engines import compiles
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import Profile

NO_PLAN_FITS = "no plan fits"
SOME = "some blocks"
"""Group of plans that leave blocks uncompiled, because that is faster (see `Strategy.compiled`)."""
WITHOUT = "the plans' blocks compiled, no budget"
"""The strategy whose gradients theirs are compared with."""


def budgets_between(least_bytes: int, most_bytes: int, count: int) -> list[int]:
    """`count` budgets at equal distances, both ends included."""
    return [least_bytes + (most_bytes - least_bytes) * i // max(1, count - 1) for i in range(count)]


def planned(
    profile: Profile, budgets: Mapping[str, int], engine: str, step: TrainingStep | None = None
) -> list[Strategy]:
    """Our plan for each budget, as a strategy; a strategy with an error if there is no plan.

    Args:
        budgets: bytes, by the name of the strategy.
        step: the step on which plans of engine compile are tried, as in `autoac.plan`; None to skip that.
    """
    found = [_planned(profile, name, budget, engine, step) for name, budget in budgets.items()]
    if any(strategy.compiled == SOME for strategy in found):
        most = Plan(plan_profile(profile, 10**15, engine=engine))
        found.insert(0, Strategy(WITHOUT, "other", at_fraction(most, 1.0, slower=False).apply, compiled=SOME))
    return found


def _planned(
    profile: Profile, name: str, budget_bytes: int, engine: str, step: TrainingStep | None
) -> Strategy:
    def solved(profile: Profile) -> Plan:
        return Plan(plan_profile(profile, budget_bytes, engine=engine))

    try:
        if compiles(engine) and step is not None:
            plan = tried(profile, step, budget_bytes, solved)
        else:
            plan = solved(profile)
    except InfeasibleBudgetError as error:
        reason = f"{NO_PLAN_FITS}: the least possible peak is {format_bytes(error.minimum_bytes)}"
        return Strategy(name, "ours", lambda model: model, budget_bytes, error=reason)
    except (NoPlanInTimeError, NothingCompiled) as error:
        return Strategy(name, "ours", lambda model: model, budget_bytes, error=str(error))
    return Strategy(
        name=name,
        kind="ours",
        install=plan.apply,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_overhead=plan.predicted_overhead,
        compiled=_compiled(plan),
    )


def _compiled(plan: Plan) -> str:
    """Which blocks the plan compiles, as `Strategy.compiled`."""
    points = {region.point for region in plan.regions}
    if points <= {EAGER}:
        return ""
    table = plan.record.profile.compiled
    assert table is not None
    return SOME if any(region.points and region.failure for region in table.regions) else ALL
