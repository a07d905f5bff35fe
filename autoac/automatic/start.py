"""`autoac.auto`: check its arguments, and put its handle on the model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Literal

import torch

from autoac.api import checked
from autoac.api.checks import asked_for, check_engine_options
from autoac.api.choosing import engine_for
from autoac.automatic.handle import Auto
from autoac.automatic.wanted import Wanted
from autoac.execute.on_top import owned_with, owner_of
from autoac.policies import Policies, listed
from autoac.step.model import check_model, device_of, unwrapped
from autoac.step.modules import RegionChoice
from autoac.step.optimizer import real_optimizer
from autoac.step.units import own_name
from autoac.torch_private import compiled_attribute, is_compiled_wrapper, note_untried
from autoac_solver.plan.planning import limits, resolve_engine
from autoac_solver.plan.reserved import check_budget_of
from autoac_solver.records.disk.files import check_writable
from autoac_solver.records.disk.limits import MOST_BYTES
from autoac_solver.records.engines import EngineName
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.units import parse_bytes

ON_LARGER = ("warn", "replan", "error")


def auto(
    model: torch.nn.Module,
    budget: int | str,
    *,
    optimizer: Any = None,
    regions: RegionChoice = None,
    policies: Policies = (),
    engine: EngineName = "auto",
    headroom: int | str = 0,
    on_larger: Literal["warn", "replan", "error"] = "warn",
    verify: bool = False,
    path: str | Path | None = None,
    measure: bool = False,
    budget_of: str = "allocated",
) -> Auto:
    """Run a training loop under a budget: its first step is recorded as it trains, then a plan is put on the model.

    Nothing runs before the loop's first training step, and no step runs twice: gradients, weights and random states are
    to the bit those of a loop without this line. The first step runs with everything recomputed, which takes the least
    memory, and is slower, because its ops are timed. The logger "autoac" gets one line about the plan.

    With engine "compile" a second step is recorded, then the model's regions are compiled. Gradients from then on are
    those of compiled code. The second step under the plan is measured, and a plan that was off is made anew.

    A step begins with the model's first call in train mode and with gradients enabled, and ends before an optimizer
    with a parameter of the model steps; see NOTE [ The loop's steps ] for loops without one.

    Args:
        model: the model as the loop calls it.
        budget, regions, policies, engine, headroom: as for `autoac.plan`.
        optimizer: the one that trains the model; left out, it is found when it steps. Wrappers of Trainer, accelerate
            and Lightning are unwrapped.
        on_larger: reaction to a call of the model with more elements than planned for: "warn" once, "replan" (record
            that step, then plan for it), or raise an "error" before it runs. A call with no more elements, but longer
            rows, is warned of only: it takes more where attention keeps its scores.
        verify: run `Plan.verify` on the second step's batch before the plan is put on the model, and measure the peak
            of the first step under it; see `Auto.report` and `Auto.measured_peak_bytes`.
        path: the plan's file, .json. The plan is saved there; an existing one is used without recording a step if it
            was made for this model, kind of device, budget and engine.
        measure: measure the peak of the first step under the plan, and under each plan that replaces it. Where values
            decide on sizes (experts that tokens choose), or numbers that are drawn one at a time may (how many tokens
            to drop), measure later steps too, less and less often; after one that took more than the budget,
            on_larger="replan" records another step and plans for the larger one.
        budget_of: as for `autoac.plan`. Measured peaks are of allocated memory.

    Returns:
        The handle: `.plan`, None before the first step (with engine "compile" until regions are compiled), and
        `.remove()`.

    Raises:
        ProfilingError: the model cannot be planned, or the optimizer is not the model's.
        PolicyError: engine "compile" follows no policies.
        ValueError: an argument is invalid.
        RuntimeError: the torch of this process cannot run the engine.
        OSError: no file can be written at `path`.

        The loop's second step raises InfeasibleBudgetError if no plan fits; the model is without a plan then. With
        engine "compile" a later step does, or ProfilingError if no region can be compiled.
    """
    check_options(budget, engine, headroom, on_larger, path)
    policies = listed(policies)
    check_engine_options(engine, asked=asked_for(policies, budget_of=budget_of))
    check_model(unwrapped(model))
    has_no_forward = type(model).forward is torch.nn.Module.forward and "forward" not in vars(model)
    if has_no_forward and isinstance(model, torch.nn.ModuleList | torch.nn.ModuleDict):
        raise ProfilingError(
            f"a {type(model).__name__} is not called as a whole, so no step of it is seen: give the module that calls "
            "its parts, or write one whose forward does."
        )
    check_budget_of(budget_of, str(device_of(unwrapped(model))))
    if owner_of(model) is not None:
        raise ProfilingError(
            "autoac.auto (or a plan for each bucket) is on this model already: call remove() on its handle first."
        )
    if owned_with(unwrapped(model)) is not None:
        gc.collect()  # a wrapper of an earlier run may be gone
    if (other := owned_with(unwrapped(model))) is not None:
        raise ProfilingError(
            f"autoac.auto (or a plan for each bucket) is on {own_name(other)} already, and this {own_name(model)} is "
            "a part of it or holds it: one handle plans for all parts of a model. Call autoac.auto for the outermost "
            "one alone, or remove() on the other handle first."
        )
    if not is_compiled_wrapper(model) and compiled_attribute(model) is not None:
        raise ProfilingError(
            f"{type(model).__name__}.compile() was called, and the calls of a model that is compiled in place are not "
            "seen. Compile it with a wrapper instead, and train that: compiled = torch.compile(model); "
            "autoac.auto(compiled, ...). Modules inside may be compiled in place."
        )
    names = checked(model, budget, regions, policies, engine, headroom)
    engine_for(model, engine)  # what this torch cannot run is refused now, not after a step
    if path is not None:
        check_writable(path)
    real = None if optimizer is None else real_optimizer(optimizer, unwrapped(model))
    note_untried()  # before the recorded step, which uses private interfaces too
    return Auto(
        model,
        Wanted(
            budget=budget,
            names=names,
            policies=tuple(policies),
            engine=engine,
            headroom=headroom,
            on_larger=on_larger,
            verify=verify,
            measure=measure or verify,
            path=None if path is None else Path(path),
            budget_of=budget_of,
        ),
        real,
    )


def check_options(
    budget: int | str, engine: EngineName, headroom: int | str, on_larger: str, path: str | Path | None
) -> None:
    """Refuse arguments that are invalid for any model.

    Args: as for `auto`.

    Raises:
        ValueError: an argument is invalid.
    """
    if on_larger not in ON_LARGER:
        raise ValueError(f"on_larger is {on_larger!r}; possible are {', '.join(map(repr, ON_LARGER))}.")
    resolve_engine(engine)
    # A percentage is of the memory of the model's device, which is known later.
    parse_bytes(budget, MOST_BYTES)
    if headroom != 0:
        parse_bytes(headroom, MOST_BYTES)
        if str(budget).endswith("%") is str(headroom).endswith("%"):
            limits(budget, headroom, MOST_BYTES)
    if path is not None and Path(path).suffix != ".json":
        raise ValueError(f"path is {str(path)!r}: plans are JSON, so the file's name has to end in .json.")
