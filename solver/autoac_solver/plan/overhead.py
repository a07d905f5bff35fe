"""The inverse problem: the least memory for a given maximum overhead."""

from __future__ import annotations

import math
import time

from autoac_solver.plan.choices import Choice, Choices
from autoac_solver.plan.sweep import feasible_range
from autoac_solver.problem.solution import Solution
from autoac_solver.records.arguments import Tell
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError, PolicyError

PRECISION = 1e-3
"""Precision of the search, as a share of the peak with nothing recomputed."""


def least_memory(
    choices: Choices,
    max_overhead: float,
    time_limit_s: float,
    gap: float,
    tell: Tell = lambda *_: None,
) -> tuple[Choice, Solution]:
    """Find the plan with the least peak whose overhead is within a maximum.

    A larger budget hardly ever needs more time, so the range of budgets is bisected; the lower half is dropped if the
    fastest plan found at its upper end is too slow.

    Args:
        max_overhead: extra time / step time.
        time_limit_s: for the whole search; at the limit the best plan so far is returned.
        gap: accepted distance from the least time at each budget, as a fraction of the step.

    Raises:
        PolicyError: with the policies, every plan adds more.
    """
    deadline = time.perf_counter() + time_limit_s

    def left_s() -> float:
        return max(0.1, deadline - time.perf_counter())

    tell("the least feasible budget", 0.0)
    least, most = feasible_range(choices, left_s())
    best = choices.best(most, left_s(), gap)
    step_s = best[0].built.problem.step_s  # with compiled regions another one than the profile's
    most_s = max_overhead * step_s
    if best[1].extra_s > most_s:
        share = best[1].extra_s / step_s
        raise PolicyError(
            f"with these policies a plan adds {share:.1%} to the step's time at any budget, and max_overhead is "
            f"{max_overhead:.1%}: raise it, or drop policies that demand recomputation."
        )
    low, high = least - 1, best[1].peak_bytes  # No plan is known for low; there is one for high.
    close = max(1, PRECISION * most)
    steps = max(1.0, math.log2(max(1, high - low) / close))
    limit = least
    while high - low > close and time.perf_counter() < deadline:
        tell("the least memory", max(0.0, 1 - math.log2((high - low) / close) / steps))
        try:
            found = choices.best(limit, max(0.1, left_s() / 2), gap)
        except (InfeasibleBudgetError, NoPlanInTimeError):
            low = limit
        else:
            if found[1].extra_s <= most_s:
                best, high = found, found[1].peak_bytes
            else:
                low = limit
        limit = (low + high) // 2
    return best
