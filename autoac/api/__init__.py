"""The main functions: profile a step, solve for a budget, return the plan.

`planning.plan` calls `profiling.profile`, then `solving.plan_recorded`; `checks` refuses bad arguments before any work.
On several ranks, `together.plan_together` takes its place. `solving` and `batches` also work from a profile without a
model.
"""

from autoac.api.batches import batch_tradeoff
from autoac.api.checks import Mode, checked
from autoac.api.planning import plan, plan_buckets
from autoac.api.profiling import profile
from autoac.api.solving import plan_recorded, solve, tradeoff

__all__ = [
    "Mode",
    "batch_tradeoff",
    "checked",
    "plan",
    "plan_buckets",
    "plan_recorded",
    "profile",
    "solve",
    "tradeoff",
]
