"""Random numbers of a device that is not the CPU: `python -m tests.features.draws_elsewhere LIBRARY ENGINE`.

Plans are made on CPU, carried over to the device, and held against a step there without a plan. Last, what a profile of
that device notes. Values that a loop's updates change there are compared on the way.
"""

import dataclasses
import sys
from typing import Any

import torch
from torch import nn

from autoac.execute.checksums import checksums_of
from autoac.plans import Plan
from tests.blocks import X
from tests.execute.exact.harness import Case, differences, plans, recomputes, run
from tests.second_device import NAME, end, load


class Draws(nn.Module):
    """Draws from the device's generator, and from the CPU's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from_cpu = torch.empty(64, device=x.device).copy_(torch.randn(64))
        noise = torch.rand_like(x) + from_cpu * torch.bernoulli(torch.full_like(x, 0.5))
        return torch.sin(torch.tanh(self.linear(x) * noise))


def step_on(device: str) -> Case:
    """The model and its step there; backward draws between the regions' recomputations, too."""

    def forward(model: Any) -> torch.Tensor:
        x = model[1](model[0](X.to(device)))
        x.register_hook(lambda g: g * torch.rand_like(g))
        return model[2](x).square().mean()

    return Case(lambda: nn.Sequential(Draws(), nn.Tanh(), Draws()).to(device), forward, ("0", "2"))


def main(library: str, engine: str) -> None:
    generator = load(library)  # first: autograd asks once which devices there are
    made, case = plans(step_on("cpu"), engine), step_on(NAME)

    def left_behind(plan: Plan | None) -> dict[str, Any]:
        left = run(case, plan)
        return {name: value if value is None else value.cpu() for name, value in left.items()} | {
            "the device's generator": generator.get_state()
        }

    expected = left_behind(None)
    case.model()  # seeds both generators, as before each run
    assert not torch.equal(generator.get_state(), expected["the device's generator"]), "nothing was drawn"
    for plan in made.values():
        on_device = Plan(dataclasses.replace(plan.record, device=f"{NAME}:0"))
        assert not differences(left_behind(on_device), expected)
    weight = case.model()[0].linear.weight
    before = checksums_of([weight])
    assert before == checksums_of([weight])
    weight.data.add_(1)
    assert before != checksums_of([weight])
    print(sum(map(recomputes, made.values())), "plans that recompute")
    print(*(note for note in case.profile().notes if str(case.model()[0].linear.weight.device) in note))


if __name__ == "__main__":
    main(*sys.argv[1:])
    end()
