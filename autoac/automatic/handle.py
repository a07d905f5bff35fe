"""The handle of `autoac.auto`: receives the loop's events, and decides when to record, to plan and to plan anew."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from autoac.automatic.ahead import Ahead
from autoac.automatic.loop_plan import LoopPlan, keep_for_its_phase, make_room
from autoac.automatic.optimizers import counts_optimizer, is_frozen, trained_in
from autoac.automatic.recording import MOST_RECORDINGS
from autoac.automatic.wanted import Wanted
from autoac.execute.attach import restart_calls
from autoac.execute.on_top import OnTop, owner_of
from autoac.plans import Plan
from autoac.progress import LOGGER
from autoac.record.recorder import raise_if_by_torch_func
from autoac.step.model import has_gradients
from autoac.step.optimizer import around_steps
from autoac.torch_private import in_backward, outside_of_transforms

_FIRST_STEPS = 24
"""A budget that no plan fits is an error in so many steps, and a warning later, after a warm-up."""
_MOST_SHORT = 12
"""At most so many recordings are dropped in search of a step in which all optimizers step."""

_TOO_LONG = (
    "too many steps of this loop's optimizers belong together to be planned for as one: the plan is for those that "
    "were recorded, and others may take more than the budget. Leave headroom=."
)

_OTHERS_ARE_TRAINED = (
    "the parameters that are trained change from step to step: the plan is for this one and those that train the same, "
    "and others may take more than the budget. Leave headroom=."
)


class Auto(LoopPlan):
    """The handle of `autoac.auto`: receives the loop's events.

    Attributes:
        report: result of `Plan.verify`, None if it was not requested or has not run yet.
        on_removed: called once, when the handle is removed, by itself too (an impossible budget).
    """

    takes_turns = False  # a plan that the loop itself puts on is its own

    def __init__(self, model: torch.nn.Module, wanted: Wanted, optimizer: Any):
        super().__init__(model, wanted, optimizer, OnTop(model, self))
        _give_up_abandoned()
        self.on_removed: list[Callable[[], None]] = []
        self._running = False
        # Optimizers whose state was compared with the plan, and those that came when all others were gone.
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        self._replacing: weakref.WeakSet[Any] = weakref.WeakSet()
        self._short = 0  # recordings dropped, because other batches step more optimizers
        self._retrained = 0  # recordings in a row of which none was planned for: others were trained next
        self._trains = ""  # fingerprint of the parameters that the step that runs trains
        self._ahead = Ahead(model, self._about_to_be_called)
        self._ahead.put_on()
        self._leave_steps = around_steps(_weakly(self._before_step), _weakly(self._after_step))
        weakref.finalize(self, self._leave_steps)
        self._on_top.put_on()

    # For the user.

    def remove(self) -> None:
        """Take the plan and this handle's hooks off the model, restoring it."""
        try:
            super().remove()
        finally:
            self._ahead.take_off()
            self._leave_steps()
            while self.on_removed:
                self.on_removed.pop()()

    @property
    def measured_peak_bytes(self) -> int | None:
        """Largest peak of the measured steps under the plan, with the optimizer's step and resident bytes.

        None until the first is over, or if none is to be measured.
        """
        return self._measured.peak_bytes

    @property
    def measured_plan(self) -> Plan | None:
        """The plan of that step; None as long as nothing was measured."""
        return self._measured.plan

    def __repr__(self) -> str:
        state = "recording a step" if self._recording.is_on else "waiting for the first training step"
        return f"Auto({type(self._model).__name__}, {self._plan or state})"

    # The loop's events.

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a call of the model."""
        self._recording.end_if_stopped()
        was_on = self._recording.is_on
        if not self._counts:
            return self._on_top.run(args, kwargs, uncompiled=was_on)
        if not self._ahead.is_on:
            self._begins(args, kwargs, self._cycle.may_begin())
        if self._ahead.is_late:
            self._ahead.put_on()
            if self._recording.is_on and not was_on:
                self._recording.began_late()
        self._running = True
        try:
            result = self._on_top.run(args, kwargs, uncompiled=self._recording.is_on)
            self._recording.returned = id(result)
            if self._plan is not None:
                self._watch.returned(result)
            return result
        except BaseException as error:
            self._abandon_step()
            raise_if_by_torch_func(error)
            raise
        finally:
            self._running = False

    def _abandon_step(self) -> None:
        """End the step without a result. If the loop goes on with another batch, recording begins anew with it."""
        self._cycle.has_stepped |= self._recording.is_on
        self._give_up_step()

    @property
    def _counts(self) -> bool:
        """Whether a call now is the loop's.

        Not evaluation, a second run in backward, a call within another one, nor of a model that is frozen for now.
        """
        is_step = self._model.training and torch.is_grad_enabled() and not self._running
        return is_step and not self._recording.is_in_backward() and not is_frozen(self._model)

    def _about_to_be_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle a call of the model before FSDP2 has gathered anything for it; none of those that `verify` makes."""
        if self._counts and owner_of(self._given) is self:
            self._begins(args, kwargs, self._cycle.may_begin())

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce a step, or a further micro-batch of it, for trainers that do not call the model itself.

        A step then lasts until the next one begins, however many optimizers step in it.

        Args:
            args, kwargs: arguments of the call, which hold the batch.
        """
        self._cycle.is_told = True
        self._begins(args, kwargs, self._cycle.announced_may_begin(), is_announced=True)
        self._cycle.has_stepped = False

    @outside_of_transforms
    def _begins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], begins: bool, is_announced: bool = False
    ) -> None:
        """Handle a call of the model.

        Args:
            begins: whether a step begins with the call.
            is_announced: whether it is no call, but announced by a trainer.
        """
        if begins and self._measured.step.is_running:  # no optimizer has stepped since
            self._tell_peak(self._measured.step.end())
        begins |= self._recording.end_if_over(
            begins and not (self._cycle.is_one and self._cycle.has_gradients()), is_announced
        )
        self._cycle.called(begins)
        meet = begins and self._across.step_begins()  # counts steps, also while one is recorded
        with self._across.beginning(begins, self._abandon_step):
            self._act_on_call(args, kwargs, begins, meet, is_announced)

    def _act_on_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], begins: bool, meet: bool, is_announced: bool
    ) -> None:
        is_short = self._cycle.is_short and self._short < _MOST_SHORT
        if begins and is_short and self._recording.profile is not None:
            self._short += 1
            self._recording.drop()
        if self._recording.is_on:
            if self._compiling is not None:
                self._compiling.recorded(args, kwargs, begins=False)
            if meet:
                self._meet(args, kwargs)
            return
        if begins:
            self._watch.steps += 1
            self._begin_cycle()
            self._trains = trained_in(self._model)
        if begins and self._trained != self._trains and (self._recording.profile or self._plan):
            acts = self._other_parameters_are_trained()
            if not acts and self._plan is None and not meet:
                return  # the plan is put on in a step that trains what it was made for
        if meet:
            self._meet(args, kwargs)
        elif begins and self._across.several:
            if self._corrected is not None:
                self._across.ask()
            if self._plan is not None and self._measured.exceeded is not None:
                make_room(self)
        elif begins:
            if self._recording.profile is not None:
                self._settle(args, kwargs)
            if self._plan is None and self._recording.profile is None:
                self._take_up_saved(args, kwargs)
            if self._plan is not None and self._measured.exceeded is not None:
                make_room(self)
            if self._plan is not None and self._corrected is not None:
                self._plan_again(args, kwargs)
        if self._plan is not None:
            self._look_at(args, kwargs, begins, is_announced or not self._cycle.is_told)
        if self._plan is None and self._recording.profile is None and begins:
            self._record(args, kwargs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Handle an optimizer that is about to step."""
        if not self._optimizers.trains(optimizer):
            self._cycle.count_another()
            return None
        self._cycle.has_own = True
        if self._optimizers.are_joined_by(optimizer):
            if self._optimizers.is_only(optimizer):
                self._replacing.add(optimizer)
            may_be_counted = self._was_saved or optimizer in self._replacing
            self._watch.uncounted = self._plan is not None and not (
                may_be_counted and counts_optimizer(self._plan.record.profile, optimizer)
            )
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": _with_after(kwargs["closure"], self._step_is_over, optimizer)}
        if len(args) > 1 and args[1] is not None:  # the first is the optimizer itself
            return (args[0], _with_after(args[1], self._step_is_over, optimizer), *args[2:]), kwargs
        self._optimizers.note_step(optimizer)
        if in_backward():  # it steps parameter by parameter during backward
            if self._plan is None:
                self._recording.tell_if_nothing_is_seen()
        else:
            self._step_is_over(optimizer)
        return None

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._optimizers.trains(optimizer) or in_backward():
            return
        self._recording.pause(False)
        may_be_counted = self._was_saved or optimizer in self._replacing
        if self._plan is not None:
            self._watch.step_is_over()
        is_new = may_be_counted and optimizer not in self._stepped
        if (self._optimizers.keeps_more(optimizer) or is_new) and self._plan is not None:
            self._stepped.add(optimizer)  # it has its state now
            self._watch.uncounted |= not counts_optimizer(self._plan.record.profile, optimizer)
        if self._measured.step.is_running and self._cycle.is_over:
            self._tell_peak(self._measured.step.end())

    def _step_is_over(self, optimizer: Any) -> None:
        if self._plan is None:
            self._recording.tell_if_nothing_is_seen()
        elif has_gradients(self._model) and (found := self._watch.not_called(optimizer)) is not None:
            self._act_on(found)
        self._cycle.count(optimizer, self._trains)
        if self._recording.ended_early:  # what was recorded is not the whole step
            self._recording.ended_early = False
            if self._plan is None:
                self._give_up_step()  # one that began with a later call of this step
                self._record_again(is_new=True)
            else:
                self._watch.uncounted = True
        if self._recording.went_backward and self._cycle.is_over:
            self._recording.end()
            self._optimizers.hold(self._recording.has_step)
        elif self._recording.is_on:
            self._recording.pause(True)  # the record goes on after the optimizer

    # Reactions to events.

    def _begin_cycle(self) -> None:
        """Begin a step; if its optimizer steps differ from the recorded ones, record again."""
        if self._cycle.begins():
            # The plan was for a part of a step, or, if that is late, for a warm-up that trains a part of the model.
            self._record_again(is_new=True, keeps=self._watch.steps > _FIRST_STEPS)
            LOGGER.info("the loop's steps have more in them than was planned for: recording one as a whole")
        if self._cycle.is_too_long:
            self._warn("too long", _TOO_LONG)

    def _other_parameters_are_trained(self) -> bool:
        """Put on the plan for these, or record the step that begins, unless every step trains others."""
        plan = self._plan
        if self._compiling is not None:
            self._compiling.begin_anew()
        if plan is not None or self._retrained < MOST_RECORDINGS:
            keep_for_its_phase(self)
        known = self._phases.plan_for(self._trains)
        if known is not None and self._record_again(is_new=True):
            self._retrained = 0
            self._put_new_plan_on(known, "other parameters are trained: put on the plan of")
            return True
        if self._retrained >= MOST_RECORDINGS:
            return False
        self._retrained = self._retrained + 1 if plan is None else 0
        LOGGER.info("other parameters are trained than in the recorded step: recording this step")
        self._record_again(is_new=True)
        if self._retrained == MOST_RECORDINGS:
            self._warn("other parameters", _OTHERS_ARE_TRAINED)
        return True

    def _record(self, args: Any, kwargs: Any) -> None:
        """Record the step that begins."""
        if self._recording.begin(args, kwargs, self._cycle.ends_with_optimizer):
            if self._compiling is not None:
                self._compiling.recording_begins(args, kwargs, alone=not self._across.several)
                self._compiling.recorded(args, kwargs, begins=True)
            _RECORDING[self] = threading.get_ident()
            self._was_saved = False
            self._trained = self._trains = trained_in(self._model)
            self._across.ask()

    def _look_at(self, args: Any, kwargs: Any, begins: bool, checks: bool) -> None:
        """Check a call under the plan: record anew or warn if the plan was not made for it.

        Args:
            checks: as for `Watch.found`.
        """
        found = self._watch.found(args, kwargs, begins, self._cycle.is_told, self._recording, checks)
        if found is not None:
            self._act_on(found)
        if begins and self._plan is not None:
            if not self._cycle.is_one or self._cycle.ends_with_optimizer:
                restart_calls(self._model, told=not self._cycle.is_one, skipped=self._recording.skipped)
            if self._compiling is None:
                self._measured.step.begin()
            elif self._compiling.step_begins(self._plan, args, kwargs):
                self._measured.step.want()
                self._measured.step.begin()
            elif self._compiling.is_judged:
                self._measured.step.begin()
        elif self._plan is not None and self._compiling is not None:
            self._compiling.step_goes_on(args, kwargs)


_RECORDING: weakref.WeakKeyDictionary[Auto, int] = weakref.WeakKeyDictionary()
"""Handles that have recorded, with the thread of the last recording."""


def _give_up_abandoned() -> None:
    """End recordings left on this thread: a handle never begins during another one's step, so those steps failed."""
    for handle, thread in list(_RECORDING.items()):
        if thread == threading.get_ident() and handle._recording.is_on:
            handle._abandon_step()
            LOGGER.info("the step that autoac.auto recorded for another model was never over: given up")


def _with_after(
    closure: Callable[[], Any], after: Callable[[Any], None], optimizer: Any
) -> Callable[[], Any]:
    """An optimizer's closure, and another function that is called with the optimizer after its first run."""
    is_first = True

    def run() -> Any:
        nonlocal is_first
        result = closure()
        if is_first:
            is_first = False
            after(optimizer)
        return result

    return run


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A hook that calls a method as long as its object is there."""
    known = weakref.WeakMethod(method)
    return lambda *args: found(*args) if (found := known()) else None
