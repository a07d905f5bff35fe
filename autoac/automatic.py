"""One line in a loop: the first training step is recorded as it runs, and the next ones run under a plan.

NOTE [ The loop's steps ]
  1. Nothing is run for the plan. The loop's own first step is recorded (see `autoac.record.live`), with its batch,
     autocast, loss, micro-batches, gradient scaling and clipping.
  2. A step ends just before an optimizer steps that has a parameter of the model; with a closure, after the closure's
     first run. If no torch optimizer is seen, it ends before the first write to a parameter after backward, or before
     the next call of the model that finds no gradients although backward had left some. So a loop that only
     accumulates, and neither steps nor clears gradients, has no second step.
  3. The plan is made when the next step begins. Only then we know which tensors of the step before the loop still
     holds (its output, its loss), and whether there are gradients when a step begins. If the recorded step differs in
     that, as where `zero_grad` comes after forward, the next step is recorded instead.
  4. Only calls of the model in train mode and with gradients on count.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autoac.api import checked, plan_recorded
from autoac.check.verify import verify as run_verify
from autoac.device import device_for
from autoac.execute.larger_inputs import LargerInputs, unwatch_inputs
from autoac.execute.newcomers import outermost, unwatch_newcomers, watch_newcomers
from autoac.execute.on_top import OnTop, has_owner
from autoac.measure import Taken, measuring
from autoac.plans import Plan
from autoac.policies import Policies, as_policies, listed
from autoac.progress import LOGGER
from autoac.record.live import LiveStep, with_leftovers
from autoac.record.optimizer import state_tensors, with_optimizer
from autoac.step.inputs import elements_in
from autoac.step.model import (
    check_model,
    device_bytes,
    device_of,
    has_gradients,
    model_fingerprint,
    unwrapped,
)
from autoac.step.modules import RegionChoice
from autoac.step.optimizer import real_optimizer
from autoac.step.step import TrainingStep, default_loss
from autoac.torch_private import compiled_attribute, in_backward, is_profiled
from autoac_solver.plan.planning import limits
from autoac_solver.records.engines import COMPILE, EngineName
from autoac_solver.records.errors import AutoacError, ProfilingError
from autoac_solver.records.files import check_writable
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import NEVER, Profile, Storage

ON_LARGER = ("warn", "replan", "error")

_MOST_UNPLANNED = 3
"""So many steps without a plan are said to be too many: the first may have been skipped, as gradient scaling does."""

_MOST_RECORDINGS = 3
"""At most this many steps are recorded for a loop whose later steps differ from the recorded one."""


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
) -> Auto:
    """Let a training loop run under a budget: its first step is recorded as it trains, then a plan is put on the model.

    Nothing runs until the loop's first training step, and nothing runs twice: gradients, weights and random states are
    to the bit those of a loop without this line. The first step runs with everything recomputed, which takes the least
    memory, and is slower, for its ops are timed. The logger "autoac" gets one line about the plan.

    A step is taken to begin with the model's first call in train mode and with gradients on, and to end before an
    optimizer with a parameter of the model steps; see NOTE [ The loop's steps ] for loops without one.

    Args:
        model: the model as the loop calls it.
        budget, regions, policies, engine, headroom: as for `autoac.plan`.
        optimizer: the one that trains the model; left out, it is found when it steps. Wrappers of Trainer, accelerate
            and Lightning are looked through.
        on_larger: what to do when the model is called with more elements than were planned for: "warn" once, "replan"
            (record that step, then plan for it), or raise an "error" before it runs.
        verify: run `Plan.verify` on the second step's batch before the plan is put on the model, and measure the peak
            of the first planned step; see `Auto.report` and `Auto.measured_peak_bytes`.
        path: the plan's file. The plan is saved there; a plan that is there already is used without recording a step if
            it was made for this model, kind of device, budget and engine.
        measure: measure the peak of the first planned step.

    Returns:
        The handle: `.plan`, None before the first step, and `.remove()`.

    Raises:
        ProfilingError: the model cannot be planned, or the optimizer is not its own.
        ValueError: an argument makes no sense.
        OSError: no file can be written at the path.

        The loop's second step raises InfeasibleBudgetError if no plan fits; the model is without a plan then.
    """
    if on_larger not in ON_LARGER:
        raise ValueError(f"on_larger is {on_larger!r}; possible are {', '.join(map(repr, ON_LARGER))}.")
    policies = listed(policies)
    check_model(unwrapped(model))
    if has_owner(model):
        raise ProfilingError(
            "autoac.auto (or a plan for each bucket) is on this model already: call remove() on its handle first."
        )
    if engine == COMPILE:
        raise ValueError(
            "autoac.auto records the loop's own step, and compiles nothing by itself. Plan before the loop instead: "
            "autoac.plan(model, sample, budget, engine='compile').apply(model)."
        )
    names = checked(model, budget, regions, policies, engine, headroom)
    if path is not None:
        check_writable(path)
    real = None if optimizer is None else real_optimizer(optimizer, unwrapped(model))
    wanted = _Wanted(budget, names, tuple(policies), engine, headroom, on_larger, verify, measure or verify)
    return Auto(model, wanted, real, None if path is None else Path(path))


@dataclass(frozen=True)
class _Wanted:
    """The arguments of `auto`; `names` are those of the modules chosen as regions."""

    budget: int | str
    names: list[str] | None
    policies: tuple[Any, ...]
    engine: str
    headroom: int | str
    on_larger: str
    verify: bool
    measure: bool


class Auto:
    """The handle of `autoac.auto`.

    Attributes:
        report: what `Plan.verify` found, None where it was not wanted or has not run yet.
        measured_peak_bytes: peak of the first planned step, with the optimizer's step and resident bytes; None until it
            is over, or where it was not to be measured.
    """

    def __init__(self, model: torch.nn.Module, wanted: _Wanted, optimizer: Any, path: Path | None):
        self.report: Any = None
        self.measured_peak_bytes: int | None = None
        self._given = model
        self._model = unwrapped(model)
        self._wanted = wanted
        self._optimizers: list[Any] = [] if optimizer is None else [optimizer]
        self._path = path
        self._live: LiveStep | None = None
        self._profile: Profile | None = None  # of a recorded step that has no plan yet
        self._survivors: dict[int, Any] = {}
        self._workspaces: dict[Any, int] = {}
        self._provisional: Plan | None = None
        self._plan: Plan | None = None
        self._recordings = 0
        self._had_gradients = False  # whether there were any when the recorded step began
        self._stepped = True  # whether an optimizer has, since the model was last called
        self._running = False
        self._larger: LargerInputs | None = None
        self._newcomers: set[str] = (
            set()
        )  # modules that planned steps have called, and the recorded one had not
        self._was_saved = False
        self._uncounted = False  # an optimizer stepped for the first time under the plan
        self._larger_later = False  # a later call of a planned step was larger
        self._unplanned_steps = (
            0  # of an optimizer of the model, while nothing is recorded and there is no plan
        )
        self._one_call = False  # the plan's step calls the model once, and begins without gradients
        self._trained = ""  # which parameters were trained in the recorded step
        self._kept: Plan | None = None  # stays if the next recorded step calls no more modules
        self._warned: set[str] = set()
        self._measurement: tuple[contextlib.ExitStack, Taken] | None = None
        self._measured = not wanted.measure
        before, after = weakref.WeakMethod(self._before_step), weakref.WeakMethod(self._after_step)
        self._hooks = [
            register_optimizer_step_pre_hook(lambda *a: f(*a) if (f := before()) else None),
            register_optimizer_step_post_hook(lambda *a: f(*a) if (f := after()) else None),
        ]
        weakref.finalize(self, _remove, self._hooks)
        self._on_top = OnTop(model, self)
        self._on_top.put_on()

    # For the user.

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first step is over.

        Between the first step and the second it is provisional: the plan for the first step as it was recorded.
        """
        if self._plan is None and self._profile is not None and self._provisional is None:
            self._provisional = self._planned(self._counted(self._profile))
        return self._plan or self._provisional

    @property
    def known_plan(self) -> Plan | None:
        """The plan if one has been made; asking for it makes none."""
        return self._plan or self._provisional

    def remove(self) -> None:
        """Take the plan and this handle's hooks off the model, which is then as it was before."""
        self._give_up()
        self._end_measurement(keep=False)
        self._take_plan_off()
        self._on_top.take_off()
        _remove(self._hooks)

    def __repr__(self) -> str:
        return f"Auto({type(self._model).__name__}, {self._plan or self._state()})"

    def _state(self) -> str:
        return "waiting for the first training step" if self._live is None else "recording a step"

    # The loop's events.

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model is called."""
        counts = self._model.training and torch.is_grad_enabled() and not in_backward() and not self._running
        if not counts:  # evaluation, a second run of its code in backward, or a call inside of another one
            return self._on_top.run(args, kwargs)
        self.begins(args, kwargs)
        self._running = True
        try:
            return self._on_top.run(args, kwargs)
        except BaseException:
            self._give_up()
            self._end_measurement(keep=False)
            raise
        finally:
            self._running = False

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the training step begins; for trainers that do not call the model itself.

        Args:
            args, kwargs: of the call; the batch is in them.
        """
        if self._live is not None and self._is_over():
            self._end_record()
        if self._live is not None:
            return
        begins = self._stepped or not self._gradients()
        self._stepped = False
        if begins and self._trained != self._trains_now() and (self._profile or self._plan):
            LOGGER.info("other parameters are trained than in the recorded step: recording this step")
            self._recordings = 0
            self._record_again()
        if self._profile is not None and begins:
            self._settle(args, kwargs)
        if self._plan is None and self._profile is None and begins:
            self._take_up_saved(args, kwargs)
        if self._plan is not None:
            self._check_planned(args, kwargs, begins)
        if self._plan is None and self._profile is None and begins:
            self._begin_record(args, kwargs)

    def _is_over(self) -> bool:
        tape = self._live.tape  # type: ignore[union-attr]
        if tape.is_given_up:
            self._give_up()
            return False
        return tape.is_over or (tape.went_backward and not self._gradients())

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """An optimizer is about to step."""
        if not self._trains(optimizer):
            return None
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
            self._uncounted = self._plan is not None and not self._was_saved
        self._tell_if_nothing_is_planned()
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._then_over(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:  # the first is the optimizer itself
            return (args[0], self._then_over(args[1]), *args[2:]), kwargs
        if not in_backward():  # else it steps parameter by parameter while backward runs
            self._step_is_over()
        return None

    def _tell_if_nothing_is_planned(self) -> None:
        """Warn if the model is trained, and its calls were not seen, or no backward from them."""
        seen = self._plan is not None or self._profile is not None
        if seen or (self._live is not None and self._live.tape.went_backward):
            return
        self._unplanned_steps += 1
        if self._unplanned_steps < _MOST_UNPLANNED:
            return
        if self._live is None and not self._recordings:
            why = (
                "it was not called in train mode and with gradients on since (compiled later, or by its parts?): call "
                "autoac.auto for the module that the loop calls, after torch.compile"
            )
        else:
            why = "no backward from its calls was seen (in another thread, or a reentrant checkpoint around it?)"
        self._say(
            "nothing planned",
            f"autoac.auto has no plan for {type(self._model).__name__}, which is trained: {why}.",
        )

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if self._measurement is not None and self._trains(optimizer) and not in_backward():
            self._end_measurement(keep=True)

    def _then_over(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = closure()
            self._step_is_over()
            return result

        return run

    def _step_is_over(self) -> None:
        if self._live is not None and self._live.tape.went_backward:
            self._end_record()
        self._stepped = True

    def _trains(self, optimizer: Any) -> bool:
        own = {id(p) for p in self._model.parameters()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def _gradients(self) -> bool:
        return has_gradients(self._model)

    def _trains_now(self) -> str:
        """Tells these parameters, and which of them require gradients, from others; quickly."""
        parameters = list(self._model.parameters())
        trained = [p.requires_grad for p in parameters]
        return f"{len(trained)} {hash((*trained, *(p.dtype for p in parameters)))}"

    # -- recording ---------------------------------------------------------------------------------------------

    def _begin_record(self, args: Any, kwargs: Any) -> None:
        device = device_of(self._model)
        live = LiveStep(
            self._model, lean_losses=compiled_attribute(self._given) is None, known=self._workspaces
        )
        states = [state for optimizer in self._optimizers for state in state_tensors(optimizer, device.type)]
        with self._on_top.aside():
            try:
                live.begin((args, kwargs), states)
            except ProfilingError as error:
                self._say("cannot record", f"autoac: no plan yet. {error}")
                return
        self._was_saved = False
        self._live = live
        self._trained = self._trains_now()
        self._recordings += 1
        self._had_gradients = self._gradients()

    def _end_record(self) -> None:
        live = self._live
        assert live is not None
        if not live.can_end:
            self._say("cannot end", "autoac: the step cannot be recorded: a mode or hooks were put on in it.")
            live.tape.clock.suspended += 1
            return
        self._live = None
        with self._on_top.aside():
            profile = live.finish()
        if not self._model.training:
            profile = _noted(profile, "the model was put in eval mode in the step")
        self._profile, self._survivors, self._workspaces = profile, live.survivors, live.workspaces

    def _give_up(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with self._on_top.aside():
                live.give_up()

    def _record_again(self) -> bool:
        """Let the next step be recorded, unless that was done too often."""
        if self._recordings >= _MOST_RECORDINGS:
            return False
        self._take_plan_off()
        self._profile = self._provisional = None
        self._survivors = {}
        return True

    # -- planning ----------------------------------------------------------------------------------------------

    def _settle(self, args: Any, kwargs: Any) -> None:
        """Plan for the recorded step, now that the next one begins."""
        assert self._profile is not None
        if self._gradients() != self._had_gradients and self._record_again():
            return
        profile = self._counted(with_leftovers(self._profile, self._survivors))
        self._profile, self._provisional, self._survivors = None, None, {}
        self._uncounted = False
        kept, self._kept = self._kept, None
        if kept is not None and _needs_no_more(profile, kept.record.profile):
            self._put_plan_on(kept, "no more modules were called, with no more; kept the plan of")
            return
        try:
            plan = self._planned(profile)
        except AutoacError:
            self.remove()
            raise
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        if self._path is not None:
            plan.save(self._path)
        self._put_plan_on(plan, "planned")

    def _planned(self, profile: Profile) -> Plan:
        wanted = self._wanted
        return plan_recorded(
            self._given,
            profile,
            wanted.budget,
            names=wanted.names,
            policies=wanted.policies,
            engine=wanted.engine,
            headroom=wanted.headroom,
        )

    def _counted(self, profile: Profile) -> Profile:
        """The profile with the optimizers' states, and with the memory that their steps take."""
        for optimizer in self._optimizers:
            try:
                profile = with_optimizer(profile, self._model, optimizer, measure=not is_profiled())
            except ProfilingError as error:
                self._say(
                    "only its state", f"of the optimizer only its state is counted, as it is now: {error}"
                )
                tensors = state_tensors(optimizer, device_of(self._model).type)
                size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
                state = Storage(size, NEVER, profile.end, "Optstate", type(optimizer).__name__)
                noted = _noted(profile, f"of the optimizer only its state is counted, as it is now: {error}")
                profile = _with_storage(noted, state)
        return profile

    def _put_plan_on(self, plan: Plan, verb: str) -> None:
        with self._on_top.aside():
            plan.apply(self._given)
            unwatch_inputs(self._model)  # we look ourselves
        profile = plan.record.profile
        self._newcomers = watch_newcomers(self._model, _called(profile))
        self._one_call = profile.is_one_call
        self._trained = self._trains_now()
        self._plan = plan
        self._larger = LargerInputs(profile.sample, plan.budget_bytes)
        LOGGER.info("%s", _in_a_line(verb, plan))

    def _take_plan_off(self) -> None:
        plan, self._plan = self._plan, None
        if plan is not None:
            unwatch_newcomers(self._model)
            with self._on_top.aside():
                plan.remove(self._given)

    def _take_up_saved(self, args: Any, kwargs: Any) -> None:
        """Put on the plan that an earlier run saved, if it is for this model, device, budget and engine."""
        if self._path is None or not self._path.exists() or self._recordings:
            return
        plan = Plan.load(self._path)
        if not self._is_wanted(plan):
            LOGGER.warning(
                "the plan in %s is for another model, device, budget, engine, regions or policies: planning anew, and "
                "the new plan will replace it there",
                self._path,
            )
            return
        if self._wanted.verify:
            self._verify(plan, args, kwargs)
        self._was_saved = True  # with the optimizers that stepped then
        self._put_plan_on(plan, f"took up {self._path}:")

    def _is_wanted(self, plan: Plan) -> bool:
        """Whether a plan is for this model and the arguments of `auto`."""
        wanted, record = self._wanted, plan.record
        device = device_of(self._model)
        names = None if wanted.names is None else _called(record.profile) & set(wanted.names)
        return (
            record.model_fingerprint == model_fingerprint(self._model)
            and record.device.split(":")[0] == device.type
            and (record.budget_bytes, record.headroom_bytes)
            == limits(wanted.budget, wanted.headroom, device_bytes(device) or None)
            and wanted.engine in ("auto", plan.engine)
            and (names is None or names == {region.fqn for region in plan.regions})
            and as_policies(wanted.policies, record.profile)
            == tuple(applied.policy for applied in record.policies)
        )

    def _verify(self, plan: Plan, args: Any, kwargs: Any) -> None:
        """Check on this batch, with the output's loss, that gradients are equal.

        Raises:
            AutoacError: they are not; the model is left without a plan.
        """

        def step() -> torch.Tensor:
            loss = default_loss(self._model(*args, **kwargs))
            loss.backward()
            return loss

        sample: Any = step
        if not kwargs or not args:
            sample = args or kwargs
        with self._on_top.aside():
            # The profile already counts the output for as long as the loop keeps it; this step need not keep it.
            self.report = run_verify(plan, TrainingStep(self._model, sample, keeps_output=False))
        if not self.report.equal:
            self.remove()
            raise AutoacError(f"the plan does not give the same gradients, so it is not used:\n{self.report}")

    # -- planned steps -----------------------------------------------------------------------------------------

    def _check_planned(self, args: Any, kwargs: Any, begins: bool) -> None:
        assert self._plan is not None
        assert self._larger is not None
        if begins and self._larger.is_other_autocast():
            if self._record_again():
                LOGGER.info("%s: recording this step anew", self._larger.words_on_autocast())
            else:
                self._say("autocast", self._larger.words_on_autocast())
        elif self._larger.are(args, kwargs):
            self._meets_larger(args, kwargs, begins)
        elif begins and self._plan.is_not_followed and self._record_again():
            LOGGER.info("the plan was not followed: recording the next step anew")
        elif begins and self._newcomers:
            self._meets_newcomers(self._plan)
        elif begins and self._uncounted:
            self._meets_optimizer()
        elif begins and self._larger_later:
            self._larger_later, plan = False, self._plan
            LOGGER.info("a later micro-batch of a step was larger than planned for: recording this step")
            self._recordings = 0
            self._record_again()
            self._kept = plan
        elif not begins and self._one_call:
            self._meets_gradients()
        if begins and self._plan is not None and not self._measured:
            self._begin_measurement()

    def _meets_larger(self, args: Any, kwargs: Any, begins: bool) -> None:
        assert self._larger is not None
        words = self._larger.words(args, kwargs)
        if self._wanted.on_larger == "error":
            raise ValueError(f"{words}, or use on_larger='replan'. Nothing was run.")
        if self._wanted.on_larger == "warn":
            self._say("larger", f"{words}, or use on_larger='replan'.")
        elif begins:
            LOGGER.info("%s: recording this step to plan anew", words)
            self._recordings = 0
            self._record_again()
        else:  # in the middle of a step, where no record can begin
            self._larger_later = True
            self._say("larger later", f"{words}: the next step is recorded for that.")

    def _meets_newcomers(self, plan: Plan) -> None:
        """The step before called modules that the recorded step did not call, as with layer drop."""
        names = outermost(self._newcomers)
        words = ", ".join(map(repr, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        self._newcomers.clear()
        if self._record_again():
            LOGGER.info(
                "the step before called %s, which the recorded one had not: recording this step", words
            )
            self._kept = plan
            return
        self._say(
            "newcomers",
            f"the steps of this loop vary: {words} were called, and in none of {self._recordings} recorded steps with "
            "the others. Their memory is not planned for, so a step may take more than the budget: plan beforehand "
            "with autoac.plan, which plans for a step that calls all modules.",
        )

    def _meets_optimizer(self) -> None:
        """An optimizer has stepped for the first time under the plan, which does not count its state."""
        self._uncounted = False
        if self._record_again():
            LOGGER.info("an optimizer stepped for the first time: recording this step to count it")
            return
        self._say(
            "uncounted",
            "an optimizer stepped for the first time under the plan, which does not count its state and its step: this "
            "loop may take more than the budget. Pass it as optimizer= to autoac.auto.",
        )

    def _meets_gradients(self) -> None:
        """The model is called again in a step, and the recorded step called it once."""
        if self._gradients():
            self._say(
                "micro-batches",
                "the model is called again before its gradients are cleared, and the recorded step called it once: "
                "these gradients are not planned for, and this step may take more than the budget. Let the first step "
                "have as many micro-batches as any other.",
            )

    def _begin_measurement(self) -> None:
        self._measured = True
        if is_profiled() or device_for(device_of(self._model)).not_measurable():
            return
        stack = contextlib.ExitStack()
        self._measurement = stack, stack.enter_context(measuring(device_of(self._model)))

    def _end_measurement(self, keep: bool) -> None:
        measurement, self._measurement = self._measurement, None
        if measurement is None:
            return
        stack, taken = measurement
        stack.close()
        if keep and self._plan is not None:
            self.measured_peak_bytes = self._plan.resident_bytes + taken.peak_above_start_bytes
            LOGGER.info(
                "measured peak %s, predicted %s, budget %s",
                format_bytes(self.measured_peak_bytes),
                format_bytes(self._plan.predicted_peak_bytes),
                format_bytes(self._plan.budget_bytes),
            )

    def _say(self, key: str, words: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(words, stacklevel=2)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _noted(profile: Profile, note: str) -> Profile:
    return replace(profile, notes=(*profile.notes, note))


def _with_storage(profile: Profile, storage: Storage) -> Profile:
    return replace(profile, storage_table=(*profile.storage_table, storage))


def _needs_no_more(profile: Profile, other: Profile) -> bool:
    """Whether a step called no more modules than another one, with no more elements."""
    fewer = len(_called(profile)) <= len(_called(other))
    return fewer and elements_in(profile.sample) <= elements_in(other.sample)


def _called(profile: Profile) -> set[str]:
    """The modules that the recorded step called with gradients on."""
    return {call.fqn for call in profile.calls if call.grad}


def _in_a_line(verb: str, plan: Plan) -> str:
    wrapped = sum(region.wrapped for region in plan.regions)
    return (
        f"{verb} {plan.record.model} for {plan.record.profile.sample or 'its inputs'}: peak "
        f"{format_bytes(plan.predicted_peak_bytes)} of a budget of {format_bytes(plan.budget_bytes)} (with nothing "
        f"recomputed {format_bytes(plan.record.unplanned_peak_bytes)}), {wrapped} of {len(plan.regions)} regions "
        f"recompute, step time {plan.predicted_overhead:+.1%}"
    )
