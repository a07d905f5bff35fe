"""Common part of the callbacks: the arguments of `autoac.auto`, and the plan."""

from __future__ import annotations

import functools
import operator
import weakref
from typing import Any, Literal

import torch

from autoac.api.checks import asked_for, check_engine_options
from autoac.automatic import Auto, auto
from autoac.automatic.start import check_options
from autoac.execute.on_top import owned_with, owner_of
from autoac.plans import Plan
from autoac.policies import listed
from autoac.progress import LOGGER
from autoac.step.model import checkpointing_switches, own_checkpointing, unwrapped
from autoac.warned import warn
from autoac_solver.records.engines import EngineName
from autoac_solver.records.errors import PlanMismatchError


class Planned:
    """Puts `autoac.auto` on a model for the duration of a training run.

    Args:
        budget, options: as for `autoac.auto`; options that are invalid for any model are refused here.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        optimizer: Any = None,
        regions: Any = None,
        policies: Any = (),
        engine: EngineName = "auto",
        headroom: int | str = 0,
        on_larger: Literal["warn", "replan", "error"] = "warn",
        verify: bool = False,
        path: Any = None,
        measure: bool = True,
        budget_of: str = "allocated",
    ):
        check_options(budget, engine, headroom, on_larger, path)
        check_engine_options(engine, asked=asked_for(policies, budget_of=budget_of))
        self.budget = budget
        self.options = {
            "optimizer": optimizer,
            "regions": regions,
            "policies": listed(policies),
            "engine": engine,
            "headroom": headroom,
            "on_larger": on_larger,
            "verify": verify,
            "path": path,
            "measure": measure,
            "budget_of": budget_of,
        }
        self.handle: Auto | None = None
        self._last: Plan | None = None
        self._last_peak_bytes: int | None = None
        self._told: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan of the run, None before its first step is over. Kept when training ends."""
        return self._last if self.handle is None else self.handle.plan

    @property
    def measured_peak_bytes(self) -> int | None:
        """Peak of the first step under the plan, resident bytes included; None before. Kept when training ends."""
        return self._last_peak_bytes if self.handle is None else self.handle.measured_peak_bytes

    def news(self) -> dict[str, int]:
        """Metrics for the trainer's loggers, once for each plan of a run, after its first step; else empty."""
        if self.handle is None:
            return {}
        is_measured = self.options["measure"] or self.options["verify"]
        plan = self.handle.measured_plan if is_measured else self.handle.known_plan
        if plan is None or plan is self._told:
            return {}
        self._told = plan
        found = {
            "autoac/budget_bytes": plan.budget_bytes,
            "autoac/predicted_peak_bytes": plan.predicted_peak_bytes,
        }
        if (measured := self.handle.measured_peak_bytes) is not None:
            found["autoac/measured_peak_bytes"] = measured
        return found

    def start(self, model: torch.nn.Module) -> None:
        """Start with this model; takes off the plan of an earlier run, which may have failed."""
        self.stop()
        self._told = None
        inner = unwrapped(model)
        take_off_leftovers(model)
        switches: list[tuple[Any, Any]] = [
            (m, m.gradient_checkpointing) for m in checkpointing_switches(inner)
        ]
        try:
            turned_off = turn_checkpointing_off(inner)
            self.handle = auto(model, self.budget, **self.options)
        except BaseException:
            _put_back(switches)
            raise
        _STARTED.add(self.handle)
        if turned_off:
            self.handle.on_removed.append(functools.partial(_put_back, switches))
            LOGGER.info(
                "%s of %s is off: the plan decides what is recomputed", turned_off, type(inner).__name__
            )

    def stop(self) -> None:
        """Take the plan off, and restore the model; `plan` and `measured_peak_bytes` stay available."""
        handle, self.handle = self.handle, None
        if handle is None:
            return
        self._last = handle.known_plan or handle.measured_plan
        self._last_peak_bytes = handle.measured_peak_bytes
        try:
            handle.remove()
        except PlanMismatchError as error:  # the training itself has succeeded
            warn(f"the plan stays on the model: {error}")


_STARTED: weakref.WeakSet[Auto] = weakref.WeakSet()
"""Handles of callbacks. A trainer whose `train` fails or is interrupted need not tell its callbacks."""


def take_off_leftovers(model: torch.nn.Module) -> None:
    """Take off what another callback has left on a model, whose training has failed or was interrupted."""
    while (other := owned_with(unwrapped(model))) is not None:  # it may have been in another wrapper
        if not isinstance(left := owner_of(other), Auto) or left not in _STARTED:
            return
        LOGGER.info("taking off what an earlier training run has left on %s", type(other).__name__)
        left.remove()


def turn_checkpointing_off(model: torch.nn.Module) -> str:
    """Turn the model's own checkpointing off, under any name, and return that name; "" if it was not on."""
    name, method = own_checkpointing(model)
    turned_off: set[str] = set()
    while method and method not in turned_off:  # of one part after the other
        operator.attrgetter(method)(model)()
        turned_off.add(method)
        _, method = own_checkpointing(model)
    return name


def _put_back(switches: list[tuple[Any, Any]]) -> None:
    for module, value in switches:
        module.gradient_checkpointing = value
