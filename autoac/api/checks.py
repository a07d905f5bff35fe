"""Argument checks that run before any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch

from autoac.calibrate.compiled.table import BLOCKS, GRANULARITIES
from autoac.execute.engines import check_runnable
from autoac.policies import Policies, check_modules, listed
from autoac.step.model import check_model, device_bytes, device_of, unwrapped
from autoac.step.modules import RegionChoice, select_modules
from autoac.step.samples import Samples
from autoac_solver.build.engines import check_supported
from autoac_solver.plan.planning import aims, resolve_engine
from autoac_solver.records.devices import find_device
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.profile import Profile

Mode = Literal["auto", "real", "fake"]


def checked(
    model: torch.nn.Module,
    budget: int | str | None,
    regions: RegionChoice,
    policies: Policies,
    engine: EngineName,
    headroom: int | str,
    max_overhead: float | str | None = None,
    total_bytes: int | None = None,
) -> list[str] | None:
    """Check arguments before any work, and return the names of the modules chosen as regions.

    Args, Raises: as for `plan`; `total_bytes` is the planned device's memory, if that is another device.
    """
    model = unwrapped(model)
    check_model(model)
    resolve_engine(engine)
    check_runnable(engine)
    aims(budget, max_overhead, headroom, (total_bytes or device_bytes(device_of(model))) or None)
    names = select_modules(model, regions)
    check_modules(listed(policies), model)
    return names


def asked_for(
    policies: Any = (),
    max_overhead: Any = None,
    budget_of: str = "allocated",
    mode: str = "auto",
    device: str | Path | None = None,
    parallel: Any = None,
) -> dict[str, str]:
    """The arguments of `plan` that not every engine supports, if they are given, as one would write them."""
    asked = {
        "policies": ("policies", bool(policies)),
        "max_overhead": ("max_overhead", max_overhead is not None),
        "budget_of": (f"budget_of={budget_of!r}", budget_of != "allocated"),
        "mode": (f"mode={mode!r}", mode == "fake"),
        "device": (f"device={device!r}", device is not None),
        "parallel": ("parallel=", parallel is not None),
    }
    return {name: written for name, (written, is_given) in asked.items() if is_given}


def check_engine_options(engine: str, granularity: str = BLOCKS, asked: Iterable[str] = ()) -> None:
    """Refuse what the engine does not support, and engine compile's own options with other engines.

    Args:
        asked: among the names in `EngineModel.unsupported`.

    Raises:
        PolicyError, ValueError: an option is refused; raised before any work.
    """
    resolve_engine(engine)
    if granularity not in GRANULARITIES:
        known = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(f"granularity is {granularity!r}; possible are {known}.")
    if granularity != BLOCKS and not compiles(engine):
        raise ValueError(f"granularity={granularity!r} goes with engine='compile', and engine is {engine!r}.")
    check_supported(engine, *asked)


def check_samples(sample: Any, budget_of: str) -> None:
    """Refuse several samples with options under which they cannot be compared.

    Raises:
        ValueError: an option is refused; raised before any work.
    """
    if isinstance(sample, Samples) and budget_of != "allocated":
        raise ValueError(
            "several samples are compared by allocated memory: plan for one of them, or leave out budget_of."
        )


def check_together(engine: str, granularity: str, sample: Any) -> None:
    """Refuse options that several ranks cannot plan with together.

    Raises:
        ValueError: an option is refused; raised before any work.
    """
    check_engine_options(engine, granularity)
    if isinstance(sample, Samples):
        raise ValueError(
            "several samples are not compared where several ranks plan together (DDP, FSDP2): pass the largest "
            "batch."
        )


def check_is_profile(profile: Any) -> None:
    """Refuse a path, or anything else that is no profile."""
    if not isinstance(profile, Profile):
        hint = (
            "autoac.Profile.load reads one from a file"
            if isinstance(profile, (str, Path))
            else "autoac.profile makes it"
        )
        raise ValueError(f"profile is a {type(profile).__name__}, not a recorded step: {hint}.")


def kind_of(model: torch.nn.Module, device: str | Path | None) -> str:
    """The planned device, as text."""
    return str(device_of(unwrapped(model))) if device is None else find_device(device).kind
