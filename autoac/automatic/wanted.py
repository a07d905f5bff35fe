"""The arguments of `autoac.auto`."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autoac.api import plan_recorded
from autoac.calibrate.compiled.tried import nearly
from autoac.plans import Plan
from autoac.policies import as_policies
from autoac.progress import LOGGER
from autoac.step.inputs import elements_in
from autoac.step.model import device_bytes, device_of, model_fingerprint
from autoac_solver.plan.planning import limits
from autoac_solver.plan.recorded.transfer import outcome_of
from autoac_solver.records.devices import kind_of
from autoac_solver.records.engines import EngineName, compiles
from autoac_solver.records.errors import StalePlanError
from autoac_solver.records.profile import Profile

_ABOUT_EQUAL = 1.02
"""A step that takes up to so many times another one's peak takes no more than that one."""


@dataclass(frozen=True)
class Wanted:
    """The arguments of `auto`; `names` are those of the modules chosen as regions."""

    budget: int | str
    names: list[str] | None
    policies: tuple[Any, ...]
    engine: EngineName
    headroom: int | str
    on_larger: str
    verify: bool
    measure: bool
    path: Path | None
    budget_of: str

    def plan(self, model: torch.nn.Module, profile: Profile, is_corrected: bool = False) -> Plan:
        """The plan for a recorded step.

        Micro-batches of different sizes may come in any order in later steps.

        Args:
            model: as the loop calls it.
            is_corrected: by a measured step under a plan.

        Raises:
            AutoacError: no plan fits, or the policies clash.
        """
        solve = functools.partial(
            plan_recorded,
            model,
            budget=self.budget,
            names=self.names,
            policies=self.policies,
            engine=self.engine,
            headroom=self.headroom,
            budget_of=self.budget_of,
        )
        profile = profile.in_any_order()
        return solve(profile) if is_corrected else nearly(profile, model, solve)

    def with_room(self, profile: Profile, lacking_bytes: int) -> Wanted:
        """The same with more headroom, for steps that take so much more than this recorded one."""
        budget_bytes, headroom_bytes = limits(self.budget, self.headroom, profile.device_bytes or None)
        return replace(self, headroom=min(headroom_bytes + lacking_bytes, budget_bytes - 1))

    def saved(self, model: torch.nn.Module) -> Plan | None:
        """The plan that an earlier run saved, if it is for this model and these arguments.

        Args:
            model: without wrappers.
        """
        if self.path is None or not self.path.exists():
            return None
        try:
            plan = Plan.load(self.path)
        except StalePlanError as error:
            LOGGER.warning("%s: %s Planning anew, and the new plan will replace it there.", self.path, error)
            return None
        if self.is_met_by(plan, model):
            return plan
        LOGGER.warning(
            "the plan in %s is for another model, device, budget, engine, regions or policies: planning anew, and "
            "the new plan will replace it there",
            self.path,
        )
        return None

    def is_kept_to_by(self, plan: Plan) -> bool:
        """Whether a plan of this loop was made for this budget; not for a larger one, because none fits this one."""
        budget_bytes, _ = limits(self.budget, self.headroom, plan.record.profile.device_bytes or None)
        return plan.record.budget_bytes <= budget_bytes

    def is_met_by(self, plan: Plan, model: torch.nn.Module) -> bool:
        """Whether a plan was made for this model and these arguments.

        Args:
            model: without wrappers.
        """
        record = plan.record
        names = None if self.names is None else record.profile.called & set(self.names)
        return (
            not is_of_another(record.profile, model)
            and (record.budget_bytes, record.headroom_bytes)
            == limits(self.budget, self.headroom, device_bytes(device_of(model)) or None)
            and record.budget_of == self.budget_of
            and self.engine in ("auto", plan.engine)
            and (names is None or names == {region.fqn for region in plan.regions})
            and as_policies(self.policies, record.profile)
            == tuple(applied.policy for applied in record.policies)
        )


def is_of_another(profile: Profile, model: torch.nn.Module) -> bool:
    """Whether a model has other modules or parameters than in the recorded step, or is on another device."""
    if kind_of(profile.device) != device_of(model).type:
        return True
    return profile.model_fingerprint != model_fingerprint(model)


def needs_no_more(profile: Profile, plan: Plan) -> bool:
    """Whether a step calls no more modules, and no more often, than the one a plan was made for, and takes no more.

    With more elements it has to fit under the plan: they may be those of indices, of which more make shorter sequences.
    What the loop still holds when a step begins makes small differences.
    """
    other = plan.record.profile
    fewer = len(profile.called) <= len(other.called) and _calls(profile) <= _calls(other)
    takes_less = profile.peak_bytes <= _ABOUT_EQUAL * other.peak_bytes
    has_fewer = elements_in(profile.sample) <= elements_in(other.sample)
    return fewer and takes_less and (has_fewer or fits_under(plan, profile))


def fits_under(plan: Plan, profile: Profile) -> bool:
    """Whether another step is within the budget under a plan; of compiled regions that is not known."""
    return not compiles(plan.engine) and outcome_of(plan.record, profile).fits


def _calls(profile: Profile) -> int:
    return sum(call.grad for call in profile.calls)
