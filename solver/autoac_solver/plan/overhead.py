"""The inverse question: the least memory with which a step takes at most so much longer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from autoac_solver.plan.choices import Choice, Choices
from autoac_solver.plan.sweep import feasible_range
from autoac_solver.problem.solution import Solution
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError, PolicyError

PRECISION = 1e-3
"""How close to the least peak the search comes, as a share of the peak with nothing recomputed."""


def least_memory(
    choices: Choices,
    max_overhead: float,
    time_limit_s: float,
    gap: float,
    tell: Callable[[str, float], None] = lambda *_: None,
) -> tuple[Choice, Solution]:
    """The plan with the least peak among those that add at most so much time.

    A larger budget never needs more time, so the least one is found by halving the range of budgets; each half that is
    given up is one for which the fastest plan was found too slow.

    Args:
        max_overhead: extra time / step time.
        time_limit_s: for the whole search; when it is over, the best plan so far is taken.
        gap: how far from the least time the plan of each budget may be, as a fraction of the step.

    Raises:
        PolicyError: with the policies, every plan adds more.
    """
    deadline = time.perf_counter() + time_limit_s

    def left_s() -> float:
        return max(0.1, deadline - time.perf_counter())

    most_s = max_overhead * choices.profile.step_s
    tell("the least feasible budget", 0.0)
    least, most = feasible_range(choices, left_s())
    best = choices.best(most, left_s(), gap)
    if best[1].extra_s > most_s:
        share = best[1].extra_s / choices.profile.step_s
        raise PolicyError(
            f"with these policies a plan adds {share:.1%} to the step's time at any budget, and max_overhead is "
            f"{max_overhead:.1%}: raise it, or drop policies that demand recomputation."
        )
    low, high = least - 1, best[1].peak_bytes  # no plan is known for low; there is one for high
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
