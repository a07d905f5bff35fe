"""The way through: profile a step, solve for a budget, hand out the plan.

`planning.plan` is `profiling.profile` and then `solving.plan_recorded`; `checks` refuses bad arguments before anything
runs. On several ranks `together.plan_together` takes its place. `solving` and `batches` also serve those who have a
profile and no model.
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
