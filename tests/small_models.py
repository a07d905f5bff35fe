"""A model of a few blocks and what the tests do with it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

import autoac
from autoac.plans import Plan
from autoac_solver.records.profile import Profile

WIDTH, BATCH, BLOCKS = 16, 64, 3


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x))))) * scale


class Blocks(nn.Module):
    """Some blocks, gone through once or several times.

    Args:
        rounds: how often each block is called in a forward.
    """

    def __init__(self, rounds: int = 1, dropout: float = 0.1, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.rounds = rounds
        self.blocks = cast("list[Block]", nn.ModuleList(Block(dropout) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        for _ in range(self.rounds):
            for block in self.blocks:
                x = block(x, scale=scale)
        return self.head(x)


def make(**arguments: Any) -> Blocks:
    """Always the same model for the same arguments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Blocks(**arguments)


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def tight_plan(profile: Profile, engine: str, regions: list[str] | None = None) -> Plan:
    """The plan for the least feasible budget."""
    return autoac.solve(profile, least_bytes(profile, engine, regions), engine=engine, regions=regions)


def least_bytes(profile: Profile, engine: str, regions: list[str] | None = None) -> int:
    try:
        autoac.solve(profile, 1, engine=engine, regions=regions)
    except autoac.InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("a budget of one byte was met")


def step(model: nn.Module, x: torch.Tensor | None = None, seed: int = 5) -> list[torch.Tensor]:
    """One training step from the zero_grad state; the loss, the gradients and the buffers it leaves."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = model(batch() if x is None else x)
    loss = output.square().mean()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Equal to the bit."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def attributes(model: nn.Module) -> list[list[tuple[str, int]]]:
    """Names of the attributes of each module in order, and which objects they are, to see whether any has changed."""
    return [[(name, id(value)) for name, value in vars(module).items()] for module in model.modules()]
