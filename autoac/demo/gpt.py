"""The demo's model and data: a small GPT, and real text that every Python installation has.

The text is Python's own language reference as `pydoc_data` carries it, under the PSF licence.
"""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

BLOCKS, WIDTH, HEADS, CONTEXT, BATCH, DROPOUT = 8, 256, 4, 256, 8, 0.1

Batch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.projection(self._attend(self.attention_norm(x))))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, WIDTH)


class GPT(nn.Module):
    """A decoder over single characters; its output is the loss."""

    def __init__(self, n_characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(n_characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, n_characters)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.characters(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Text:
    """Batches of characters from Python's language reference, drawn by a generator of its own."""

    def __init__(self, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.alphabet = sorted(set(text))
        index = {character: i for i, character in enumerate(self.alphabet)}
        self.ids = torch.tensor([index[character] for character in text], dtype=torch.int64)
        self._generator = torch.Generator().manual_seed(seed)

    def batch(self) -> Batch:
        """Inputs, and targets that are one character ahead: int64 of shape (BATCH, CONTEXT) each."""
        starts = torch.randint(len(self.ids) - CONTEXT, (BATCH, 1), generator=self._generator)
        windows = self.ids[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1].clone(), windows[:, 1:].clone()
