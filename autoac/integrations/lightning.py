"""`AutoACCallback` for Lightning's `Trainer`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from autoac.integrations.options import Planned
from autoac.plans import Plan


class AutoACCallback(Callback):
    """Trains under a memory budget: `Trainer(..., callbacks=[AutoACCallback(budget="20GB")])`.

    The first steps are recorded as they run (the second differs from the first: Lightning clears gradients after
    forward), and the next ones run under the plan, which is taken off when training ends. Predicted and measured peak
    go to the trainer's loggers as `autoac/...`.

    Args:
        budget and the others: as for `autoac.auto`.
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

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start `autoac.auto` after strategy and precision are set up; it waits for the first step."""
        self._planned.start(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Announce the forward: `training_step` need not call the module itself."""
        if self._planned.handle is not None:
            self._planned.handle.begins((batch,), {})

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
