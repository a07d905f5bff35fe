"""The handle of `autoac.auto`: it hears of the loop's events, and decides when to record, to plan and to plan anew."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoac.automatic.across import Across, Meeting
from autoac.automatic.ahead import Ahead
from autoac.automatic.cycle import Cycle
from autoac.automatic.once import Once
from autoac.automatic.optimizers import Optimizers, trained_in
from autoac.automatic.peak import StepPeak
from autoac.automatic.recording import Recording
from autoac.automatic.report import in_a_line, peak_in_a_line, verified
from autoac.automatic.wanted import Wanted, needs_no_more
from autoac.automatic.watch import Finding, Watch
from autoac.execute.attach import restart_calls
from autoac.execute.on_top import OnTop
from autoac.plans import Plan
from autoac.progress import LOGGER
from autoac.step.model import has_gradients, unwrapped
from autoac.torch_private import in_backward
from autoac_solver.records.errors import AutoacError
from autoac_solver.records.profile import Profile


class Auto:
    """The handle of `autoac.auto`.

    Attributes:
        report: what `Plan.verify` found, None where it was not wanted or has not run yet.
        measured_peak_bytes: peak of the first planned step, with the optimizer's step and resident bytes; None until it
            is over, or where it was not to be measured.
    """

    def __init__(self, model: torch.nn.Module, wanted: Wanted, optimizer: Any):
        self.report: Any = None
        self.measured_peak_bytes: int | None = None
        self._given = model
        self._model = unwrapped(model)
        self._wanted = wanted
        self._provisional: Plan | None = None
        self._plan: Plan | None = None
        self._running = False
        self._was_saved = False
        self._trained = ""  # which parameters were trained in the recorded step
        self._kept: Plan | None = None  # stays if the next recorded step calls no more modules
        self._cycle = Cycle()
        self._on_top = OnTop(model, self)
        self._warn = Once()
        self._optimizers = Optimizers(self._model, optimizer, self._warn)
        self._recording = Recording(model, self._on_top, self._warn)
        self._watch = Watch(self._model, wanted.on_larger)
        self._peak = StepPeak(self._model, wanted.measure)
        self._across = Across(model, self._model, wanted)
        self._ahead = Ahead(model, self._about_to_be_called)
        self._ahead.put_on()
        before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *a: f(*a) if (f := before()) else None),
            register_optimizer_step_post_hook(lambda *a: f(*a) if (f := after()) else None),
        ]
        weakref.finalize(self, _remove, self._hooks)
        self._on_top.put_on()

    # For the user.

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first step is over.

        Between the first step and the second it is provisional: the plan for the first step as it was recorded.
        """
        recorded = self._recording.profile
        if self._plan is None and recorded is not None and self._provisional is None:
            self._provisional = self._wanted.plan(self._given, self._optimizers.counted(recorded))
        return self._plan or self._provisional

    @property
    def known_plan(self) -> Plan | None:
        """The plan if one has been made; asking for it makes none."""
        return self._plan or self._provisional

    def remove(self) -> None:
        """Take the plan and this handle's hooks off the model, which is then as it was before."""
        self._recording.give_up()
        self._peak.end()
        self._optimizers.hold(False)
        self._take_plan_off()
        self._on_top.take_off()
        self._ahead.take_off()
        _remove(self._hooks)

    def __repr__(self) -> str:
        return f"Auto({type(self._model).__name__}, {self._plan or self._state()})"

    def _state(self) -> str:
        return "recording a step" if self._recording.is_on else "waiting for the first training step"

    # The loop's events.

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model is called."""
        if not self._counts:
            return self._on_top.run(args, kwargs)
        if self._ahead.is_late:  # the model was sharded after `auto`: from the next call on
            self._ahead.put_on()
            return self._on_top.run(args, kwargs)
        if not self._ahead.is_on:
            self._begins(args, kwargs, self._cycle.may_begin(has_gradients(self._model)))
        self._running = True
        try:
            return self._on_top.run(args, kwargs)
        except BaseException:
            self._recording.give_up()
            self._peak.end()
            raise
        finally:
            self._running = False

    @property
    def _counts(self) -> bool:
        """Whether a call now is the loop's: no evaluation, second run of code in backward, or call within another."""
        return self._model.training and torch.is_grad_enabled() and not in_backward() and not self._running

    def _about_to_be_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called, and FSDP2 has gathered nothing for it yet."""
        if self._counts:
            self._begins(args, kwargs, self._cycle.may_begin(has_gradients(self._model)))

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step begins, or a further micro-batch of it: for trainers that do not call the model itself.

        A step then goes on until the next one begins, however many optimizers step in it.

        Args:
            args, kwargs: of the call; the batch is in them.
        """
        self._cycle.is_told = True
        self._begins(args, kwargs, self._cycle.has_stepped or not has_gradients(self._model))
        self._cycle.has_stepped = False

    def _begins(self, args: tuple[Any, ...], kwargs: dict[str, Any], begins: bool) -> None:
        """The model is called.

        Args:
            begins: a step begins with that.
        """
        self._recording.end_if_over(begins and not (self._cycle.is_one and has_gradients(self._model)))
        if not self._cycle.is_told:
            self._cycle.has_stepped = False
        meet = begins and self._across.step_begins()  # counts steps, also while one is recorded
        if self._recording.is_on:
            if meet:
                self._meet(args, kwargs)
            return
        if begins:
            self._begin_cycle()
        if begins and self._trained != trained_in(self._model) and (self._recording.profile or self._plan):
            LOGGER.info("other parameters are trained than in the recorded step: recording this step")
            self._record_again(is_new=True)
        if meet:
            self._meet(args, kwargs)
        elif begins and not self._across.several:
            if self._recording.profile is not None:
                self._settle(args, kwargs)
            if self._plan is None and self._recording.profile is None:
                self._take_up_saved(args, kwargs)
        if self._plan is not None:
            self._look_at(args, kwargs, begins)
        if self._plan is None and self._recording.profile is None and begins:
            self._record(args, kwargs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step."""
        if not self._optimizers.trains(optimizer):
            return None
        if self._optimizers.are_joined_by(optimizer):
            self._watch.uncounted = self._plan is not None and not self._was_saved
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._then_over(kwargs["closure"], optimizer)}
        if len(args) > 1 and args[1] is not None:  # the first is the optimizer itself
            return (args[0], self._then_over(args[1], optimizer), *args[2:]), kwargs
        if in_backward():  # it steps parameter by parameter while backward runs
            self._tell_if_nothing_is_seen()
        else:
            self._step_is_over(optimizer)
        return None

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if not self._optimizers.trains(optimizer) or in_backward():
            return
        self._recording.pause(False)
        if self._peak.is_running and self._cycle.is_over:
            self._tell_peak(self._peak.end())

    def _then_over(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        is_first = True

        def run() -> Any:
            nonlocal is_first
            result = closure()
            if is_first:
                is_first = False
                self._step_is_over(optimizer)
            return result

        return run

    def _tell_if_nothing_is_seen(self) -> None:
        if self._plan is None:
            self._recording.tell_if_nothing_is_seen()

    def _step_is_over(self, optimizer: Any) -> None:
        self._tell_if_nothing_is_seen()
        self._cycle.count(optimizer)
        if self._recording.went_backward and self._cycle.is_over:
            self._recording.end()
            self._optimizers.hold(True)
        elif self._recording.is_on:
            self._recording.pause(True)  # the record goes on after the optimizer

    # What is done then.

    def _begin_cycle(self) -> None:
        """A step begins: with other optimizers' steps than the one before, maybe."""
        if self._cycle.begins():
            self._record_again(is_new=True)
            self._peak = StepPeak(self._model, self._wanted.measure)
            LOGGER.info("the loop's steps end with several optimizers: recording them as one")
        if self._cycle.is_too_long:
            self._warn(
                "too long",
                "too many steps of this loop's optimizers belong together to be planned for as one: the plan is for "
                "those that were recorded, and others may take more than the budget. Leave headroom=.",
            )

    def _record(self, args: Any, kwargs: Any) -> None:
        """Record the step that begins."""
        if self._recording.begin(args, kwargs, self._optimizers.states()):
            self._was_saved = False
            self._trained = trained_in(self._model)
            self._across.ask()

    def _record_again(self, is_new: bool = False) -> bool:
        """Let the next step be recorded, unless that was done too often.

        Args:
            is_new: the recordings until now do not count.
        """
        if is_new:
            self._recording.count = 0
        if not self._recording.may_begin_again:
            return False
        self._take_plan_off()
        self._recording.forget()
        self._optimizers.hold(False)
        self._provisional = None
        return True

    def _settle(self, args: Any, kwargs: Any) -> None:
        """Plan for the recorded step, now that the next one begins."""
        if self._recording.began_otherwise and self._record_again():
            return
        profile = self._counted()
        kept, self._kept = self._kept, None
        if kept is not None and needs_no_more(profile, kept.record.profile):
            self._put_plan_on(kept, "no more modules were called, with no more; kept the plan of")
            return
        try:
            plan = self._wanted.plan(self._given, profile)
        except AutoacError:
            self.remove()
            raise
        self._take(plan, args, kwargs)

    def _counted(self) -> Profile:
        """The recorded step with its optimizers; it is kept no longer."""
        profile = self._optimizers.counted(self._recording.taken())
        self._optimizers.hold(False)
        self._provisional = None
        self._watch.uncounted = False
        return profile

    def _take(self, plan: Plan, args: Any, kwargs: Any, save: bool = True) -> None:
        """Put a new plan on."""
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        if save and self._wanted.path is not None:
            plan.save(self._wanted.path)
        self._put_plan_on(plan, "planned")

    def _take_up_saved(self, args: Any, kwargs: Any) -> None:
        """Put on the plan that an earlier run saved, if there is one for this model."""
        plan = None if self._recording.count else self._wanted.saved(self._model)
        if plan is not None:
            self._take_up(plan, args, kwargs)

    def _take_up(self, plan: Plan, args: Any, kwargs: Any) -> None:
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        self._was_saved = True  # with the optimizers that stepped then
        self._put_plan_on(plan, f"took up {self._wanted.path}:")

    def _meet(self, args: Any, kwargs: Any) -> None:
        """Settle with the other ranks on a plan; see NOTE [ One loop on several ranks ]."""
        try:
            with self._across.meeting() as meeting:
                self._settle_with(meeting, args, kwargs)
        except BaseException:
            self.remove()
            raise

    def _settle_with(self, meeting: Meeting, args: Any, kwargs: Any) -> None:
        recording = self._recording
        if meeting.any(recording.is_on):  # two calls before a backward, say
            self._across.ask()
            return
        recorded = recording.profile is not None
        if meeting.any(recorded and recording.began_otherwise and recording.may_begin_again):
            self._record_again(is_new=not recording.may_begin_again)
            return
        profile, saved, at_hand = None, None, self._plan or self._kept
        self._kept = None
        if recorded:
            profile = self._counted()
            if at_hand is not None and needs_no_more(profile, at_hand.record.profile):
                profile = None
        elif at_hand is None and meeting.is_first and not recording.count:
            saved = at_hand = self._wanted.saved(self._model)
        plan = meeting.one_plan(profile, at_hand, lambda step: self._wanted.plan(self._given, step))
        if plan is None:
            return
        self._take_plan_off()
        if meeting.any(saved is not None):
            self._take_up(plan, args, kwargs)
        else:
            self._take(plan, args, kwargs, save=meeting.is_first)

    def _put_plan_on(self, plan: Plan, verb: str) -> None:
        with self._on_top.aside():
            plan.apply(self._given)
        self._watch.put_on(plan)
        self._trained = trained_in(self._model)
        self._plan = plan
        LOGGER.info("%s", in_a_line(verb, plan))

    def _take_plan_off(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            self._watch.take_off()
            with self._on_top.aside():
                plan.remove(self._given)

    def _verify(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Check on this batch that gradients are equal.

        Raises:
            AutoacError: they are not; the model is left without a plan.
        """
        with self._on_top.aside():
            self.report = verified(plan, self._model, args, kwargs)
        if not self.report.equal:
            self.remove()
            raise AutoacError(f"the plan does not give the same gradients, so it is not used:\n{self.report}")

    def _look_at(self, args: Any, kwargs: Any, begins: bool) -> None:
        """A call under the plan: record anew or warn if the plan was not made for it."""
        found = self._watch.found(args, kwargs, begins, self._recording)
        if found is not None:
            self._act_on(found)
        if begins and self._plan is not None:
            if not self._cycle.is_one:
                restart_calls(self._model)
            self._peak.begin()

    def _act_on(self, found: Finding) -> None:
        plan = self._plan
        self._recording.count -= found.is_free
        if found.log and self._record_again(found.is_new):
            LOGGER.info("%s", found.log)
            self._kept = plan if found.plan_may_stay else self._kept
        elif found.warning:
            self._warn(found.key, found.warning)

    def _tell_peak(self, above_start_bytes: int | None) -> None:
        if above_start_bytes is not None and self._plan is not None:
            self.measured_peak_bytes = self._plan.resident_bytes + above_start_bytes
            LOGGER.info("%s", peak_in_a_line(self._plan, self.measured_peak_bytes))


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
