"""The plan of a loop: made from a recorded step or a file, agreed on with other ranks, put on and taken off."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoac.automatic.across import Across, Meeting
from autoac.automatic.beside import with_all_called
from autoac.automatic.compiling import Compiling
from autoac.automatic.cycle import Cycle, Phases
from autoac.automatic.measured import Measured
from autoac.automatic.optimizers import Optimizers, trained_in
from autoac.automatic.recording import StepRecording
from autoac.automatic.report import (
    Once,
    doubts,
    in_a_line,
    may_take_more,
    refusal,
    verified,
    words_on_no_plan_since,
    words_over_budget,
)
from autoac.automatic.wanted import Wanted, fits_under, is_of_another, needs_no_more
from autoac.automatic.watch import Finding, Watch
from autoac.execute.engines import ENGINES
from autoac.execute.on_top import OnTop
from autoac.plans import Plan
from autoac.progress import LOGGER
from autoac.step.model import unwrapped
from autoac.step.uncompiled import compiled_modules
from autoac_solver.plan.recorded.transfer import outcome_of
from autoac_solver.records.engines import compiles
from autoac_solver.records.errors import AutoacError, InfeasibleBudgetError, ProfilingError
from autoac_solver.records.profile import COMPILED_FUNCTIONS, Profile

_COVERED = (
    "other code has replaced the forward of a planned module, so the plan stays on, and steps that it was not made for "
    "may take more than the budget. Take that off, then call remove() and autoac.auto again."
)

_STAYS = "no plan fits what was recorded since: kept the plan of"
_LEAST = "no plan fits what was recorded since: put on that of the least peak,"


class LoopPlan:
    """The plan of a loop, from the first recorded step on; `Auto` receives the loop's events.

    Args:
        model: as the loop calls it.
        optimizer: the loop's optimizer; None to find it when it steps.
        on_top: our forward on the model, which stands aside while a plan is put on or taken off.

    Attributes:
        report: see `Auto`.
        trial: for `verify`, from a trainer that announces steps: runs one on the announced batch, forward to backward.
    """

    def __init__(self, model: torch.nn.Module, wanted: Wanted, optimizer: Any, on_top: OnTop):
        self.report: Any = None
        self.trial: Callable[[], torch.Tensor] | None = None
        self._given = model
        self._model = unwrapped(model)
        self._wanted = wanted
        self._provisional: Plan | None = None
        self._plan: Plan | None = None
        self._was_saved = False
        self._trained = ""  # fingerprint of the parameters trained in the recorded step
        self._kept: Plan | None = None  # put on again if no plan fits the next recorded step
        self._kept_for_less = self._kept_by_outcome = False  # or if that needs no more, or fits under it
        self._cycle = Cycle(self._model)
        self._on_top = on_top
        self._warn = Once()
        self._optimizers = Optimizers(self._model, optimizer, self._warn)
        self._phases = Phases(self._model, self._optimizers)
        self._recording = StepRecording(model, on_top, self._optimizers, self._warn)
        self._watch = Watch(self._model, wanted.on_larger)
        self._measured = Measured(self._model, wanted)
        self._across = Across(model, self._model, wanted)
        self._compiling = Compiling(self._model, wanted.names, on_top) if compiles(wanted.engine) else None
        # What to plan from next, or to take, by a measured step.
        self._corrected: tuple[Profile | Plan, Wanted] | None = None

    def remove(self) -> None:
        """Take the plan off the model, restoring it.

        Raises:
            PlanMismatchError: other code has replaced a planned module's forward, and the plan stays on; all else is
                taken off.
        """
        self._give_up_step()
        self._optimizers.hold(False)
        try:
            self._phases.forget()
            self._take_plan_off()
        finally:
            self._on_top.take_off()

    def _give_up_step(self) -> None:
        """Stop recording and measuring the step that runs."""
        self._recording.give_up()
        if self._compiling is not None:
            self._compiling.forget()
        self._measured.step.end()

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first step is over. While a later step is recorded, the one that stays if it can.

        Between the first step and the second it is provisional: that for the first step as it was recorded; None with
        engine compile, and if no plan fits, which the second step says.
        """
        self._recording.end_if_stopped()
        stays = self._kept if self._kept_for_less else None
        has_none = self._compiling is not None or self._recording.is_late or self.known_plan is not None
        if not (has_none or stays) and (recorded := self._recording.profile) is not None:
            # The loop raises it, and may know of more by then.
            with contextlib.suppress(InfeasibleBudgetError):
                self._provisional = self._wanted.plan(self._given, self._optimizers.counted(recorded))
        return self._plan or self._provisional or stays

    @property
    def known_plan(self) -> Plan | None:
        """The plan if one has been made."""
        return self._plan or self._provisional

    def _record_again(self, is_new: bool = False, keeps: bool = True) -> bool:
        """Have the next step recorded, unless that was done too often.

        Args:
            is_new: do not count the recordings so far.
            keeps: if no plan fits that step, the loop goes on, see `_in_spite_of`.
        """
        if is_new:
            self._recording.count = 0
        if not self._recording.may_begin_again:
            return False
        if self._plan is not None:
            with self._on_top.aside():
                is_covered = not self._plan.placement.can_detach(self._model)
            if is_covered:
                self._warn("covered", _COVERED)
                return False
        self._kept, self._kept_for_less = (self._plan or self._kept) if keeps else None, False
        self._kept_by_outcome = False
        self._take_plan_off()
        self._recording.forget()
        self._optimizers.hold(False)
        self._provisional = self._measured.exceeded = None
        return True

    def _settle(self, args: Any, kwargs: Any) -> None:
        """Plan for the recorded step when the next one begins."""
        if self._recording.began_otherwise and self._record_again():
            return
        recorded = self._recording.profile
        assert recorded is not None
        if is_of_another(recorded, self._model) and self._record_again():
            LOGGER.info("the model has changed since the recorded step began: recording this step")
            return
        profile = self._measured.larger(self._counted((args, kwargs)))
        kept, self._kept = self._kept, None
        if kept is not None and self._kept_for_less and self._may_do(kept, profile):
            self._put_plan_on(
                kept, "the recorded step needs no more than the one before it: kept the plan of"
            )
            self._watch.fits_too(profile.sample)
            return
        if self._compiling is None:
            with self._on_top.aside():
                beside = with_all_called(profile, self._model, args, kwargs, self.trial, self._warn)
            profile = profile if beside is None else self._optimizers.counted(beside)
        try:
            if self._compiling is not None:
                if not self._compiling.is_ready(profile):
                    self._compiling.catch_next(profile)
                    self._kept = kept
                    # The step that begins is recorded, too.
                    self._recording.count -= self._recording.count > 1
                    return
                profile = self._compiling.with_regions(profile)
            plan = self._wanted.plan(self._given, profile)
        except InfeasibleBudgetError as error:
            if self._measured.exceeded is not None:
                _stay_over_budget(self, self._measured.exceeded)
            elif kept is not None:
                plan = _in_spite_of(error, self, kept, profile)
                if plan is kept:
                    self._put_plan_on(kept, _STAYS)
                    self._watch.too_large.note(profile.sample)
                else:
                    self._take(plan, args, kwargs, save=False, verb=_LEAST)
            elif self._recording.ended_early and self._record_again():  # of a part?
                _note_refusal(error, profile, self._recording)
            else:
                _remove_for(error, self)
                raise _note_refusal(error, profile, self._recording) from None
        except AutoacError as error:
            _remove_for(error, self)
            raise
        else:
            self._take(plan, args, kwargs)

    def _may_do(self, kept: Plan, profile: Profile) -> bool:
        """Whether the plan from before is good enough for a newly recorded step."""
        return fits_under(kept, profile) if self._kept_by_outcome else needs_no_more(profile, kept)

    def _plan_again(self, args: Any, kwargs: Any) -> None:
        """Put on the plan that a measured step has shown to be needed."""
        assert self._corrected is not None
        (known, wanted), self._corrected = self._corrected, None
        try:
            plan = known if isinstance(known, Plan) else wanted.plan(self._given, known, is_corrected=True)
        except InfeasibleBudgetError as error:
            is_for_room = self._compiling is None or wanted is not self._wanted
            if self._plan is not None and not (is_for_room or self._wanted.is_kept_to_by(self._plan)):
                return  # which was told
            best = None if self._compiling is None else self._compiling.best
            if is_for_room or (best is None and self._plan is not None and may_take_more(self._plan)):
                _stay_over_budget(self, self._plan)
                return
            if best is None:
                _remove_for(error, self)
                raise
            plan = best
        if self._compiling is not None:
            plan = self._compiling.in_place_of(plan)
        self._take_plan_off()
        # A plan with more headroom than asked for would not be taken up by a restart.
        save = wanted is self._wanted
        self._take(plan, args, kwargs, save, verb="planned again, from the measured peak,")

    def _counted(self, given: Any = ()) -> Profile:
        """The recorded step with its optimizers; drops the recording.

        Args:
            given: what the model is called with now.
        """
        profile = self._optimizers.counted(self._recording.taken(given))
        self._optimizers.hold(False)
        self._provisional = None
        self._watch.uncounted = False
        return profile

    def _take(self, plan: Plan, args: Any, kwargs: Any, save: bool = True, verb: str = "planned") -> None:
        """Put a new plan on."""
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        if save and self._wanted.path is not None:
            plan.save(self._wanted.path)
        self._put_new_plan_on(plan, verb)

    def _take_up_saved(self, args: Any, kwargs: Any) -> None:
        """Put on the plan that an earlier run saved, if there is one for this model."""
        if not self._recording.count and (plan := self._wanted.saved(self._model)) is not None:
            self._take_up(plan, args, kwargs)

    def _take_up(self, plan: Plan, args: Any, kwargs: Any) -> None:
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        self._was_saved = True  # its profile counts the optimizers of that run
        self._put_new_plan_on(plan, f"took up {self._wanted.path}:", is_first=True)

    def _meet(self, args: Any, kwargs: Any) -> None:
        """Settle with the other ranks on a plan; see NOTE [ One loop on several ranks ]."""
        try:
            with self._across.meeting() as meeting:
                _settle_with(self, meeting, args, kwargs)
        except BaseException as error:
            _remove_for(error, self)
            raise

    def _put_new_plan_on(self, plan: Plan, verb: str, is_first: bool = False) -> None:
        self._measured.begin(plan, is_first, runs_compiled=self._runs_compiled(plan))
        self._put_plan_on(plan, verb)

    def _runs_compiled(self, plan: Plan) -> bool:
        """Whether modules or functions that the user has compiled run compiled under the plan, in one process."""
        modules = ENGINES[plan.engine].is_policy and bool(compiled_modules(self._given))
        functions = not compiles(plan.engine) and COMPILED_FUNCTIONS in plan.record.profile.facts
        return (modules or functions) and not self._across.several

    def _put_plan_on(self, plan: Plan, verb: str) -> None:
        if self._compiling is not None:
            self._compiling.forget()
            self._compiling.to_be_judged(plan)
        with self._on_top.aside():
            plan.apply(self._given)
        self._watch.put_on(plan)
        self._trained = trained_in(self._model)
        self._plan, self._kept = plan, None
        LOGGER.info("%s", in_a_line(verb, plan))
        for key, words in doubts(plan):
            self._warn(key, words)

    def _take_plan_off(self) -> None:
        if self._plan is not None:
            with self._on_top.aside():
                self._plan.remove(self._given)
            self._watch.take_off()
        self._plan = self._corrected = None

    def _verify(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Verify on this batch that gradients are equal; if not, an error (`refusal`), and no plan is on."""
        with self._on_top.aside():
            self.report = verified(plan, self._model, args, kwargs, self.trial)
        if (error := refusal(self.report)) is not None:
            _remove_for(error, self)
            raise error

    def _act_on(self, found: Finding) -> None:
        if found.by_outcome and (self._compiling is not None or self._across.several):
            return
        self._recording.count -= found.is_free
        self._measured.go_on(found.varies)
        if found.log and self._record_again(found.is_new, keeps=not found.plan_is_gone):
            LOGGER.info("%s", found.log)
            self._kept_for_less, self._kept_by_outcome = found.plan_may_do, found.by_outcome
        elif found.warning:
            self._warn(found.key, found.warning)

    def _tell_peak(self, above_start_bytes: int | None) -> None:
        plan = self._plan
        if above_start_bytes is None or plan is None:
            return
        peak, is_corrected = self._measured.note(plan, above_start_bytes), False
        is_settled = self._compiling is None or (self._compiling.is_judged and not self._across.several)
        if self._compiling is not None and not self._compiling.is_judged:
            better = self._compiling.better_known(plan, peak)
            self._corrected = None if better is None else (better, self._wanted)
            if self._corrected is not None or self._compiling.may_have_compiled:
                return
            if not self._across.several and self._compiling.takes_more(plan, peak):
                self._watch.takes_more = True
                return
            is_corrected = not self._compiling.is_unlike and self._compiling.best is None
        if peak <= plan.budget_bytes or (is_settled and self._measured.note_excess(plan)):
            return
        if self._compiling is None and (corrected := self._measured.corrected(plan)) is not None:
            self._corrected = corrected
            return
        self._warn("over budget", words_over_budget(plan, peak, is_measured=is_corrected))


def _note_refusal(
    error: InfeasibleBudgetError, profile: Profile, recording: StepRecording
) -> InfeasibleBudgetError:
    """Note the refusal of a recorded step; returns the least one of steps with the same ops."""
    before = recording.refused
    if before is not None and before[0] == profile.op_fingerprint:
        error = min(before[1], error, key=lambda refusal: refusal.minimum_bytes)
    recording.refused = profile.op_fingerprint, error
    return error


def make_room(loop: LoopPlan) -> None:
    """React to a step that took more than the budget, as steps like the recorded one may."""
    exceeded = loop._measured.exceeded
    if loop._watch.others.will_be_recorded:
        loop._measured.exceeded = None
    elif loop._record_again():
        loop._measured.exceeded = exceeded
        LOGGER.info("a step took more than the budget: recording another one")
    elif loop._across.several:  # whose plans have the same headroom
        _stay_over_budget(loop, loop._plan)
    else:
        loop._corrected = loop._measured.with_room()


def _stay_over_budget(loop: LoopPlan, plan: Plan | None) -> None:
    """No plan has room for a step that took more than the budget: go on under this one."""
    assert plan is not None
    assert loop._measured.peak_bytes is not None
    is_compiled = loop._runs_compiled(plan)
    words = words_over_budget(plan, loop._measured.peak_bytes, is_least=True, runs_compiled=is_compiled)
    loop._warn("over budget", words)
    loop._measured.no_more()
    if loop._plan is None:
        loop._put_plan_on(plan, _STAYS)


def _in_spite_of(error: InfeasibleBudgetError, loop: LoopPlan, kept: Plan, profile: Profile) -> Plan:
    """No plan fits a later step: that of the least peak, or the one before if it is for such steps, too."""
    loop._warn("no plan fits", words_on_no_plan_since(error))
    if loop._kept_for_less and not is_of_another(kept.record.profile, loop._model):
        return kept
    return replace(loop._wanted, budget=error.minimum_bytes).plan(loop._given, profile)


def _settle_with(loop: LoopPlan, meeting: Meeting, args: Any, kwargs: Any) -> None:
    """Settle with the other ranks, while they meet."""
    recording, wanted = loop._recording, loop._wanted
    if meeting.any(recording.is_on):  # for example two calls before a backward
        loop._across.ask()
        return
    recorded = recording.profile is not None
    if meeting.any(recorded and recording.began_otherwise and recording.may_begin_again):
        loop._record_again(is_new=not recording.may_begin_again)
        return
    is_of_other = recording.profile is not None and is_of_another(recording.profile, loop._model)
    if meeting.any(is_of_other):
        is_changed = is_of_other and loop._trained == trained_in(loop._model)  # in the recorded step
        if is_changed and not loop._record_again():
            raise ProfilingError(
                "the model changes in each step that is recorded, so no plan holds for the next one."
            )
        loop._across.ask()  # else they meet until a step trains what it was recorded for
        return
    kept, on = loop._plan or loop._kept, loop._plan
    profile, saved, fits_too = None, None, ""
    at_hand = on or (kept if loop._kept_for_less else None)
    loop._kept = None
    if recorded:
        profile = loop._measured.larger(loop._counted((args, kwargs)))
    elif at_hand is None and meeting.is_first and not recording.count:
        saved = wanted.saved(loop._model)
    is_saved = meeting.any(saved is not None)

    def make(profile: Profile, is_corrected: bool = False) -> Plan:
        try:
            return wanted.plan(loop._given, profile, is_corrected)
        except InfeasibleBudgetError as error:
            if is_corrected and on is not None and not wanted.is_kept_to_by(on):
                return on  # which was told
            if is_corrected or kept is None:
                raise
            return _in_spite_of(error, loop, kept, profile)

    if loop._compiling is None or is_saved:
        if profile is not None and at_hand is not None and needs_no_more(profile, at_hand):
            fits_too, profile = profile.sample, None
        loop._take_plan_off()
        plan = meeting.one_plan(profile, saved or at_hand, make, goes_on=kept is not None)
    else:
        loop._corrected = None
        plan = meeting.compiled_plan(loop._compiling, profile, on, loop._take_plan_off, make)
        if loop._plan is None:  # as in `_settle`
            loop._kept = kept
            recording.count -= recording.count > 1
    if plan is None:
        return
    holds = loop._compiling is not None or profile is None or outcome_of(plan.record, profile).fits
    fits_all = not meeting.any(not holds or not wanted.is_kept_to_by(plan))
    if is_saved:
        loop._take_up(plan, args, kwargs)
    elif fits_all:
        loop._take(plan, args, kwargs, save=meeting.is_first)
    else:
        loop._take(plan, args, kwargs, save=False, verb=_LEAST)
    if fits_too:
        loop._watch.fits_too(fits_too)


def _remove_for(error: BaseException, loop: LoopPlan) -> None:
    """Remove everything before an error is raised; if that fails as well, the error gets a note."""
    try:
        loop.remove()
    except Exception as another:
        error.add_note(f"autoac: {another}")


def keep_for_its_phase(loop: LoopPlan) -> None:
    """Keep a loop's plan, or one for a recorded step that has none yet, for when the same parameters are trained."""
    plan = loop._plan
    recorded = loop._recording.profile
    solves = (
        loop._compiling is None and not loop._across.several
    )  # ranks have one plan, which they make together
    if plan is None and solves and recorded and not loop._recording.began_otherwise:
        try:
            plan = loop._wanted.plan(loop._given, loop._counted())
        except AutoacError:
            return  # recorded again, and told, if they are trained for longer
    if plan is not None:
        loop._phases.keep(loop._trained, plan)
