"""Attributes through which a planned module carries its plan; the engines set them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

REGION_KEY = "_autoac_region"
LOSS_KEY = "_autoac_loss"
ROOT_KEY = "_autoac_root"


def planned(module: torch.nn.Module) -> Any:
    """The module's part of a plan (classes in `execute.attach`), None if no plan is on it."""
    found = (module.__dict__.get(key) for key in (REGION_KEY, ROOT_KEY, LOSS_KEY))
    return next((carried for carried in found if carried is not None), None)


def replaced(model: torch.nn.Module, names: Iterable[str], plan_id: str) -> list[str]:
    """Those of some modules that carried a plan in whose place there are others now, which do not.

    A module that other code has wrapped since, and holds in its place, is not replaced.
    """
    found = []
    for name in names:
        try:
            module = model.get_submodule(name)
        except AttributeError:  # removed
            continue
        carried = planned(module)  # as a rule
        if carried is not None and carried.plan_id == plan_id:
            continue
        inside = map(planned, module.modules())
        if not any(carries is not None and carries.plan_id == plan_id for carries in inside):
            found.append(name)
    return found
