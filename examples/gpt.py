"""A small GPT as a model for the command line: `autoac plan examples/gpt.py:small --budget 60MB`.

A factory returns (model, sample), or (model, sample, loss), or a mapping that may also hold the optimizer; its
arguments, if any, come from `--arg`. Uses the GPU if there is one; takes seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(self.attention_norm(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        attended = F.scaled_dot_product_attention(*packed.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.dropout(self.projection(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """A decoder that returns logits."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _model_and_tokens() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(layers=6, width=192, heads=4, length=128, vocabulary=512).to(device)
    return model, torch.randint(512, (8, 129), device=device)


def small() -> tuple[Any, ...]:
    """Six blocks, 2.9 M parameters: (model, sample, loss)."""
    model, ids = _model_and_tokens()
    expected = ids[:, 1:].flatten()
    return model, ids[:, :-1], lambda logits: F.cross_entropy(logits.flatten(0, 1), expected)


def with_adamw() -> dict[str, Any]:
    """`small` with an optimizer, whose memory counts."""
    model, sample, loss = small()
    return {
        "model": model,
        "sample": sample,
        "loss": loss,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }
