"""`AutoACCallback` for Lightning's `Trainer`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback

from autoac.integrations.planned import Planned
from autoac.plans import Plan


class AutoACCallback(Callback):
    """Trains under a memory budget: `Trainer(..., callbacks=[AutoACCallback(budget="20GB")])`.

    The first steps are recorded as they run (the second differs from the first: Lightning clears gradients after
    forward), and the next ones run under the plan, which is taken off when training ends. Predicted and measured peak
    go to the trainer's loggers as `autoac/...`.

    Args:
        budget and the others: as for `autoac.auto`, but peaks are measured unless `measure=False`.
    """

    def __init__(self, budget: int | str, **options: Any):
        super().__init__()
        self._planned = Planned(budget, **options)

    @property
    def plan(self) -> Plan | None:
        """The plan; None before the first step is over."""
        return self._planned.plan

    @property
    def measured_peak_bytes(self) -> int | None:
        """Measured peak of the first planned step, resident bytes included; None before."""
        return self._planned.measured_peak_bytes

    def remove(self) -> None:
        """Take the plan off the model, where training has not come to its end (an exception, an interrupt)."""
        self._planned.stop()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start `autoac.auto` after strategy and precision are set up; it waits for the first step.

        Raises:
            ValueError: `verify` is asked for, and the module optimizes itself.
        """
        if self._planned.options["verify"] and not pl_module.automatic_optimization:
            raise ValueError(
                "verify=True runs training_step several times, and this module's steps its optimizers "
                "(automatic_optimization is False): leave verify out."
            )
        self._planned.start(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Announce the forward: `training_step` need not call the module itself."""
        if self._planned.handle is not None:
            self._planned.handle.trial = functools.partial(_step, trainer, pl_module, batch, batch_idx)
            self._planned.handle.begins((batch,), {})
            self._planned.handle.trial = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the peaks once for each plan, after its first step."""
        if news := self._planned.news():
            # Not the module's `log`: it follows the trainer's intervals, and adds to its metrics.
            for logger in trainer.loggers:
                logger.log_metrics(news, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the module as it was."""
        self._planned.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._planned.stop()


def _step(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    """A step as the trainer would run it, without its optimizer, and without what it logs."""
    attributes = vars(pl_module)
    before = attributes.get("log")
    attributes["log"] = _not_logged
    try:
        with trainer.precision_plugin.train_step_context():
            result = pl_module.training_step(batch, batch_idx)
    finally:
        del attributes["log"]
        if before is not None:
            attributes["log"] = before
    loss = result["loss"] if isinstance(result, Mapping) else result
    loss.backward()
    return loss


def _not_logged(*args: Any, **kwargs: Any) -> None:
    """Stands for `LightningModule.log`."""
