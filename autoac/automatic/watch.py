"""Detection of steps that the plan was not made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoac.automatic.recording import MOST_RECORDINGS, StepRecording
from autoac.automatic.wanted import called_in
from autoac.execute.watch.newcomers import outermost, unwatch_newcomers, watch_newcomers
from autoac.execute.watch.unplanned_calls import UnplannedCalls, unwatch_calls
from autoac.plans import Plan
from autoac.step.inputs import described, elements_of, without_autocast
from autoac.step.model import has_gradients

_LONGEST_FIRST = "Let all micro-batches of the first step be as long as any later one"
_GRADIENTS = "a step begins with gradients, and the recorded one began without, so this one may take more"


def _by_place(plan: Plan) -> tuple[int, ...]:
    """Elements of the recorded step's calls, if they are unequal and the plan holds for their order only; else ()."""
    record = plan.record
    sizes = record.profile.call_elements
    no_places = record.several is None and any(region.wrapped for region in record.regions)
    return sizes if len(set(sizes)) > 1 and (no_places or not record.profile.any_order) else ()


@dataclass(frozen=True)
class Finding:
    """Something in a step that the plan was not made for, and the reaction.

    Args:
        key: identifies the warning, which is given once.
        warning: text of the warning, if no step is recorded.
        log: text for the log when the step that begins is recorded; "" not to record it.
        is_new: record the step however many were recorded before.
        plan_may_stay: keep the plan if the recorded step needs no more.
        is_free: do not count the recording.
    """

    key: str
    warning: str = ""
    log: str = ""
    is_new: bool = False
    plan_may_stay: bool = False
    is_free: bool = False


class Refused(ValueError):
    """A call was larger than planned for, and was not run."""


