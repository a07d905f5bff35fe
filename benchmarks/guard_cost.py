"""Time that the guard adds to profiling: `python -m benchmarks.guard_cost`.

Each model is profiled with the checks of recomputed values and of unseen writes, and without, in turns. CPU time of the
process on one thread, which other processes on the machine do not lengthen.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import autoac
from autoac.compare import quiet
from autoac.device import device_for
from autoac.measure import in_turn
from autoac.ops.info import OpInfo
from autoac.record import recorder
from autoac.record.guard import Guard
from autoac.record.unseen import UnseenWrites
from benchmarks import models

TARGET = 1.1
"""What profiling with the guard may take, of its time without."""


@dataclass(frozen=True)
class Cost:
    """Seconds of profiling one model, one number a round."""

    title: str
    with_s: list[float]
    without_s: list[float]

    @property
    def ratio(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.with_s, self.without_s, strict=True))


class _NoUnseen(UnseenWrites):
    """Compares nothing."""

    def wrote(self, tensors: Iterable[torch.Tensor], uninitialised: bool = False) -> None:
        pass

    def before_op(self, info: OpInfo, args: Any, kwargs: Any) -> None:
        pass

    def reads(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def passes(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def is_written_later(self, tensors: Iterable[torch.Tensor]) -> None:
        pass


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Context in which profiling compares nothing."""

    def no_guard(unfit: Collection[Any] = ()) -> Guard | None:
        return None

    with (
        mock.patch.object(recorder, "Guard", no_guard),
        mock.patch.object(recorder, "UnseenWrites", _NoUnseen),
    ):
        yield


def measure(names: Sequence[str], size: str, rounds: int) -> list[Cost]:
    """CPU time of profiling each model, both ways in random order in each round."""

    known = device_for(torch.device("cpu"))

    def taken_s(name: str, around: Any) -> float:
        workload = models.make(name, size, torch.device("cpu"))
        # As many timed steps each way, however slow the machine is.
        with around(), mock.patch.object(recorder, "_TIMING_S", math.inf):
            return known.step_seconds(lambda: autoac.profile(workload.model, workload.sample))[0]

    taken_s(names[0], contextlib.nullcontext)  # the first profile loads modules
    found = []
    for name in names:
        ways = {
            True: functools.partial(taken_s, name, contextlib.nullcontext),
            False: functools.partial(taken_s, name, off),
        }
        samples = in_turn(ways, rounds, shuffle=random.Random(1))
        title = models.make(name, size, torch.device("cpu")).title
        found.append(Cost(title, samples[True], samples[False]))
    return found


def render(costs: Sequence[Cost]) -> str:
    """A Markdown table, and whether the target is met."""
    lines = ["| model | with, s | without, s | ratio |", "|---|---|---|---|"]
    for cost in costs:
        medians = statistics.median(cost.with_s), statistics.median(cost.without_s)
        lines.append(f"| {cost.title} | {medians[0]:.2f} | {medians[1]:.2f} | {cost.ratio:.3f} |")
    largest = max(cost.ratio for cost in costs)
    verdict = "pass" if largest <= TARGET else "FAIL"
    lines += ["", f"{verdict}: at most {TARGET} of the time without the guard: at most {largest:.3f}"]
    return "\n".join(lines)


def main(
    model: Annotated[list[str], typer.Option(help="Models to profile.")] = ["gpt", "resnet", "vit"],  # noqa: B006
    size: Annotated[str, typer.Option(help="full or tiny")] = "full",
    rounds: Annotated[int, typer.Option(min=1, help="Profiles each way.")] = 5,
) -> None:
    """Measure and print a table."""
    quiet.restart_if_needed()
    torch.set_num_threads(1)
    typer.echo(render(measure(model, size, rounds)))


if __name__ == "__main__":
    typer.run(main)
