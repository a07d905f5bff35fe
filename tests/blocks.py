"""A small model of three equal blocks with dropout, for tests of what the engines do with a region."""

import torch
from torch import nn
from torch.nn import functional as F

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)

REGIONS = ("0", "1", "2")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.dropout(F.gelu(self.first(x)))))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def all_but_gelu(region: str, op: str, nth: int) -> bool:
    return op != "aten.gelu.default"
