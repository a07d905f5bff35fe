"""Effects of a wrapper for several processes on a training step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from autoac_solver.records.profile import Profile


class Parallel:
    """One way to train on several processes, and the common base class, which adds no memory."""

    @property
    def is_here(self) -> bool:
        """Whether the ranks are running: then all of them plan together, and get one plan."""
        return False

    @property
    def is_elsewhere(self) -> bool:
        """Whether it describes absent ranks: then `sharded` makes one of them, on fake tensors."""
        return False

    def with_lifetimes(self, profile: Profile, model: torch.nn.Module) -> Profile:
        """The profile with the memory of the wrapper that the recorded step did not show.

        Args:
            profile: profile of a step of the unwrapped model.
            model: the unwrapped model.
        """
        return profile

    def as_wrapped(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Context in which a step of the unwrapped model takes the memory that it takes in the wrapper.

        What the wrapper allocates before the step is not allocated again.

        Args:
            model: the unwrapped model.
        """
        return nullcontext()


class Plain(Parallel):
    """A model in one process."""


@dataclass(frozen=True)
class Sharded(Parallel):
    """A model of which each rank holds a part of the parameters.

    Args:
        world_size: number of ranks, to plan for one of them; None for the running ranks.
    """

    world_size: int | None = None

    def __post_init__(self) -> None:
        size = self.world_size
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ValueError(f"world_size is {size!r}: how many ranks there are, at least 1.")

    @property
    def is_elsewhere(self) -> bool:
        """See `Parallel`."""
        return self.world_size is not None

    @property
    def ranks(self) -> int | None:
        """Total number of ranks."""
        return self.world_size

    @property
    def offloads(self) -> bool:
        """Whether shards of parameters and gradients, and the optimizer, are in the host's memory, not the device's."""
        return False

    @property
    def in_words(self) -> str:
        """Its name in notes."""
        return type(self).__name__

    def sharded(
        self, model: torch.nn.Module
    ) -> AbstractContextManager[tuple[torch.nn.Module, Callable[[], None]]]:
        """Context with a copy of the model, and a function that shards it; no parameter values are copied.

        Args:
            model: not sharded, on any device.

        Returns:
            The copy, whose parameters are on the meta device, and a function that shards it once they are fake.

        Raises:
            ProfilingError: the model cannot be copied, is sharded already, or this process is a rank itself.
        """
        raise NotImplementedError


def check_parallel(parallel: Any, is_sharded: bool) -> None:
    """Refuse anything but a `Parallel`.

    Args:
        is_sharded: whether the model is sharded or split already.

    Raises:
        ValueError: it is something else, or does not say how many ranks will shard the model.
    """
    if parallel is not None and not isinstance(parallel, Parallel):
        raise ValueError(
            f"parallel is {parallel!r:.80}: pass autoac.parallel.DDP(...), FSDP2(...) or TensorParallel(...) of that "
            "module, or leave it out for a model that is wrapped already."
        )
    if isinstance(parallel, Sharded) and not parallel.is_elsewhere and not is_sharded:
        raise ValueError(
            f"{type(parallel).__name__}() without world_size is a model's that is sharded, and this one is not: shard "
            "it and leave parallel= out, or say how many ranks there will be."
        )
