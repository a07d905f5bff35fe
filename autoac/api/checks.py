"""Argument checks that run before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from autoac.calibrate.compiled.table import BLOCKS, GRANULARITIES
from autoac.execute.engines import check_engine
from autoac.policies import Policies, check_modules, listed
from autoac.step.model import check_model, device_bytes, device_of, unwrapped
from autoac.step.modules import RegionChoice, select_modules
from autoac.step.samples import Samples
from autoac_solver.plan.planning import aims, resolve_engine
from autoac_solver.records.devices import find_device
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.errors import PolicyError
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
    check_engine(engine)
    aims(budget, max_overhead, headroom, (total_bytes or device_bytes(device_of(model))) or None)
    names = select_modules(model, regions)
    check_modules(listed(policies), model)
    return names


def check_compiling(
    engine: str,
    granularity: str,
    policies: Policies = (),
    max_overhead: float | str | None = None,
    parallel: Any = None,
) -> None:
    """Refuse options that engine compile does not support, and its own options with other engines.

    Raises:
        PolicyError, ValueError: an option is refused; raised before any work.
    """
    resolve_engine(engine)
    if granularity not in GRANULARITIES:
        known = ", ".join(map(repr, GRANULARITIES))
        raise ValueError(f"granularity is {granularity!r}; possible are {known}.")
    if granularity != BLOCKS and not compiles(engine):
        raise ValueError(f"granularity={granularity!r} goes with engine='compile', and engine is {engine!r}.")
    if compiles(engine) and policies:
        raise PolicyError(
            "engine 'compile' follows no policies: what a compiled region keeps is chosen as a whole. Plan without "
            "policies, or with engine='replay' or 'sac'."
        )
    if compiles(engine) and max_overhead is not None:
        raise ValueError(
            "engine 'compile' plans for a budget, not for max_overhead: autoac.tradeoff over "
            "autoac.profile(..., engine='compile') shows what each budget costs."
        )
    if compiles(engine) and parallel is not None:
        raise ValueError(
            "engine 'compile' does not plan for models that are trained on several processes: leave out parallel=, or "
            "take engine='sac' for a compiled model."
        )


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
    if compiles(engine):
        raise ValueError(
            "engine 'compile' is not for models that several ranks plan together (DDP, FSDP2): take engine='sac' "
            "for a compiled model."
        )
    check_compiling(engine, granularity)
    if isinstance(sample, Samples):
        raise ValueError(
            "several samples are not compared where several ranks plan together (DDP, FSDP2): pass the largest "
            "batch."
        )


def mode_for_compiling(mode: Mode, device: str | Path | None) -> Mode:
    """The mode in which regions are compiled and measured; refuses modes that run nothing on the device."""
    if mode == "fake" or device is not None:
        asked = "mode='fake'" if mode == "fake" else f"device={device!r}"
        raise ValueError(
            f"engine='compile' measures compiled code on the device at hand, and {asked} runs nothing on it: leave "
            "one of them out."
        )
    return "real"


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
