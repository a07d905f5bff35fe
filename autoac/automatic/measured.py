"""Measured peaks of a loop's steps, and what follows from those that are not as predicted."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable

import torch

from autoac.automatic.report import may_take_more, peak_in_a_line
from autoac.automatic.wanted import Wanted
from autoac.device import device_for
from autoac.measure import ONE_AT_A_TIME, Taken, measuring
from autoac.parallel.one_plan import kept_bytes
from autoac.plans import Plan
from autoac.progress import LOGGER
from autoac.step.model import device_of, gradient_of
from autoac.torch_private import is_profiled
from autoac_solver.records.engines import compiles
from autoac_solver.records.profile import Profile

_MOST_CORRECTIONS = 3
"""Plans of compiled modules that are made with more room."""

_MOST_BETWEEN = 64
"""Where steps are measured again and again, at most so many are not measured between two that are."""


class StepPeak:
    """Measures one step of the loop: from the call that begins it until after the optimizer's step.

    Args:
        model: without wrappers.
        wanted: whether anything is to be measured.
        skipped: steps that are not measured before.
        again: measure later steps, too: the second, the fourth and so on.
        gradients: the memory before a step has gradients. A first step without any, as in a run that resumes, is not
            measured.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        wanted: bool,
        skipped: int = 0,
        again: bool = False,
        gradients: bool = False,
    ):
        self._model = model
        self._gradients = gradients
        self._measures = self._is_wanted = wanted
        self._skipped = skipped
        self._between = 0 if wanted and again else None  # steps between the last measured one and the next
        self._running: tuple[Callable[[], object], Taken] | None = None

    def want(self) -> None:
        """Measure a step, also if one was measured before."""
        self._is_wanted = True

    def go_on(self) -> None:
        """Measure later steps, too, if any is measured."""
        if self._measures and self._between is None:
            self._is_wanted, self._between = True, 0

    def begin(self) -> None:
        """Start measuring, if that was not done before and is possible."""
        # Those of parameters that are frozen for now are there before the step, too.
        if (
            self._is_wanted
            and self._gradients
            and all(gradient_of(p) is None for p in self._model.parameters())
        ):
            self._gradients = False
            return
        if self._skipped:
            self._skipped -= 1
            return
        wanted, self._is_wanted = self._is_wanted, False
        device = device_of(self._model)
        if not wanted or is_profiled() or device_for(device).not_measurable():
            return
        stack = contextlib.ExitStack()
        if device_for(device).memory_events:
            if (
                turn := ONE_AT_A_TIME.begin(waits=False)
            ) is None:  # another thread's: a later step is measured
                self._is_wanted = True
                return
            stack.callback(turn.end)
        close = weakref.finalize(self, stack.close)  # torch's profiler must not run when the process ends
        self._running = close, stack.enter_context(measuring(device))

    @property
    def is_running(self) -> bool:
        """Whether a step is measured now."""
        return self._running is not None

    def end(self) -> int | None:
        """Stop measuring.

        Returns:
            The peak in bytes above the memory at the start of the step; None if nothing was measured.
        """
        running, self._running = self._running, None
        if running is None:
            return None
        close, taken = running
        close()
        if self._between is not None:
            self._is_wanted, self._skipped = True, self._between
            self._between = min(2 * self._between + 1, _MOST_BETWEEN)
        return taken.peak_above_start_bytes


class Measured:
    """Measured steps under the plans of a loop.

    After a step that exceeded the budget another one is recorded, and the larger of the two is planned for. If that was
    done too often, the next plan leaves room for the difference.

    Under *sac*, modules that the user has compiled stay compiled, and what their code takes is not known before it is
    measured: the plan after a step that exceeded the budget leaves room for the difference.

    Args:
        model: without wrappers.

    Attributes:
        peak_bytes, plan: see `Auto.measured_peak_bytes` and `Auto.measured_plan`.
        step: measures the step that runs.
        exceeded: the plan under which a step took more than the budget, if it is to be planned for again; None if
            there is none, or another plan was made since.
    """

    def __init__(self, model: torch.nn.Module, wanted: Wanted):
        self.peak_bytes: int | None = None
        self.plan: Plan | None = None
        self.step = StepPeak(model, wanted.measure)
        self.exceeded: Plan | None = None
        self._model = model
        self._wanted = wanted
        self._corrections = 0
        self._runs_compiled = False
        self._varies = False  # steps differ in what they call, or one took more than the budget

    def begin(self, plan: Plan, is_first: bool, runs_compiled: bool) -> None:
        """Measure steps under a new plan, if that is wanted, or modules are compiled.

        Args:
            is_first: whether the loop begins with it.
            runs_compiled: whether modules that the user has compiled run under it, in one process.
        """
        self.peak_bytes = self.plan = self.exceeded = None
        self._runs_compiled = runs_compiled
        # In the first step the compiler may run; in the second one of a loop DDP makes its buckets anew.
        skipped = 1 + is_first if compiles(plan.engine) or runs_compiled else 0
        again = self._varies or may_take_more(plan)
        table = plan.record.profile.storage_table
        gradients = any(s.is_gradient_before or (s.kind == "Gradient" and s.alloc == 0) for s in table)
        is_wanted = self._wanted.measure or runs_compiled
        self.step = StepPeak(self._model, is_wanted, skipped, again, gradients)

    def go_on(self, varies: bool = True) -> None:
        """If the loop's steps differ, measure later ones as well, under this plan and those after it."""
        self._varies |= varies
        if varies:
            self.step.go_on()

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

    def note_excess(self, plan: Plan) -> bool:
        """Note that a step under this plan took more than the budget; returns whether a new plan is to be made."""
        if self._wanted.on_larger == "replan" and not self._runs_compiled:
            self.exceeded = plan
            self.go_on()
        return self.exceeded is not None

    def corrected(self, plan: Plan) -> tuple[Profile, Wanted] | None:
        """The profile to plan for and the arguments, after a step of compiled modules took more than the budget."""
        if not self._runs_compiled or self._corrections == _MOST_CORRECTIONS:
            return None
        self._corrections += 1
        self.exceeded = plan
        return self.with_room()

    def larger(self, profile: Profile) -> Profile:
        """This newly recorded step, or the one that was planned for before, if it keeps more."""
        before = None if self.exceeded is None else self.exceeded.record.profile
        return before if before is not None and kept_bytes(before) > kept_bytes(profile) else profile

    def with_room(self) -> tuple[Profile, Wanted]:
        """The profile to plan for and the arguments, if no other step is recorded."""
        plan, self.exceeded = self.exceeded, None
        assert plan is not None
        assert self.peak_bytes is not None
        profile, lacking_bytes = plan.record.profile, self.peak_bytes - plan.predicted_peak_bytes
        return profile, self._wanted.with_room(profile, lacking_bytes)
