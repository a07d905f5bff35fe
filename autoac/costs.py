"""What the engines' bookkeeping costs on this machine, measured once a process."""

from __future__ import annotations

import functools

import torch

from autoac_solver.profile import EngineCosts


@functools.cache
def engine_costs(device: torch.device) -> EngineCosts:
    """The engines' own costs, seconds."""
    return EngineCosts()
