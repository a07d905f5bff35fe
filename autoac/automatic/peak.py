"""The measured peak of steps under a plan."""

from __future__ import annotations

import contextlib
import weakref

import torch

from autoac.device import device_for
from autoac.measure import Taken, measuring
from autoac.step.model import device_of
from autoac.torch_private import is_profiled

_MOST_BETWEEN = 64
"""Where steps are measured again and again, at most so many are not measured between two that are."""


class StepPeak:
    """Measures one step of the loop: from the call that begins it until after the optimizer's step.

    Args:
        model: without wrappers.
        wanted: whether anything is to be measured.
        skipped: steps that are not measured before.
        again: measure later steps, too: the second, the fourth and so on.
    """

    def __init__(self, model: torch.nn.Module, wanted: bool, skipped: int = 0, again: bool = False):
        self._model = model
        self._is_wanted = wanted
        self._skipped = skipped
        self._between = 0 if wanted and again else None  # steps between the last measured one and the next
        self._running: tuple[contextlib.ExitStack, Taken] | None = None

    def want(self) -> None:
        """Measure a step, also if one was measured before."""
        self._is_wanted = True

    def begin(self) -> None:
        """Start measuring, if that was not done before and is possible."""
        if self._skipped:
            self._skipped -= 1
            return
        wanted, self._is_wanted = self._is_wanted, False
        device = device_of(self._model)
        if not wanted or is_profiled() or device_for(device).not_measurable():
            return
        stack = contextlib.ExitStack()
        weakref.finalize(self, stack.close)  # torch's profiler must not run when the process ends
        self._running = stack, stack.enter_context(measuring(device))

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
        stack, taken = running
        stack.close()
        if self._between is not None:
            self._is_wanted, self._skipped = True, self._between
            self._between = min(2 * self._between + 1, _MOST_BETWEEN)
        return taken.peak_above_start_bytes
