"""Measured peaks of a loop's steps, and what follows where values decide on sizes, as where tokens choose experts."""

from __future__ import annotations

import torch

from autoac.automatic.peak import StepPeak
from autoac.automatic.report import peak_in_a_line, sized_by_values
from autoac.automatic.wanted import Wanted
from autoac.parallel.one_plan import kept_bytes
from autoac.plans import Plan
from autoac.progress import LOGGER
from autoac_solver.records.profile import Profile


class Measured:
    """Measured steps under the plans of a loop.

    After a step that exceeded the budget because of values in it another one is recorded, and the larger of the two is
    planned for. If that was done too often, the next plan leaves room for the difference.

    Args:
        model: without wrappers.

    Attributes:
        peak_bytes, plan: see `Auto.measured_peak_bytes` and `Auto.measured_plan`.
        step: measures the step that runs.
        exceeded: the plan under which a step took more than the budget because of values; None if there is none, or
            another plan was made since.
    """

    def __init__(self, model: torch.nn.Module, wanted: Wanted):
        self.peak_bytes: int | None = None
        self.plan: Plan | None = None
        self.step = StepPeak(model, wanted.measure)
        self.exceeded: Plan | None = None
        self._model = model
        self._wanted = wanted

    def begin(self, plan: Plan, is_compiled: bool) -> None:
        """Measure steps under a new plan, if that is wanted."""
        self.peak_bytes = self.plan = self.exceeded = None
        # In the first step the compiler may run.
        skipped, again = (1, False) if is_compiled else (0, sized_by_values(plan))
        self.step = StepPeak(self._model, self._wanted.measure, skipped, again)

    def no_more(self) -> None:
        """Measure no step from here on."""
        self.exceeded, self.step = None, StepPeak(self._model, False)

    def note(self, plan: Plan, above_start_bytes: int) -> int:
        """Note a measured step under the plan; returns the largest peak of those so far."""
        peak = plan.resident_bytes + above_start_bytes
        if self.peak_bytes is None or peak > self.peak_bytes:
            self.peak_bytes, self.plan = peak, plan
            LOGGER.info("%s", peak_in_a_line(plan, peak))
        return self.peak_bytes

    def may_plan_again(self, plan: Plan) -> bool:
        """Whether a new plan is to be made, after a step under this one took more than the budget."""
        if self._wanted.on_larger == "replan" and sized_by_values(plan):
            self.exceeded = plan
        return self.exceeded is not None

    def larger(self, profile: Profile) -> Profile:
        """This newly recorded step, or the one that was planned for before, if it keeps more."""
        before = None if self.exceeded is None else self.exceeded.record.profile
        return before if before is not None and kept_bytes(before) > kept_bytes(profile) else profile

    def with_room(self) -> tuple[Profile, Wanted]:
        """What to plan for, and how, if no other step is recorded."""
        plan, self.exceeded = self.exceeded, None
        assert plan is not None
        assert self.peak_bytes is not None
        profile, lacking_bytes = plan.record.profile, self.peak_bytes - plan.predicted_peak_bytes
        return profile, self._wanted.with_room(profile, lacking_bytes)
