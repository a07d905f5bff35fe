"""Time per op under each engine, on ops that take almost no time themselves: `python -m benchmarks.op_cost`.

A chain of 200 tiny ops, forward and backward: plain, under torch's checkpoint, and with the same decisions under
torch's selective checkpointing (with the cheapest policy there is), under engine "sac" (the same with a plan's
policy) and under engine "replay".
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoac.compare import quiet
from autoac.device import device_for
from autoac.execute import replay
from autoac.execute.program import Program
from autoac.execute.sac import sac
from autoac.measure import in_turn
from autoac.ops.info import op_info
from autoac.torch_private import TorchDispatchMode
from autoac_solver.records.disk.files import write_json

OPS = 200
MIXES = (0.0, 0.25, 0.5, 0.75, 1.0)
TARGET = 0.75
"""What replay may cost of torch's selective checkpointing, in every mix."""

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Cost:
    """Microseconds per op, forward and backward together; `samples_us` has one number a round.

    Args:
        way: "plain", "checkpoint", "selective", "engine sac" or "engine replay".
        recomputed: share of the ops that are recomputed.
    """

    way: str
    recomputed: float
    samples_us: list[float]

    @property
    def least_us(self) -> float:
        return min(self.samples_us)

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)


def chain(x: torch.Tensor) -> torch.Tensor:
    """200 ops: two save a tensor for backward, two do not, and so on."""
    for _ in range(OPS // 4):
        x = torch.tanh(torch.sin(x) * 1.5) + 1
    return x


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not op_info(func).ignored:
            self.names.append(op_info(func).name)
        return func(*args, **(kwargs or {}))


class _ListedPolicy:
    """A policy that reads its decisions from a list, by position."""

    def __init__(self, recomputed: Sequence[bool]) -> None:
        answers = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE)
        policies = [answers[again] for again in recomputed]
        self.forward, self.again = iter(policies), iter(policies)

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return next(self.again if ctx.is_recompute else self.forward)


def decisions(share: float) -> list[bool]:
    """Which ops are recomputed: a fixed random choice of this share."""
    chosen = [i < round(share * OPS) for i in range(OPS)]
    random.Random(0).shuffle(chosen)
    return chosen


def ways(x: torch.Tensor) -> dict[tuple[str, float], Callable[[], torch.Tensor]]:
    """All compared ways, by name and share recomputed."""
    with _Names() as recorded:
        chain(x)
    assert len(recorded.names) == OPS
    found: dict[tuple[str, float], Callable[[], torch.Tensor]] = {
        ("plain", 0.0): lambda: chain(x),
        ("checkpoint", 1.0): lambda: checkpoint(chain, x, use_reentrant=False),
    }
    for share in MIXES:
        again = decisions(share)
        program = Program("chain", list(zip(recorded.names, again, strict=True)))
        found["selective", share] = _selective(again, x)
        found["engine sac", share] = lambda program=program: sac.run(program, chain, (x,), {})
        found["engine replay", share] = lambda program=program: replay.run(program, chain, (x,), {})
    return found


def _selective(again: Sequence[bool], x: torch.Tensor) -> Callable[[], Any]:
    def contexts() -> tuple[Any, Any]:
        return create_selective_checkpoint_contexts(_ListedPolicy(again))

    return lambda: checkpoint(chain, x, use_reentrant=False, context_fn=contexts)


def measure(rounds: int, steps: int) -> list[Cost]:
    """CPU time of each way, `steps` forward and backward passes a sample, all ways in random order in each round.

    Raises:
        AssertionError: gradients differ between two ways.
    """
    x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
    compared = ways(x)
    (expected,) = torch.autograd.grad(chain(x).sum(), x)
    for way, run in compared.items():
        (gradient,) = torch.autograd.grad(run().sum(), x)
        assert torch.equal(gradient, expected), f"the gradient of {way} differs"

    known = device_for(torch.device("cpu"))

    def taken_us(run: Callable[[], Any]) -> float:
        def some_steps() -> None:
            for _ in range(steps):
                torch.autograd.grad(run().sum(), x)

        return known.step_seconds(some_steps)[0] / steps / OPS * 1e6

    runs = {way: functools.partial(taken_us, run) for way, run in compared.items()}
    samples = in_turn(runs, rounds, shuffle=random.Random(1))
    return [Cost(way, share, values) for (way, share), values in samples.items()]


def render(costs: Sequence[Cost]) -> str:
    """A Markdown table, and whether the target is met."""
    found = {(cost.way, cost.recomputed): cost for cost in costs}
    plain, whole = found["plain", 0.0], found["checkpoint", 1.0]
    lines = [
        f"Microseconds per op over {OPS} tiny ops, forward and backward, least (median) of "
        f"{len(plain.samples_us)} rounds; plain {_us(plain)}, torch's checkpoint {_us(whole)}.",
        "",
        "| recomputed | torch's selective checkpointing | engine sac | engine replay | replay / selective |",
        "|---|---|---|---|---|",
    ]
    ratios = []
    for share in MIXES:
        selective, replayed = found["selective", share], found["engine replay", share]
        ratios.append(replayed.least_us / selective.least_us)
        cells = [_us(selective), _us(found["engine sac", share]), _us(replayed), f"{ratios[-1]:.2f}"]
        lines.append(f"| {share:.0%} | {' | '.join(cells)} |")
    verdict = "pass" if max(ratios) <= TARGET else "FAIL"
    lines += ["", f"{verdict}: replay costs at most {TARGET} of it in every mix: at most {max(ratios):.2f}"]
    return "\n".join(lines)


def _us(cost: Cost) -> str:
    return f"{cost.least_us:.1f} ({cost.median_us:.1f})"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each way.")] = 15,
    steps: Annotated[int, typer.Option(min=1, help="Forward and backward passes in a sample.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Write all samples to this file.")] = None,
) -> None:
    """Measure and print a table."""
    quiet.restart_if_needed()
    torch.set_num_threads(1)
    costs = measure(rounds, steps)
    typer.echo(render(costs))
    if json:
        write_json(json, "autoac.op_cost", 1, {"costs": [asdict(cost) for cost in costs]}, dict[str, Any])


if __name__ == "__main__":
    typer.run(main)
