"""Modules inside of a region that pause its recording while they run: see [ Pauses ] in `recording`."""

from __future__ import annotations

from typing import Any

import torch

from autoac.execute.forwards import put_forward
from autoac.execute.replay.recording import running
from autoac.step.carried import REGION_KEY
from autoac.torch_private.called import called_module


class Pausing:
    """What a module inside of a region carries that may pause the recording.

    Args:
        fqn: its name, as in the programs' pauses.
        plan_id: tells which plan it belongs to.
    """

    forward = None  # a module with one of its own may do anything, and does not pause

    def __init__(self, fqn: str, plan_id: str):
        self.fqn = fqn
        self.plan_id = plan_id


def pausing_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that carries a `Pausing`."""
    module = called_module(module)
    pausing: Pausing = module.__dict__[REGION_KEY]
    recording = None if torch.compiler.is_compiling() else running.recording
    pauses = recording is not None and recording.pause(pausing.fqn)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        if recording is not None and pauses:
            recording.resume()


def attach_pausing(module: torch.nn.Module, fqn: str, plan_id: str) -> None:
    """Let a module inside of regions pause their recording, unless its forward has been replaced; see `Pausing`."""
    if "forward" not in module.__dict__:
        put_forward(module, pausing_forward, Pausing(fqn, plan_id))
