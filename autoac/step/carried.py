"""What a planned module carries, by name: the model knows that it has a plan, the engines put it there."""

from __future__ import annotations

from typing import Any

import torch

REGION_KEY = "_autoac_region"
LOSS_KEY = "_autoac_loss"


def planned(module: torch.nn.Module) -> Any:
    """What the module carries (`execute.attach` has the classes), None if no plan is on it."""
    return module.__dict__.get(REGION_KEY) or module.__dict__.get(LOSS_KEY)
