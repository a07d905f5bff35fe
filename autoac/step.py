"""One training step as a function: forward, loss and backward of a model on a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoac.untouched import tensors_of
from autoac_solver.errors import ProfilingError

Loss = Callable[[Any], torch.Tensor]


def call_model(model: torch.nn.Module, sample: Any) -> Any:
    """The model's output for a sample: a tensor, a tuple (positional) or a mapping (keyword).

    A model that takes its batch apart (`batch.pop("labels")`) gets containers of its own in every step.
    """
    if isinstance(sample, torch.Tensor):
        return model(sample)
    if isinstance(sample, tuple):
        return model(*map(_fresh, sample))
    if isinstance(sample, Mapping):
        return model(**{name: _fresh(value) for name, value in sample.items()})
    raise ProfilingError(
        f"sample is a {type(sample).__name__}; it must be a tensor, a tuple (positional arguments), a mapping (keyword "
        "arguments), or a callable without arguments that runs one whole step (forward, loss, backward)."
    )


def _fresh(value: Any) -> Any:
    """The same values in new lists and dictionaries."""
    if type(value) is dict:
        return {key: _fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_fresh, value))
    return value


def default_loss(output: Any) -> torch.Tensor:
    """The output's `.loss`, or the output if scalar, else the mean of its floating tensors."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    if isinstance(output, torch.Tensor) and output.numel() == 1:
        return output.squeeze()
    floating = [t for t in tensors_of(output) if t.is_floating_point() or t.is_complex()]
    floating = [t for t in floating if t.requires_grad]
    if not floating:
        raise ProfilingError(
            "the model's output has no floating tensor that needs a gradient, so there is no loss to go backward from. "
            "Pass loss=, a function from the output to a scalar, and check that some parameter requires grad."
        )
    means = [(t.abs() if t.is_complex() else t).mean() for t in floating]
    return means[0] if len(means) == 1 else torch.stack([m.float() for m in means]).mean()


def make_step(
    model: torch.nn.Module, sample: Any, loss: Loss | None = None
) -> Callable[[], torch.Tensor | None]:
    """A function that runs one step and returns its loss (None if the sample is a step of its own).

    The model's output stays alive until backward is over, as in the usual training loop.
    """
    if is_whole_step(sample):
        if loss is not None:
            raise ProfilingError("loss= goes with a sample; a callable sample computes its losses itself.")
        return _whole_step(sample)
    to_scalar = loss or default_loss

    def step() -> torch.Tensor:
        output = call_model(model, sample)
        value = to_scalar(output)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ProfilingError(
                f"the loss is no scalar with a gradient (it is {shape}). Pass loss=, a function from the "
                "model's output to a scalar tensor, and check that some parameter requires grad."
            )
        value.backward()
        return value.detach()

    return step


def is_whole_step(sample: Any) -> bool:
    """Whether this is no input of the model, but the user's own code for a step."""
    return callable(sample) and not isinstance(sample, (torch.Tensor, Mapping))


def _whole_step(sample: Callable[[], Any]) -> Callable[[], torch.Tensor | None]:
    def step() -> torch.Tensor | None:
        result = sample()
        return result.detach() if isinstance(result, torch.Tensor) else None

    return step
