"""Plan on all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from autoac.api.checks import asked_for, check_engine_options, checked
from autoac.api.choosing import engine_for, engine_to_plan_with
from autoac.api.profiling import profile
from autoac.api.solving import plan_recorded
from autoac.calibrate.compiled.table import NothingCompiled
from autoac.calibrate.compiled.tried import looked_at, tried
from autoac.device import device_for
from autoac.parallel.one_plan import (
    facts_of,
    for_all,
    needs_most,
    owner_first,
    same_everywhere,
    shared,
    solved_by,
)
from autoac.parallel.protocol import Parallel, Sharded
from autoac.plans import Plan
from autoac.policies import listed
from autoac.progress import Tell, part, progress_shown
from autoac.ranks.all_or_none import Ranks, together
from autoac.ranks.joined import same_wish, within
from autoac.step.model import device_of, unwrapped
from autoac.step.step import TrainingStep
from autoac.torch_private import ranks_of
from autoac_solver.plan.planning import limits
from autoac_solver.plan.reserved import check_budget_of
from autoac_solver.records.arguments import check_effort
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.profile import Profile

Result = TypeVar("Result")


def plan_together(
    model: torch.nn.Module, sample: Any, budget: int | str | None, wrapped: Parallel, options: dict[str, Any]
) -> Plan:
    """Make one plan on all ranks together, for the rank whose step keeps the most bytes, that fits all.

    Args:
        wrapped: how the model is trained.
        options: the other arguments of `plan`.

    Raises:
        ParallelError: an error of one of the ranks, raised on all of them.
    """
    with within(together("plan", members=ranks_of(model))) as ranks:
        same_wish(ranks, "plan")
        names = checked(
            model,
            budget,
            options["regions"],
            options["policies"],
            options["engine"],
            options["headroom"],
            options["max_overhead"],
        )
        check_budget_of(options["budget_of"], str(device_of(unwrapped(model))))
        step = TrainingStep(unwrapped(model), sample, options["loss"], options["optimizer"])
        check_effort(options["time_limit_s"], options["gap"])
        policies = listed(options["policies"])
        asked = asked_for(
            policies, *(options[name] for name in ("max_overhead", "budget_of", "mode", "device"))
        )
        engine, reason = engine_to_plan_with(model, options["engine"], asked)
        check_engine_options(engine, options["granularity"], asked)
        compared = ("granularity", "headroom", "max_overhead", "budget_of")
        facts = {"engine": engine, **{name: options[name] for name in compared}}
        facts["optimizer"] = None if step.optimizer is None else type(step.optimizer).__name__
        same_everywhere(ranks, facts_of(step.model, budget=budget, regions=names, policies=policies, **facts))
        with progress_shown("planning", options["progress"]) as tell:
            plan_with = functools.partial(
                _plan, ranks, model, sample, budget, wrapped, step, names, tell, options
            )
            try:
                return plan_with(engine, reason)
            except NothingCompiled as error:
                why = f"nothing of the model can be compiled: {error.why}"
                if options["engine"] != "auto":
                    raise
            except torch.OutOfMemoryError:
                why = "the step does not fit here while its blocks are compiled and measured"
                # Ranks of a sharded model would still wait for this one.
                if options["engine"] != "auto" or not compiles(engine) or isinstance(wrapped, Sharded):
                    raise
            device_for(device_of(step.model)).release_cache()
            return plan_with(engine_for(model, "auto")[0], f"auto: {why}")


def _plan(
    ranks: Ranks,
    model: torch.nn.Module,
    sample: Any,
    budget: int | str | None,
    wrapped: Parallel,
    step: TrainingStep,
    names: list[str] | None,
    tell: Tell,
    options: Mapping[str, Any],
    engine: EngineName,
    reason: str,
) -> Plan:
    """The plan of an engine, on all ranks.

    Raises:
        NothingCompiled: of engine compile on a rank; raised on all of them.
    """

    def recorded() -> Profile:
        with ranks.step():
            return profile(
                model,
                sample,
                parallel=replace(wrapped, is_here=False),  # type: ignore[type-var]
                engine=engine,
                progress=part(tell, 0.0, 0.7),
                **{name: options[name] for name in _OF_PROFILE},
            )

    def solve(found: Profile) -> Plan:
        return plan_recorded(
            model,
            found,
            budget,
            names=names,
            engine=engine,
            engine_reason=reason,
            progress=part(tell, 0.7, 1.0),
            **{name: options[name] for name in _OF_SOLVER},
        )

    if not compiles(engine):
        found = recorded()
        return for_all(ranks, needs_most(ranks, found), model, found, lambda: solve(found))
    assert budget is not None
    found = _on_all(ranks, wrapped, recorded)
    owner = needs_most(ranks, found)

    def look(plan: Plan) -> tuple[int, Mapping[str, str]]:
        """See `Look`: the highest peak of all ranks, and the failures on any."""
        around = functools.partial(wrapped.as_wrapped, step.model)

        def run() -> tuple[int, Mapping[str, str]]:
            with ranks.step():
                return looked_at(plan, step, found.resident_bytes, around)

        all_of_them = ranks.all(_on_all(ranks, wrapped, run))
        failures = {name: why for _, failed in all_of_them for name, why in failed.items()}
        return max(peak for peak, _ in all_of_them), failures

    budget_bytes, headroom_bytes = limits(budget, options["headroom"], found.device_bytes or None)
    solve_on_all = functools.partial(solved_by, ranks, owner, model, solve)
    with owner_first(ranks, owner):
        plan = tried(found, step, budget_bytes, solve_on_all, headroom_bytes, look)
    return shared(ranks, owner, plan, model)


_OF_PROFILE = "loss", "optimizer", "regions", "mode", "device", "granularity"
_OF_SOLVER = "max_overhead", "policies", "headroom", "budget_of", "time_limit_s", "gap"


def _on_all(ranks: Ranks, wrapped: Parallel, act: Callable[[], Result]) -> Result:
    """What a function returns, if it does on all ranks.

    Raises:
        NothingCompiled, torch.OutOfMemoryError: as it has on one.
    """
    found = error = None
    # Where a step has collectives of its own, the others still wait for a rank that has left it in the middle.
    told_to_all = (
        NothingCompiled if isinstance(wrapped, Sharded) else (NothingCompiled, torch.OutOfMemoryError)
    )
    try:
        found = act()
    except told_to_all as raised:
        error = raised
    told = None if error is None else [isinstance(error, NothingCompiled), getattr(error, "why", str(error))]
    first = next(filter(None, ranks.all(told)), None)
    if first is None:
        return cast("Result", found)
    if error is not None:
        raise error
    is_nothing, words = first
    raise NothingCompiled(words) if is_nothing else torch.OutOfMemoryError(words)
