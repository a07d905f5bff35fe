"""Layers side by side in one `Sequential`, against torch's `checkpoint_sequential`: `python -m benchmarks.flat`.

For each number of segments that `checkpoint_sequential` is given, a plan for the peak that it takes. CPU time of the
process on one thread, in turns.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import autoac
from autoac.compare import quiet
from autoac.device import device_for
from autoac.measure import in_turn, measure_peak

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """A number of segments, and the plan for the peak that they take.

    Args:
        segments: 0 for no checkpointing.
        peak_bytes, our_peak_bytes: measured.
        ratio, our_ratio: CPU time as a multiple of that without checkpointing.
        equal: the plan's gradients are those without checkpointing, to the bit.
    """

    segments: int
    peak_bytes: int
    ratio: float
    our_peak_bytes: int
    our_ratio: float
    equal: bool


def measure(layers: int, width: int, batch: int, segments: Sequence[int], rounds: int) -> list[Row]:
    """Train pairs of `Linear` and `GELU` with each number of segments, and with the plan for its peak."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())))
    x = torch.randn(batch, width)
    profile = autoac.profile(model, x, loss=_loss)

    def step(forward: Forward) -> list[torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        _loss(forward(x)).backward()
        return [parameter.grad for parameter in model.parameters()]

    def peak(forward: Forward) -> int:
        step(forward)
        model.zero_grad(set_to_none=True)
        return profile.resident_bytes + measure_peak(lambda: step(forward)).peak_above_start_bytes

    known = device_for(torch.device("cpu"))

    def seconds(forward: Forward, plan: autoac.Plan | None = None) -> float:
        if plan is not None:
            with plan.applied(model):
                return seconds(forward)
        return known.step_seconds(lambda: step(forward))[0]

    by_hand: dict[int, Forward] = {0: model} | {
        n: functools.partial(_in_segments, model, n) for n in segments
    }
    peaks = {n: peak(forward) for n, forward in by_hand.items()}
    plans = {n: autoac.solve(profile, size) for n, size in peaks.items()}
    runs = {(n, False): functools.partial(seconds, forward) for n, forward in by_hand.items()}
    runs |= {(n, True): functools.partial(seconds, model, plan) for n, plan in plans.items()}
    taken = {key: statistics.median(found) for key, found in in_turn(runs, rounds).items()}
    expected = step(model)
    rows = []
    for n, plan in plans.items():
        with plan.applied(model):
            ours = peak(model)
            equal = all(
                a is not None and b is not None and torch.equal(a, b)
                for a, b in zip(step(model), expected, strict=True)
            )
        base = taken[0, False]
        rows.append(Row(n, peaks[n], taken[n, False] / base, ours, taken[n, True] / base, equal))
    return rows


def _in_segments(model: nn.Sequential, segments: int, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(model, segments, x, use_reentrant=False)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = ["| `checkpoint_sequential` | peak MB | time | ours: peak MB | time |", "|---|---|---|---|---|"]
    for row in rows:
        name = f"{row.segments} segments" if row.segments else "none"
        ours = f"{row.our_peak_bytes / 1e6:.1f} | {row.our_ratio:.2f}"
        lines.append(f"| {name} | {row.peak_bytes / 1e6:.1f} | {row.ratio:.2f} | {ours} |")
    equal = sum(row.equal for row in rows)
    return "\n".join([*lines, "", f"gradients equal to the bit: {equal} of {len(rows)} plans"])


def main(
    layers: Annotated[int, typer.Option(help="Pairs of Linear and GELU.")] = 12,
    width: Annotated[int, typer.Option(help="Features.")] = 256,
    batch: Annotated[int, typer.Option(help="Rows.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each.")] = 9,
) -> None:
    """Measure and print a table."""
    quiet.restart_if_needed()
    torch.set_num_threads(1)
    typer.echo(render(measure(layers, width, batch, (2, 3, 4, 6, 12), rounds)))


if __name__ == "__main__":
    typer.run(main)
