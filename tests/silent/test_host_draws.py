"""Another library's op that draws from numpy's random numbers, and ops that raise where forward catches that."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoac

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS: list[int] = []


@torch.library.custom_op("autoac_tests::numpy_mask", mutates_args=())
def numpy_mask(x: torch.Tensor) -> torch.Tensor:
    RUNS.append(1)
    return torch.from_numpy((np.random.rand(*x.shape) < 0.7).astype(np.float32)) * x


def keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


numpy_mask.register_fake(torch.empty_like)
numpy_mask.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0] != 0), setup_context=keep)


class Masked(nn.Module):
    """The op lies beside smaller modules: a plan may choose the whole as a region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return numpy_mask(self.inner(x).tanh()).sin().exp()


class Falling(nn.Module):
    """Tries one op, and falls back to another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).tanh()
        try:
            hidden = hidden @ torch.ones(3, 3)
        except RuntimeError:
            hidden = hidden.cos()
        return (hidden * hidden).sin()


SAMPLE = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def build(block: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        np.random.seed(step)
        loss = model(SAMPLE).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_ops_that_draw_numpys_numbers(engine: Any):
    expected = gradients(build(Masked))
    profile = autoac.profile(build(Masked), SAMPLE)
    (note,) = (note for note in profile.notes if "numpy's random numbers" in note)
    assert note.startswith("autoac_tests.numpy_mask.default in '0', '1', '2' draws")
    plan = autoac.solve(profile, int(1.2 * profile.least_peak_bytes), engine=engine)
    assert all(map(torch.equal, gradients(plan.apply(build(Masked))), expected))
    RUNS.clear()
    loop = build(Masked)
    autoac.auto(loop, "1GB", engine=engine)
    assert all(map(torch.equal, gradients(loop), expected))
    assert len(RUNS) == 9  # once in each block and step: the recorded step trains


def test_an_op_that_raises_where_forward_expects_it():
    expected = gradients(build(Falling))
    profile = autoac.profile(build(Falling), SAMPLE)
    plan = autoac.solve(profile, profile.least_peak_bytes, engine="replay")
    assert all(map(torch.equal, gradients(plan.apply(build(Falling))), expected))
    loop = build(Falling)
    autoac.auto(loop, "1GB")
    assert all(map(torch.equal, gradients(loop), expected))


def test_a_process_ends_as_usual_after_a_recorded_step_that_failed():
    code = """
import autoac, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
autoac.auto(model, "10MB")
model(torch.ones(4, 8))
raise SystemExit(7)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 7
