"""A small model of blocks, and how the tests spread it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

WIDTH, BATCH = 32, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks one by one, and a pair of them that could be a region of its own."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = cast("list[Block]", nn.ModuleList(Block() for _ in range(blocks)))
        self.pair = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pair(x)).square().mean()


def make(blocks: int = 3) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(blocks)


def batch(rank: int = 0, rows: int = BATCH) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rank))


def sharded(model: Net, prefetch: int = 0, **options: Any) -> Net:
    """Block by block.

    Args:
        prefetch: how many blocks each block gathers ahead; 0 for FSDP2's own way.
    """
    from torch.distributed.fsdp import fully_shard

    blocks: list[Any] = [*model.layers, *model.pair]
    for block in blocks:
        fully_shard(block, **options)
    if prefetch:
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - prefetch) : place][::-1])
    return cast(Net, fully_shard(model, **options))


def trained(model: Any, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """The whole parameters after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    optimizer.zero_grad()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