class Watch:
    """Checks each call of a planned model.

    Args:
        model: without wrappers.
        on_larger: as for `auto`.

    Attributes:
        uncounted: an optimizer has stepped for the first time under the plan.
    """

    def __init__(self, model: torch.nn.Module, on_larger: str):
        self.uncounted = False
        self._model = model
        self._on_larger = on_larger
        self._most = 0  # most elements planned for, by this plan or an earlier one
        self._larger_later = False  # a later call of a planned step was larger
        self._times_later = 0  # so many times, since a step was planned for that has more elements

    def put_on(self, plan: Plan) -> None:
        """Start checking, after a plan was put on the model."""
        profile = plan.record.profile
        unwatch_calls(self._model)  # checked here instead
        self._plan = plan
        self._unplanned = UnplannedCalls(
            profile.sample, plan.predicted_peak_bytes, plan.budget_bytes, one_call=profile.is_one_call
        )
        if self._unplanned.elements > self._most:
            self._most, self._times_later = self._unplanned.elements, 0
        # Modules called since, and not in the recorded step.
        self._newcomers = watch_newcomers(self._model, called_in(profile))
        self._by_place = _by_place(plan)
        self._calls = 0  # of the step that runs

    def take_off(self) -> None:
        """Stop checking, when the plan is taken off."""
        unwatch_newcomers(self._model)

    def found(
        self, args: Any, kwargs: Any, begins: bool, is_told: bool, recording: StepRecording
    ) -> Finding | None:
        """A deviation from the plan in this call of the model, or in the steps before it; None if there is none.

        Args:
            args, kwargs: arguments of the call.
            begins: whether a step begins with it.
            is_told: whether a trainer announces the steps, before it enters their autocast.

        Raises:
            Refused: the call is larger than planned for, and `on_larger` is "error".
        """
        self._calls = 1 if begins else self._calls + 1
        finding = self._found(args, kwargs, begins, is_told, recording)
        finding = finding or self._larger_in_its_place(args, kwargs, recording.skipped)
        if finding is None and (words := self._unplanned.words_on_shape(args, kwargs)):
            return Finding("longer", words)
        return finding

    def _found(
        self, args: Any, kwargs: Any, begins: bool, is_told: bool, recording: StepRecording
    ) -> Finding | None:
        if begins and not is_told and self._unplanned.is_other_autocast():
            words = self._unplanned.words_on_autocast()
            return Finding("autocast", words, f"{words}: recording this step anew")
        if self._unplanned.is_larger(args, kwargs):
            if begins and elements_of(args, kwargs) <= self._most:
                words = "the plan is for a smaller batch than the one before it: recording this larger one"
                return Finding("as before", log=words, is_free=True)
            return self._larger_call(self._unplanned.words(args, kwargs), begins)
        if not begins:
            return self._micro_batch() if self._unplanned.one_call else None
        if recording.count and recording.began_otherwise and has_gradients(self._model):
            return Finding("gradients", _GRADIENTS, f"{_GRADIENTS}: recording this step")
        if recording.may_begin_again and self._plan.is_not_followed:
            return Finding("followed", log="the plan was not followed: recording the next step anew")
        if self._newcomers:
            return self._new_modules(recording.count)
        if self.uncounted:
            return self._new_optimizer()
        if self._larger_later:
            self._larger_later = False
            words = "a later micro-batch of a step was larger than planned for: recording this step"
            return Finding("larger later", log=words, is_new=True, plan_may_stay=True)
        return None

    def _larger_in_its_place(self, args: Any, kwargs: Any, skipped: int) -> Finding | None:
        """The call is larger than the recorded step's call in its place, which was smaller than another one.

        No step is recorded for it, whatever `on_larger` says: with micro-batches of drawn lengths there is one again
        soon.
        """
        place = self._calls - skipped
        if not self._by_place or place < 1:
            return None
        planned = self._by_place[min(place, len(self._by_place)) - 1]
        elements = elements_of(args, kwargs)
        if elements <= planned:
            return None
        words = (
            f"call {place} of this step is with {without_autocast(described(args, kwargs))}, {elements} "
            f"elements, and in the recorded step it had {planned}. The plan is for calls in that order, so this step "
            f"{self._unplanned.may_take_more}. {_LONGEST_FIRST}"
        )
        if self._on_larger == "error":
            raise Refused(f"{words}. The call was not run.")
        return Finding("larger in its place", f"{words}, or leave headroom (headroom=).")

    def _larger_call(self, words: str, begins: bool) -> Finding:
        if self._on_larger == "error":
            raise Refused(f"{words}, or use on_larger='replan'. Nothing was run.")
        if self._on_larger == "warn":
            return Finding("larger", f"{words}, or use on_larger='replan'.")
        if begins:
            return Finding("larger", log=f"{words}: recording this step to plan anew", is_new=True)
        self._times_later += 1  # in the middle of a step, where no recording can begin
        if self._times_later > MOST_RECORDINGS:
            return Finding(
                "larger later again",
                f"{words}. {MOST_RECORDINGS} steps were recorded for such micro-batches, and none had one: no more are "
                f"recorded. {_LONGEST_FIRST}.",
            )
        self._larger_later = True
        return Finding("larger later", f"{words}: the next step is recorded for that.")

    def _new_modules(self, recordings: int) -> Finding:
        """The previous step called modules that the recorded step did not call, as with layer drop."""
        names = outermost(self._newcomers)
        words = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        self._newcomers.clear()
        return Finding(
            "newcomers",
            f"the steps of this loop vary: {words} were called, and in none of {recordings} recorded steps with "
            "the others. Their memory is not planned for, so a step may take more than the budget: plan beforehand "
            "with autoac.plan, which plans for a step that calls all modules.",
            f"the step before called {words}, which the recorded one had not: recording this step",
            plan_may_stay=True,
        )

    def _new_optimizer(self) -> Finding:
        """An optimizer stepped for the first time under the plan, which does not count its state."""
        self.uncounted = False
        return Finding(
            "uncounted",
            "an optimizer stepped for the first time under the plan, which does not count its state and its step: this "
            "loop may take more than the budget. Pass it as optimizer= to autoac.auto.",
            "an optimizer stepped for the first time: recording this step to count it",
        )

    def _micro_batch(self) -> Finding | None:
        """The model is called again in a step, but the recorded step called it once."""
        if not has_gradients(self._model):
            return None
        return Finding(
            "micro-batches",
            "the model is called again before its gradients are cleared, and the recorded step called it once: "
            "these gradients are not planned for, and this step may take more than the budget. Let the first step "
            "have as many micro-batches as any other.",
        )
