"""Record a step beside the loop's, in which all modules are called that random numbers may leave out.

NOTE [ Layer drop in a loop ]
  1. The loop's own steps are what is recorded, and random numbers drawn one at a time (layer drop) decide which modules
     they call. The numbers cannot be chosen there: training would be another.
  2. So where the recorded step drew such numbers and left out a module whose siblings of the same class it called, a
     step on the next batch is run beside the loop's, and undone: as `autoac.profile` runs it, with the largest numbers.
     Its loss is the output's own, or its mean.
  3. What the loop holds during its step is in the recorded step only. What that has more of at its start is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoac.api.profiling import profile
from autoac.automatic.wanted import called_in
from autoac.progress import LOGGER
from autoac.record.live import ONE_DRAW
from autoac.step.inputs import elements_in, elements_of
from autoac.step.step import default_loss
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import NEVER, Profile, Storage


def sample_of(
    model: torch.nn.Module, args: Any, kwargs: Any, trial: Callable[[], torch.Tensor] | None = None
) -> Any:
    """A sample that is a step on this batch, with the output's loss.

    Args:
        model: without wrappers, and without our forward.
        args, kwargs: arguments of the model's call.
        trial: runs a step on the batch, forward to backward, where a trainer does not call the model itself.
    """
    if trial is not None:
        return trial

    def step() -> torch.Tensor:
        loss = default_loss(model(*args, **kwargs))
        loss.backward()
        return loss

    return (args or kwargs) if not (args and kwargs) else step


def left_out(model: torch.nn.Module, called: set[str]) -> list[str]:
    """Modules that a step did not call, and of which siblings of the same class were called."""
    classes = {
        (name.rpartition(".")[0], type(module)) for name, module in model.named_modules() if name in called
    }
    return [
        name
        for name, module in model.named_modules()
        if name and name not in called and (name.rpartition(".")[0], type(module)) in classes
    ]


def with_all_called(
    recorded: Profile,
    model: torch.nn.Module,
    args: Any,
    kwargs: Any,
    trial: Callable[[], torch.Tensor] | None,
    warn: Callable[[str, str], None],
) -> Profile | None:
    """The profile of a step beside the loop's, which calls the modules that the recorded one left out by chance.

    Its optimizers are not counted. None if the recorded step left none out, if it called the model several times, if
    this batch is smaller, or if its step cannot be recorded, which is warned of.

    Args:
        recorded: the loop's step.
        model, args, kwargs, trial: as for `sample_of`, of the batch at hand.
        warn: called with a key and words.
    """
    names = left_out(model, called_in(recorded)) if ONE_DRAW in recorded.notes else []
    if not names or not recorded.is_one_call or elements_of(args, kwargs) < elements_in(recorded.sample):
        return None
    try:
        found = profile(model, sample_of(model, args, kwargs, trial), progress=False)
    except ProfilingError as error:
        warn(
            "left out",
            f"the recorded step called no {', '.join(names[:3])}, as random numbers decide, and a step that does could "
            f"not be recorded beside it ({error}): steps that call more modules may exceed the budget.",
        )
        return None
    LOGGER.info("the recorded step left out %s: planning for one that calls all modules", names[0])
    held = Storage(max(0, _held_bytes(recorded) - _held_bytes(found)), NEVER, found.end, "Input", "")
    return replace(found, storage_table=(*found.storage_table, held))


def _held_bytes(step: Profile) -> int:
    return sum(s.bytes for s in step.storage_table if s.alloc <= 0 and s.kind == "Input")
