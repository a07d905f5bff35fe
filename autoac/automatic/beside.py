"""Record a step beside the loop's, in which all modules are called that random numbers may leave out.

NOTE [ Layer drop in a loop ]
  1. The loop's own steps are what is recorded, and random numbers drawn one at a time (layer drop) decide which modules
     they call. The numbers cannot be chosen there: training would be another.
  2. So where the recorded step drew such numbers and left out a module whose siblings of the same class it called, a
     step on the next batch is run beside the loop's, and undone: as `autoac.profile` runs it, with the largest numbers.
     Its loss is the output's own, or its mean: so only where the loop makes nothing of the output but numbers.
  3. What the loop holds during its step is in the recorded step only. What that has more of at its start is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoac.api.profiling import profile
from autoac.device import device_for
from autoac.progress import LOGGER
from autoac.record.live import ONE_DRAW
from autoac.step.inputs import elements_in, elements_of
from autoac.step.model import device_of
from autoac.step.restore import tensors_of
from autoac.step.step import default_loss
from autoac_solver.records.profile import NEVER, OWN_LOOP, Profile, Storage

_FEW_BYTES = 1024
"""What a loop may make of the model's output: numbers, as a loss divided by the number of micro-batches."""


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

    Its optimizers are not counted. None if the recorded step left none out, or cannot be stood for by a step on the
    output alone; or if that fails, which is warned of.

    Args:
        recorded: the loop's step.
        model, args, kwargs, trial: as for `sample_of`, of the batch at hand.
        warn: called with a key and words.
    """
    names = left_out(model, recorded.called) if ONE_DRAW in recorded.notes else []
    if not names or not _may_stand_for(recorded, args, kwargs):
        return None
    try:
        found = profile(model, sample_of(model, args, kwargs, trial), progress=False)
    except Exception as error:  # the loop's own step has succeeded, and goes on
        device_for(device_of(model)).release_cache()
        warn(
            "left out",
            f"the recorded step called no {', '.join(names[:3])}, as random numbers decide, and a step that does could "
            f"not be recorded beside it ({error!r:.200}): steps that call more modules may exceed the budget.",
        )
        return None
    LOGGER.info("the recorded step left out %s: planning for one that calls all modules", names[0])
    held = Storage(max(0, _held_bytes(recorded) - _held_bytes(found)), NEVER, found.end, "Input", "")
    return replace(
        found,
        storage_table=(*found.storage_table, held),
        facts=tuple(dict.fromkeys((OWN_LOOP, *found.facts))),
        notes=(
            *(note for note in recorded.notes if note != ONE_DRAW and note not in found.notes),
            *found.notes,
        ),
    )


def _may_stand_for(recorded: Profile, args: Any, kwargs: Any) -> bool:
    """Whether a step on this batch, whose loss is the output's own or its mean, takes as much as the loop's.

    Not if the loop computes more than a number from the output, calls the model several times or with a smaller batch,
    or if gradients flow into what the model is given: that graph is the loop's.
    """
    made = [op for op in recorded.tape if op.module == NEVER and not op.backward]
    outside_bytes = sum(recorded.storage_table[index].bytes for op in made for index in op.creates)
    return (
        recorded.is_one_call
        and outside_bytes <= _FEW_BYTES
        and elements_of(args, kwargs) >= elements_in(recorded.sample)
        and not any(tensor.requires_grad for tensor in tensors_of((args, kwargs)))
    )


def _held_bytes(step: Profile) -> int:
    return sum(s.bytes for s in step.storage_table if s.alloc <= 0 and s.kind == "Input")
