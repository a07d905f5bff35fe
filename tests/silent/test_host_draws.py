"""Another library's op that draws from numpy's random numbers, and ops that raise where forward catches that."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from tests.small_models import least_bytes

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


@torch.library.custom_op("autoac_tests::mask_now_and_then", mutates_args=())
def mask_now_and_then(x: torch.Tensor) -> torch.Tensor:
    """Draws in some calls only, from Python's generator."""
    draws = bool(x.flatten()[0] > 0)
    return x * torch.tensor([float(random.random() < 0.7) if draws else 1.0 for _ in range(x.shape[-1])])


mask_now_and_then.register_fake(torch.empty_like)
mask_now_and_then.register_autograd(lambda ctx, g: g * (ctx.saved_tensors[0] != 0), setup_context=keep)


@torch.library.custom_op("autoac_tests::add_noise_", mutates_args=("x",))
def add_noise_(x: torch.Tensor) -> None:
    x.add_(torch.from_numpy(np.random.rand(*x.shape).astype(np.float32)))


class Masked(nn.Module):
    """The op lies beside smaller modules: a plan may choose the whole as a region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return numpy_mask(self.inner(x).tanh()).sin().exp()


class MaskedNowAndThen(Masked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mask_now_and_then(self.inner(x).tanh()).sin().exp()


class Noisy(Masked):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh() * 0.5
        with torch.no_grad():
            add_noise_(hidden)
        return hidden.sin().exp()


class Leaf(nn.Module):
    """No smaller module lies in it, so a recorded step runs all of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return numpy_mask((x * self.weight).tanh()).sin().exp()


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


SAMPLE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def build(block: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(block(), block(), block())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for step in range(3):
        np.random.seed(step)
        random.seed(step)
        loss = model(SAMPLE + step).square().mean()
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
    plan = autoac.solve(profile, int(1.2 * least_bytes(profile, engine)), engine=engine)
    assert all(map(torch.equal, gradients(plan.apply(build(Masked))), expected))
    RUNS.clear()
    loop = build(Masked)
    autoac.auto(loop, "1GB", engine=engine)
    assert all(map(torch.equal, gradients(loop), expected))
    assert len(RUNS) == 9  # once in each block and step: the recorded step trains


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("block", [Masked, MaskedNowAndThen, Noisy, Leaf])
def test_draws_that_the_profiled_step_does_not_show(
    block: Callable[[], nn.Module], engine: Any, mode: Literal["real", "fake"]
):
    """On fake tensors nothing is drawn, and a real step may not draw where a later one does."""
    expected = gradients(build(block))
    profile = autoac.profile(build(block), SAMPLE, mode=mode)
    try:
        plan = autoac.solve(profile, 1, engine=engine)
    except autoac.InfeasibleBudgetError as error:
        plan = autoac.solve(profile, error.minimum_bytes, engine=engine)
    wraps_none = block is Leaf and engine == "sac" and mode == "real"  # at its least budget
    assert any(region.wrapped for region in plan.regions) or wraps_none
    assert all(map(torch.equal, gradients(plan.apply(build(block))), expected))


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_loops_recorded_step_keeps_what_draws(engine: Any):
    expected = gradients(build(Leaf))
    RUNS.clear()
    loop = build(Leaf)
    autoac.auto(loop, "1GB", engine=engine)
    assert all(map(torch.equal, gradients(loop), expected))
    assert len(RUNS) == 9


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
