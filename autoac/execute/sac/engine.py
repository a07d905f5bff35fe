"""Engine sac: how a region runs, and the cost of its bookkeeping."""

from __future__ import annotations

import torch

from autoac.execute.chains import LINKS, SAVES, SAVES_NOT, Chains
from autoac.execute.program import Program
from autoac.execute.sac.sac import run
from autoac.torch_private import POLICIES_SEE_RESULTS
from autoac_solver.build.engines import engine_model
from autoac_solver.build.engines.sac import SacCosts
from autoac_solver.records.engines import SAC


class SacEngine:
    """See `Engine`."""

    model = engine_model(SAC)
    eager_only = False
    is_policy = True
    refused = (
        ""
        if POLICIES_SEE_RESULTS
        else "engine sac needs a torch whose checkpoint policies see the results of ops; "
        f"{torch.__version__} does not show them. Plan with engine='replay', or install torch 2.13 or later."
    )

    run = staticmethod(run)

    def measure(self, chains: Chains) -> SacCosts:
        if self.refused:
            return SacCosts()
        tensor = chains.tensor
        saving = Program("costs", [(SAVES, False)] * LINKS)
        not_saving = Program("costs", [(SAVES_NOT, False)] * LINKS + [(SAVES, False)])
        once = Program("costs", [(SAVES, False)])
        pairs = ("sac not saving", "not saving"), ("sac saving", "saving")
        found = chains.measured(
            {
                "sac not saving": lambda: run(not_saving, chains.not_saving, (tensor,), {}),
                "sac saving": lambda: run(saving, chains.saving, (tensor,), {}),
                "sac once": lambda: run(once, chains.once, (tensor,), {}),
            },
            *pairs,
        )
        op, slower = found.extra("sac not saving", "not saving") / (2 * LINKS), found.slower(*pairs)
        return SacCosts(
            op=slower * op,
            saved=slower * max(0.0, found.extra("sac saving", "saving") / LINKS - 2 * op),
            call=slower * found.extra("sac once", "once"),
        )
