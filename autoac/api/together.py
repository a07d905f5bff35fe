"""Plan on all ranks together."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from autoac.api.checks import checked
from autoac.api.profiling import profile
from autoac.api.solving import plan_recorded
from autoac.parallel.one_plan import facts_of, for_all, needs_most, same_everywhere
from autoac.parallel.protocol import Parallel
from autoac.plans import Plan
from autoac.policies import listed
from autoac.progress import part, progress_shown
from autoac.ranks.all_or_none import together
from autoac.ranks.joined import same_wish, within
from autoac.step.model import device_of, unwrapped
from autoac.step.step import TrainingStep
from autoac.torch_private import ranks_of
from autoac_solver.plan.reserved import check_budget_of
from autoac_solver.records.arguments import check_effort


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
    alone = replace(wrapped, is_here=False)  # type: ignore[type-var]
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
        compared = ("engine", "headroom", "max_overhead", "budget_of")
        facts = {name: options[name] for name in compared}
        facts["optimizer"] = None if step.optimizer is None else type(step.optimizer).__name__
        policies = listed(options["policies"])
        same_everywhere(ranks, facts_of(step.model, budget=budget, regions=names, policies=policies, **facts))
        with progress_shown("planning", options.pop("progress")) as tell:
            with ranks.step():
                recorded = profile(
                    model,
                    sample,
                    parallel=alone,
                    progress=part(tell, 0.0, 0.7),
                    **{name: options.pop(name) for name in ("loss", "optimizer", "mode", "device")},
                )
            del options["regions"]
            make = functools.partial(
                plan_recorded,
                *(model, recorded, budget),
                names=names,
                progress=part(tell, 0.7, 1.0),
                **options,
            )
            return for_all(ranks, needs_most(ranks, recorded), model, recorded, make)
