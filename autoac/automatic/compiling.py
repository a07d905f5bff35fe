"""Engine compile in a loop: regions are caught in a recorded step, and compiled before the next one.

NOTE [ Compiled regions of a loop ]
  1. The first recorded step tells which calls to compile. The next step is recorded as well, and the arguments of these
     calls are copied, one copy for alike calls: so nothing of the model is called for it, however the loop calls it.
  2. Before the step after that, the regions are compiled and measured on the copies, and the plan is put on.
     If a step is recorded for another plan later (a larger batch), the calls of the plan before are caught in it, in
     one process.
     If that step is smaller than an earlier one, or has calls that no step before it had, further steps are recorded,
     up to `_MOST_CAUGHT`. What was not caught until then is left to engine replay.
  3. The second step under the plan whose calls are like the recorded ones is measured; in the first one the compiler
     may still run. Where the prediction was off, or the budget was exceeded, the plan is made anew with the measured
     peak, as `autoac.plan` does by steps of its own (`calibrate.compiled.tried`). On a GPU, a peak far below the
     prediction is not believed: loops reset the allocator's counter in the middle of a step, to log it. The budget
     holds anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from autoac.api.solving import called_among
from autoac.automatic.optimizers import trained_in
from autoac.calibrate.compiled.capture import Call, Catcher, Caught
from autoac.calibrate.compiled.table import NothingCompiled, kinds_of, with_caught_regions, without_regions
from autoac.calibrate.compiled.tried import CLOSE, corrected
from autoac.device import device_for
from autoac.execute.on_top import OnTop
from autoac.plans import Plan
from autoac.progress import progress_shown
from autoac.record.live import ONE_DRAW
from autoac.step.autocast import forward_autocast
from autoac.step.inputs import described, elements_in
from autoac.step.model import device_of
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import VARYING, Profile

_MOST_CAUGHT = 3
"""At most this many steps are recorded in search of the calls of the step before."""
_MOST_CORRECTIONS = 4
"""A plan is made anew at most this often, and then the best one is taken."""
_LEAST_OF_PREDICTED = 0.9
"""A measured peak below this share of the predicted one is not believed where loops may have reset the counter."""
_MOST_MEASURED = 8
"""At most this many steps are measured under a plan in search of one whose calls are like the recorded ones."""


class Compiling:
    """Compiles the regions of a loop's model.

    Args:
        model: without wrappers.
        names: of the modules chosen as regions, None for the model's blocks.
        on_top: our forward on the model, which stands aside meanwhile.
    """

    def __init__(self, model: torch.nn.Module, names: list[str] | None, on_top: OnTop):
        self._model, self._names, self._on_top = model, names, on_top
        self._catcher: Catcher | None = None  # of the calls that the recorded steps have made
        self._caught = self._corrections = 0
        self._most = 0  # elements that a recorded step was called with
        self._of_most: dict[Call, Hashable] = {}  # its calls
        self._planned: dict[Call, Hashable] = {}  # calls that the plan was made for
        self._varies = False  # whether a step may call fewer modules than the planned one
        # Of the recorded steps the one with the most calls, and the parameters that it trained.
        self._fullest: tuple[Profile, str] | None = None
        self._recorded: list[str] = []  # what the last recorded step's calls were given
        self._calls: list[str] = []  # what those of the step that is measured were given
        self._measured = 0  # steps under the plan
        self.is_judged = True  # whether measuring the plan's peak is over
        self.is_judged_again = False  # since the compiler ran again
        self._steps = 0  # that have begun under the plan
        self._times_compiled = 0  # before the last of them
        self.may_have_compiled = False  # whether the compiler may have run in the step that was measured last
        # What the calls of measured steps were given that are not as recorded.
        self._unlike: list[list[str]] = []
        self.best: Plan | None = None  # of those that were measured to be within the budget
        self._over: set[str] = set()  # those measured to be over it
        self.known: Profile | None = None  # with what a measured step under the plan has shown

    def recording_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], alone: bool) -> None:
        """Catch the regions' calls in the step that begins with this call of the model, if they are known.

        Args:
            alone: whether no other ranks record with this one: those count the steps that they catch together.
        """
        there = dict(self._model.named_modules())
        if alone and self._catcher is None and all(name in there for name, _ in self._planned):
            self._catcher = Catcher(self._model, self._planned) if self._planned else None
        if self._catcher is not None:
            self._catcher.put_on()
            self._catcher.called(args, kwargs)

    def stop(self) -> None:
        """Take hooks off the model."""
        if self._catcher is not None:
            self._catcher.take_off()

    def forget(self) -> None:
        """Drop the arguments that were caught."""
        self.stop()
        self._catcher = None

    def begin_anew(self) -> None:
        """Forget all that is known of the loop's steps, as other parameters are trained from now on."""
        self.forget()
        self._caught = self._corrections = self._most = 0
        self._of_most, self._planned, self._fullest, self.best = {}, {}, None, None
        self._over.clear()

    def is_ready(self, profile: Profile) -> bool:
        """Whether all calls of this recorded step were caught, and it is the largest so far.

        If enough steps were recorded, a smaller one, or one of which some calls were caught, is ready, too.
        """
        if self._catcher is not None:
            self._catcher.is_over(self._wanted(profile))
        wanted = self._wanted(self._to_plan_for(profile))
        caught = [call for _, calls in self._caught_of(wanted) for call in calls]
        if self._caught >= _MOST_CAUGHT:
            return bool(caught)
        return len(caught) == len(wanted) > 0 and elements_in(profile.sample) >= self._most

    def _to_plan_for(self, profile: Profile) -> Profile:
        """This recorded step; if enough were recorded, an earlier one of the same kind that made more calls."""
        if self._fullest is None or self._caught < _MOST_CAUGHT:
            return profile
        return self._fullest[0] if self._is_less(profile) else profile

    def _is_less(self, profile: Profile) -> bool:
        """Whether this step is like the fullest so far, and made fewer calls."""
        if self._fullest is None:
            return False
        fullest, trained = self._fullest
        is_alike = fullest.sample == profile.sample and trained == trained_in(self._model)
        return is_alike and len(profile.calls) < len(fullest.calls)

    def _wanted(self, profile: Profile) -> dict[Call, Hashable]:
        """The calls of a recorded step that are to be compiled."""
        return kinds_of(profile, self._model, called_among(profile, self._names))

    def _caught_of(self, wanted: Mapping[Call, Hashable]) -> Caught:
        return [] if self._catcher is None else self._catcher.caught_of(wanted)

    def with_regions(self, profile: Profile) -> Profile:
        """The recorded step, which is ready, or one that made more calls, with its compiled regions.

        Raises:
            NothingCompiled: no region can be compiled.
        """
        self._varies = self._is_less(profile) or not {VARYING, ONE_DRAW}.isdisjoint(
            (*profile.facts, *profile.notes)
        )
        profile = self._to_plan_for(profile)
        wanted = self._planned = self._wanted(profile)
        found = self._caught_of(wanted)
        caught = {call for _, calls in found for call in calls}
        uncaught = {call: kind for call, kind in wanted.items() if call not in caught}
        self.stop()
        self._catcher, self._caught, self._corrections, self._most = None, 0, 0, 0
        self._fullest = self.best = None
        self._over.clear()
        # The regions enter the autocast of their own calls.
        with (
            forward_autocast() as without,
            without,
            self._on_top.aside(),
            progress_shown("planning", None) as tell,
        ):
            return with_caught_regions(profile, self._model, (), found, tell, uncaught)

    def catch_next(self, profile: Profile) -> None:
        """Catch the calls that this step has made in those that are recorded next.

        Raises:
            NothingCompiled: there is nothing to compile in it.
            ProfilingError: no two steps in a row make the same calls.
        """
        self.stop()
        wanted, elements = self._wanted(profile), elements_in(profile.sample)
        if not wanted:
            raise NothingCompiled("the model has no block that holds a twentieth of it")
        if elements >= self._most:
            self._most, self._of_most = elements, wanted
        was_caught = bool(self._caught_of(wanted))
        if self._catcher is None:
            self._catcher = Catcher(self._model, wanted)
        self._catcher.want(self._of_most)
        if not self._is_less(profile):
            self._fullest = profile, trained_in(self._model)
        self._caught += 1
        if self._caught > _MOST_CAUGHT and not was_caught:
            raise ProfilingError(
                f"the loop's steps call other modules each time, so none was compiled after {self._caught} of them: "
                "plan beforehand with autoac.plan(model, sample, budget, engine='compile'), or take engine='sac'."
            )

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], begins: bool) -> None:
        """Note a call of the step that is recorded.

        Args:
            begins: whether the step begins with it.
        """
        self._recorded = [*([] if begins else self._recorded), described(args, kwargs)]

    def to_be_judged(self, plan: Plan) -> None:
        """A new plan is put on."""
        self.is_judged, self._measured, self.known, self.is_judged_again = False, 0, None, False
        self.may_have_compiled, self._unlike = False, []
        self._times_compiled = self._steps = 0
        self._recorded = self._recorded or [plan.record.profile.sample]  # taken up from a file

    def step_begins(self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Note a planned step's first call; returns whether to measure the step: it begins like the recorded one."""
        self._calls = [described(args, kwargs)]
        if self._corrections <= _MOST_CORRECTIONS and plan.placement.not_compiled:  # since it was judged
            self.is_judged = False
        before, self._times_compiled = self._times_compiled, plan.placement.following.times_compiled
        # Not in the first one: something may have changed that no argument shows.
        if self._times_compiled > before and self._steps > 1:
            if self.is_judged:
                self.is_judged, self._measured, self.is_judged_again = False, 0, True
            self._varies = True
        self._steps += 1
        return not self.is_judged and self._calls == self._recorded[:1]

    def step_goes_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a further call of the step that is measured."""
        self._calls.append(described(args, kwargs))

    def takes_more(self, plan: Plan, measured_bytes: int) -> bool:
        """Whether a step that was measured since the compiler ran again takes more than was planned for."""
        return self.is_judged_again and measured_bytes > (1 + CLOSE) * plan.predicted_peak_bytes

    @property
    def is_unlike(self) -> bool:
        """Whether the calls of the step that is measured are not like the recorded ones."""
        return self._calls != self._recorded

    def better_known(self, plan: Plan, measured_bytes: int) -> Profile | Plan | None:
        """A profile to plan from again after a step was measured, or the plan to take; None to go on with this one."""
        if failed := plan.placement.not_compiled:
            self.is_judged = True
            self._corrections += 1
            if self._corrections <= _MOST_CORRECTIONS:
                with contextlib.suppress(NothingCompiled):  # all run uncompiled, which their warning tells
                    self.known = without_regions(plan.record.profile, failed)
                    return self.known
            return None
        self._measured += 1
        self.may_have_compiled = self.is_unlike and self._calls not in self._unlike
        if self.is_unlike:
            self.is_judged = self._measured >= _MOST_MEASURED
            self._unlike.append(self._calls)
            return None
        self.is_judged = True
        if self.is_judged_again:  # steps of both kinds may come
            return None
        if self._varies and measured_bytes < plan.predicted_peak_bytes:
            return None
        may_be_reset = device_for(device_of(self._model)).counts_memory
        if may_be_reset and measured_bytes < _LEAST_OF_PREDICTED * plan.predicted_peak_bytes:
            return None
        known = corrected(plan, measured_bytes, with_optimizer=True)
        self.known = known.record.profile
        error = abs(known.predicted_peak_bytes - plan.predicted_peak_bytes)
        fits = measured_bytes <= plan.budget_bytes - plan.record.headroom_bytes
        if not fits:
            self._over.add(plan.program_id)
        elif self.best is None or known.record.predicted_extra_s < self.best.record.predicted_extra_s:
            self.best = known
        if fits and error <= CLOSE * measured_bytes:
            return None
        self._corrections += 1
        if self._corrections <= _MOST_CORRECTIONS:
            return known.record.profile
        is_first = self._corrections == _MOST_CORRECTIONS + 1
        return self.best if is_first else None

    def in_place_of(self, plan: Plan) -> Plan:
        """A newly made plan, or the best one, if that one was measured to be over the budget."""
        return self.best if self.best is not None and plan.program_id in self._over else plan
