"""Engine "checkpoint": torch's plain checkpoint. The region's whole code runs again, with its side effects.

Plans are compared with it, not made for it, see `plan.baselines`.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoac_solver.build.draft import Draft
from autoac_solver.build.engines.rerun import Rerun
from autoac_solver.build.engines.sac import Sac, SacCosts, refuses_second_run
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import Lifetime
from autoac_solver.records.engines import CHECKPOINT, SAC


class Checkpoint(Sac):
    """See `EngineModel`. Like engine sac, but without a policy, so without a lookup per op."""

    name = CHECKPOINT
    selects = False
    one_random_state = False

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        return refuses_second_run(step, region)

    def wrap_s(self, draft: Draft, region: Region) -> float:
        costs = draft.step.costs_of(SAC, SacCosts)  # The same hooks, but no cost per op.
        return costs.saved * len(region.saved) + costs.call

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        return Rerun(draft, watches=False).lifetimes()
