"""Several batches of different shapes to plan for."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autoac.step.inputs import MOST, described
from autoac.step.step import is_whole_step


class Samples:
    """Several batches in place of one, for `sample=` of `autoac.plan` and `autoac.profile`.

    The step with the highest peak is planned for. Of batches with the same shapes only the first is profiled, unless
    its step has shapes that depend on values (routed experts): then all are. All are held in memory.

    Args:
        batches: samples as `autoac.plan` takes them one by one: a list, or a DataLoader. A batch that is a list, as
            torch's default collate function makes them, is a tuple of positional arguments.
        count: how many to take; None takes all.

    Raises:
        ValueError: there is no batch, or one of them is a callable, whose shapes are not known.
    """

    def __init__(self, batches: Iterable[Any], count: int | None = None):
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(
                f"Samples takes {count!r} batches: give a number from 1 on, or leave it out for all."
            )
        if not isinstance(batches, Iterable) or isinstance(batches, (str, bytes, Mapping, torch.Tensor)):
            raise ValueError(
                f"Samples is given a {type(batches).__name__}; it takes several batches: a list of samples, or a "
                "DataLoader and a number, as in autoac.Samples(loader, 8)."
            )
        by_shape: dict[str, list[Any]] = {}
        for batch in itertools.islice(batches, count):
            batch = tuple(batch) if type(batch) is list else batch
            if is_whole_step(batch):
                raise ValueError(
                    "Samples takes the model's inputs; a callable runs a whole step of its own: plan for one of them."
                )
            by_shape.setdefault(shapes_of(batch, most=sys.maxsize), []).append(batch)
        if not by_shape:
            raise ValueError("Samples is given no batch.")
        self.alike: list[list[Any]] = list(by_shape.values())  # batches of the same shapes together

    @property
    def batches(self) -> list[Any]:
        """The first batch of each shape."""
        return [first for first, *_ in self.alike]

    def __repr__(self) -> str:
        return f"Samples({'; '.join(map(shapes_of, self.batches))})"


def of_loader(sample: Any) -> Any:
    """A pair of a DataLoader and a number as `Samples`; any other sample as it is.

    Raises:
        ValueError: as `Samples`.
    """
    is_pair = isinstance(sample, tuple) and len(sample) == 2
    if is_pair and isinstance(sample[0], torch.utils.data.DataLoader):
        return Samples(*sample)
    return sample


def batches_of(sample: Any) -> list[Any]:
    """The batches in a `Samples`; any other sample alone."""
    return [batch for alike in alike_in(sample) for batch in alike]


def alike_in(sample: Any) -> list[list[Any]]:
    """The batches in a `Samples`, those of the same shapes together; any other sample alone."""
    return sample.alike if isinstance(sample, Samples) else [[sample]]


def shapes_of(sample: Any, most: int = MOST) -> str:
    """Description of a sample, as in `Profile.sample`; see `described`."""
    if isinstance(sample, Mapping):
        return described((), sample, most)
    return described(sample if isinstance(sample, tuple) else (sample,), {}, most)
