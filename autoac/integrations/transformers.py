"""`AutoACCallback` for transformers' `Trainer` and its subclasses, such as TRL's `SFTTrainer`."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from autoac.integrations.planned import Planned, take_off_leftovers
from autoac.plans import Plan
from autoac.torch_private import is_compiled_wrapper


class AutoACCallback(TrainerCallback):
    """Trains under a memory budget: `Trainer(..., callbacks=[AutoACCallback(budget="20GB")])`.

    The trainer's own first step is recorded as it runs, with its loss, autocast, accumulation and clipping, and the
    next ones run under the plan. The trainer's gradient or activation checkpointing is turned off, and that is logged.
    Predicted and measured peak go to the trainer's loggers as `autoac/...`. The plan is taken off when training ends.

    Args:
        budget and the others: as for `autoac.auto`, but peaks are measured unless `measure=False`.
    """

    def __init__(self, budget: int | str, **options: Any):
        self._planned = Planned(budget, **options)
        self._trainer: Any = None

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first step is over."""
        return self._planned.plan

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak of the first step under the plan, resident bytes included; None before."""
        return self._planned.measured_peak_bytes

    def remove(self) -> None:
        """Take the plan off the model, where training has not come to its end (an exception, an interrupt)."""
        self._planned.stop()

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module | None = None, **_: Any
    ) -> None:
        """Take off what an interrupted run has left: the trainer reads the signature of the model's forward."""
        if model is not None:
            take_off_leftovers(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: torch.nn.Module | None = None, **_: Any
    ) -> None:
        """Start `autoac.auto`, once checkpointing, mixed precision and wrappers are set up."""
        assert model is not None
        self._trainer = _calling_trainer()
        # The trainer calls the model's wrapper; compiled code ignores a forward put on the model inside.
        wrapper = getattr(self._trainer, "model_wrapped", model)
        self._planned.start(wrapper if is_compiled_wrapper(wrapper) else model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the peaks once for each plan, after its first step."""
        if self._trainer is None or not (news := self._planned.news()):
            return
        # Logging clears this flag, and with it the trainer's own log of this step.
        should_log = control.should_log
        # Not the trainer's own `log`: TRL's also ends the window over which it averages its metrics.
        Trainer.log(self._trainer, dict(news))
        control.should_log = should_log

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the model as it was."""
        self._planned.stop()
        self._trainer = None


def _calling_trainer() -> Any:
    """The trainer whose `train` is running, None if there is none; callbacks do not get it."""
    frame = sys._getframe(1)
    while frame is not None:
        # Other frames are not looked into: up to Python 3.12, that holds their tensors for longer.
        if frame.f_globals.get("__name__") == Trainer.__module__:
            found = frame.f_locals.get("self")
            if isinstance(found, Trainer):
                return found
        frame = frame.f_back
    return None
