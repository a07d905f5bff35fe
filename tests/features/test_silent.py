"""What no engine can see, and the docs' Limits warn of: steps that are wrong without an error; `verify` says so.

Engine sac's first step is none of these: it compares what its second runs make with what forward had.
"""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoac
from tests.execute.exact.harness import Case, differences, plan_with, run

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sin(torch.tanh(self.linear(torch.cos(x))))


def everything(region: str, op: str, nth: int) -> bool:
    return True


def write_data(x: torch.Tensor) -> None:
    x.data.mul_(0.5)


def write_numpy(x: torch.Tensor) -> None:
    np.multiply(x.numpy(), 0.5, out=x.numpy())


def written(write: Any, checkpointed: bool = False) -> Case:
    """A step that writes the regions' input, unseen, between forward and backward."""

    def forward(model: Any) -> Any:
        x = X.clone()
        middle = checkpoint(model[0], x, use_reentrant=False) if checkpointed else model[0](x)
        return model[1](middle).square().mean(), x

    def backward(result: Any) -> None:
        write(result[1])
        result[0].backward()

    quiet = Case(lambda: nn.Sequential(Block(), Block()), forward, ("0", "1"))
    return Case(
        quiet.build,
        forward,
        quiet.regions,
        backward,
        profiled=forward,
        profiled_backward=lambda r: r[0].backward(),
    )


@pytest.mark.parametrize("write", [write_data, write_numpy])
def test_writes_that_nobody_sees(engine, write):
    case = written(write)
    plan, expected = plan_with(case, engine, everything), run(case, steps=1)
    if engine == "sac":
        with pytest.raises(RuntimeError, match="so this step's gradients would be wrong"):
            run(case, plan, steps=1)
        run(written(lambda x: None), plan, steps=2)  # from the second step on it does not look
    wrong = differences(run(case, plan, steps=1), expected)
    assert "the gradient of 0.linear.weight of step 0" in wrong
    assert differences(
        run(written(write, checkpointed=True), steps=1), expected
    )  # torch's checkpoint is no better
    model = case.model()
    report = plan.verify(model, lambda: case.backward(case.forward(model)))
    assert not report.equal


def test_a_write_through_data_that_the_profiled_step_made(engine):
    """Then the plan knows of it, and keeps what was written."""
    case = written(write_data)
    seen = Case(case.build, case.forward, case.regions, case.backward)
    profile = seen.profile()
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine=engine, regions=["0", "1"])
    least = caught.value.minimum_bytes
    plan = autoac.solve(profile, least, engine=engine, regions=["0", "1"])
    assert not differences(run(seen, plan, steps=1), run(seen, steps=1))


class Chance(Block):
    draw: Any = random.random

    def forward(self, x):
        return super().forward(x * float(Chance.draw()))


@pytest.mark.parametrize("draw", [random.random, np.random.random_sample], ids=["Python", "numpy"])
def test_random_numbers_that_are_not_torchs(engine, draw, monkeypatch):
    monkeypatch.setattr(Chance, "draw", staticmethod(draw))

    def forward(model: nn.Module) -> torch.Tensor:
        random.seed(1)
        np.random.seed(1)
        return model(X).square().mean()

    case = Case(lambda: nn.Sequential(Chance(), Chance()), forward, ("0", "1"))
    plan = plan_with(case, engine, everything)
    assert not differences(run(case, plan, steps=1), run(case, steps=1))
    model = case.model()
    assert plan.verify(model, lambda: case.backward(case.forward(model))).equal
