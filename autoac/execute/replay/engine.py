"""Engine replay: how a region runs, and the cost of its bookkeeping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoac.execute.chains import LINKS, SAVES, SAVES_NOT, Chains
from autoac.execute.program import Program
from autoac.execute.replay.first_step import CheckedRecording
from autoac.execute.replay.recording import run
from autoac.torch_private import disable_dynamo
from autoac_solver.build.engines import engine_model
from autoac_solver.build.engines.replay import ReplayCosts
from autoac_solver.records.engines import REPLAY


def _run(program: Program, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(program, forward, args, kwargs, CheckedRecording(program) if program.unchecked else None)


_run_eagerly = disable_dynamo(
    _run,
    "this model has a plan of autoac's engine 'replay', whose regions are not compiled, so fullgraph=True cannot be "
    "met. Plan with engine='sac' or engine='compile', or compile without fullgraph",
)


class ReplayEngine:
    """See `Engine`."""

    model = engine_model(REPLAY)
    eager_only = True
    is_policy = False
    refused = ""

    def run(
        self,
        program: Program,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: torch.nn.Module,
    ) -> Any:
        # Replay needs eager ops: under `torch.compile` its regions are left out of the graph.
        if torch.compiler.is_compiling():
            return _run_eagerly(program, forward, args, kwargs)
        return _run(program, forward, args, kwargs)

    def measure(self, chains: Chains) -> ReplayCosts:
        tensor = chains.tensor

        def program(recompute: bool, count: int = LINKS) -> Program:
            return Program("costs", [(SAVES, recompute)] * count)

        not_saving = Program("costs", [(SAVES_NOT, False)] * LINKS + [(SAVES, False)])
        saving, everything, once = program(False), program(True), program(False, 1)
        watching = ("replay not saving", "not saving"), ("replay saving", "saving")
        recording = ("replay all", "replay saving")
        found = chains.measured(
            {
                "replay not saving": lambda: run(not_saving, chains.not_saving, (tensor,), {}),
                "replay saving": lambda: run(saving, chains.saving, (tensor,), {}),
                "replay all": lambda: run(everything, chains.saving, (tensor,), {}),
                "replay once": lambda: run(once, chains.once, (tensor,), {}),
            },
            *watching,
            recording,
        )
        op = found.extra("replay not saving", "not saving") / (2 * LINKS)
        call = found.extra("replay once", "once")
        slower, recording_slower = found.slower(*watching), found.slower(recording)
        return ReplayCosts(
            op=slower * op,
            record=recording_slower * max(0.0, found.extra(*recording) / LINKS - chains.op_s()),
            saved=slower * max(0.0, found.extra("replay saving", "saving") / LINKS - 2 * op),
            call=slower * call,
        )
