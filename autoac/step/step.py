"""The user's training step as one object: forward, loss and backward of a model on a sample, and the optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from autoac.step.autocast import forward_autocast
from autoac.step.interrupts import interruptible
from autoac.step.optimizer import real_optimizer
from autoac.step.restore import tensors_of
from autoac.torch_private import alias_unseen
from autoac_solver.records.errors import ProfilingError

Loss = Callable[[Any], torch.Tensor]


class TrainingStep:
    """One training step. All checks that need no run are made when it is built.

    Args:
        model: as it will be trained.
        sample: the model's input: a tensor, a tuple (positional arguments) or a mapping (keyword arguments); or a
            callable without arguments that runs one whole step (forward, loss, backward).
        loss: maps the model's output to a scalar; None is `default_loss`.
        optimizer: the one that trains the model; wrappers of other libraries are removed.
        keeps_output: whether the model's output stays alive until the step is over, as in the usual training loop.

    Raises:
        ProfilingError: one of these is of the wrong kind, or they do not go together.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        sample: Any,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        keeps_output: bool = True,
    ):
        _check_sample(sample)
        _check_loss(loss, sample)
        self.model = model
        self.sample = sample
        self.loss = loss
        self.keeps_output = keeps_output
        self.optimizer = None if optimizer is None else real_optimizer(optimizer, model)

    @property
    def is_whole(self) -> bool:
        """Whether the sample is no input of the model, but a callable that runs a whole step."""
        return is_whole_step(self.sample)

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors of the sample; none for a callable, which makes its own."""
        return [] if self.is_whole else list(tensors_of(self.sample))

    @property
    def written(self) -> list[torch.Tensor]:
        """The tensors that the step may write in place."""
        inputs = (tensor for tensor in self.inputs if tensor.layout is torch.strided)
        return [*self.model.parameters(), *self.model.buffers(), *inputs]

    def of(self, model: torch.nn.Module, sample: Any = None) -> TrainingStep:
        """The same step with another form of the model, and of the sample if one is given."""
        step = copy.copy(self)  # not checked again: the checks are for the user's arguments
        step.model, step.sample = model, self.sample if sample is None else sample
        return step

    def forward(self) -> Any:
        """The model's output for the sample.

        The model gets its own containers, so that it may take its batch apart (`batch.pop("labels")`), and its own
        tensors where these need no gradient: one that it writes in place would keep the graph of this step.
        """
        with interruptible():
            return self._forward()

    def _forward(self) -> Any:
        if isinstance(self.sample, torch.Tensor):
            return self.model(_fresh(self.sample))
        if isinstance(self.sample, tuple):
            return self.model(*map(_fresh, self.sample))
        return self.model(**{name: _fresh(value) for name, value in self.sample.items()})

    def run(self, held: list[Any] | None = None) -> torch.Tensor | None:
        """Run forward, loss and backward; returns the loss (of a callable sample, the tensor that it returns if any).

        The caller's autocast is applied as in a training loop: on for forward and loss only, without earlier casts of
        weights.

        Args:
            held: receives the tensors that the usual loop still holds after backward: the loss, and the model's output.
        """
        with interruptible():
            return self._run([] if held is None else held)

    def _run(self, held: list[Any]) -> torch.Tensor | None:
        if self.is_whole:
            result = self.sample()
            return result.detach() if isinstance(result, torch.Tensor) else None
        with forward_autocast() as backward_autocast:
            output = self._forward()
            if not torch.is_grad_enabled():
                raise ProfilingError(
                    "gradients are off (torch.no_grad, torch.inference_mode), so there is no training step to run. "
                    "Turn them on around this call."
                )
            value = (self.loss or default_loss)(output)
        if not self.keeps_output:
            output = None
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                shape = "detached"
            raise ProfilingError(
                f"the loss is no scalar with a gradient (it is {shape}). Pass loss=, a function from the "
                "model's output to a scalar tensor, and check that some parameter requires grad."
            )
        with backward_autocast:
            value.backward()
        held += [value, output]
        return value.detach()


def is_whole_step(sample: Any) -> bool:
    """Whether a sample is no input of the model, but a callable that runs a whole step."""
    return callable(sample) and not isinstance(sample, (torch.Tensor, tuple, Mapping))


_OF_LISTS = " For a list of arguments pass tuple(sample); for a list of batches, autoac.Samples(sample)."
_OF_LOADERS = " For batches of a DataLoader pass autoac.Samples(sample, 8), with a number of them."


def _check_sample(sample: Any) -> None:
    possible = (
        "a tensor, a tuple (positional arguments), a mapping (keyword arguments), or a callable without arguments that "
        "runs one whole step (forward, loss, backward)"
    )
    if isinstance(sample, Mapping):
        odd = next((name for name in sample if not isinstance(name, str)), None)
        if odd is not None:
            raise ProfilingError(
                f"sample is a mapping with the key {odd!r:.80}: keys are names of the model's arguments. To pass the "
                "mapping itself as an argument, put it in a tuple: (mapping,)."
            )
    elif not isinstance(sample, (torch.Tensor, tuple)) and not callable(sample):
        hint = (
            _OF_LISTS if isinstance(sample, list) else _OF_LOADERS if isinstance(sample, DataLoader) else ""
        )
        raise ProfilingError(f"sample is a {type(sample).__name__}; it must be {possible}.{hint}")
    elif is_whole_step(sample) and (needed := _needed_arguments(sample)):
        raise ProfilingError(
            f"sample is a callable that needs arguments ({', '.join(needed)}): it is called without any, and runs one "
            "whole step (forward, loss, backward) of the model that was passed. Take them from its surroundings, or "
            "pass functools.partial(sample, ...)."
        )


def _needed_arguments(function: Any) -> list[str]:
    """Names of the arguments without a default; none of a callable that does not tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some written in C
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _check_loss(loss: Any, sample: Any) -> None:
    if loss is None:
        return
    if not callable(loss) or isinstance(loss, type):
        raise ProfilingError(
            f"loss is {loss!r:.80}: pass a function from the model's output to a scalar tensor, or leave it out for "
            "the output's .loss, the output if scalar, or the mean of its floating tensors."
        )
    if is_whole_step(sample):
        raise ProfilingError("loss= goes with a sample; a callable sample computes its losses itself.")


def _fresh(value: Any) -> Any:
    """Copies of lists and dictionaries, with new tensors on the same storages."""
    if type(value) is dict:
        return {key: _fresh(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_fresh, value))
    if type(value) is torch.Tensor and not value.requires_grad:
        return alias_unseen(value)
    return value


def default_loss(output: Any) -> torch.Tensor:
    """The output's `.loss`, or the output if scalar, else the mean of its floating-point tensors."""
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
