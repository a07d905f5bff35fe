"""Attributes through which a planned module carries its plan; the engines set them."""

from __future__ import annotations

from typing import Any

import torch

REGION_KEY = "_autoac_region"
LOSS_KEY = "_autoac_loss"


def planned(module: torch.nn.Module) -> Any:
    """The module's part of a plan (classes in `execute.attach`), None if no plan is on it."""
    return module.__dict__.get(REGION_KEY) or module.__dict__.get(LOSS_KEY)
