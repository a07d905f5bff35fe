"""Attributes through which a planned module carries its plan; the engines set them."""

from __future__ import annotations

from typing import Any

import torch

REGION_KEY = "_autoac_region"
LOSS_KEY = "_autoac_loss"
ROOT_KEY = "_autoac_root"


def planned(module: torch.nn.Module) -> Any:
    """The module's part of a plan (classes in `execute.attach`), None if no plan is on it."""
    found = (module.__dict__.get(key) for key in (REGION_KEY, ROOT_KEY, LOSS_KEY))
    return next((carried for carried in found if carried is not None), None)
