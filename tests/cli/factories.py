"""What a user hands to the command line, right and wrong."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from tests.small_models import Blocks, batch, make


def small() -> tuple[Any, ...]:
    return make(blocks=4), batch()


def with_loss() -> tuple[Any, ...]:
    print("a user's model may print")
    return make(blocks=4), batch(), lambda output: output.square().mean()


def with_optimizer() -> dict[str, Any]:
    model = make(blocks=4)
    return {
        "model": model,
        "sample": batch(),
        "loss": lambda output: output.square().mean(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
    }


def differs() -> tuple[Any, ...]:
    """A model whose steps differ by themselves."""
    model = make(blocks=2)
    model.register_forward_pre_hook(lambda _, args: (args[0] + int.from_bytes(os.urandom(4)) / 2**32,))
    return model, batch()


def without_dropout() -> tuple[Any, ...]:
    return make(blocks=3, dropout=0.0), batch()


def whole_step() -> tuple[Any, ...]:
    model, x = make(blocks=3), batch()

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, step


def no_blocks() -> tuple[Any, ...]:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), batch()


class Fails(Blocks):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        raise RuntimeError("the first line\nand the second")


def fails_in_forward() -> tuple[Any, ...]:
    return Fails(), batch()


def narrower_sample() -> tuple[Any, ...]:
    return make(blocks=4), torch.randn(3, 5)


def sample_by_a_wrong_name() -> dict[str, Any]:
    return {"model": make(blocks=4), "sample": {"y": batch()}}


def raises() -> tuple[Any, ...]:
    raise ValueError("no weights here")


def takes_arguments(size: int) -> tuple[Any, ...]:
    return make(blocks=size), batch()


def returns_a_model() -> nn.Module:
    return make()


def returns_four() -> tuple[Any, ...]:
    return make(), batch(), None, None


def returns_no_model() -> tuple[Any, ...]:
    return "model", batch()


def misspells() -> dict[str, Any]:
    return {"model": make(), "sampel": batch()}


def without_sample() -> dict[str, Any]:
    return {"model": make()}


not_a_function = 3
