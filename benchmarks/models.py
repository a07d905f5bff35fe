"""The trained models: a GPT, a ResNet, an encoder-decoder and a ViT, with random weights and random data.

Each has two sizes: "full" is for the published table, "tiny" is for the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from autoac.compare.workload import Workload


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.projection(self._attend(self.attention_norm(x)))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    """A decoder whose output is the loss."""

    def __init__(self, blocks: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def gpt(size: str) -> Workload:
    """The GPT of the published table."""
    blocks, width, heads, length, batch, vocabulary = (
        (8, 384, 6, 256, 8, 4096) if size == "full" else (2, 32, 2, 16, 2, 64)
    )
    model = GPT(blocks, width, heads, length, vocabulary)
    ids = torch.randint(vocabulary, (batch, length + 1))
    title = f"GPT, {blocks} blocks, d {width}, {heads} heads, sequence {length}, batch {batch}, vocabulary {vocabulary}"
    return _workload("gpt", title, model, (ids[:, :-1].clone(), ids[:, 1:].clone()), "Block")


def resnet(size: str) -> Workload:
    """transformers' ResNet-50, or a small one with basic layers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, pixels = (8, 160) if size == "full" else (2, 32)
    config = ResNetConfig()
    if size != "full":
        config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    config.num_labels = 1000 if size == "full" else 5
    model = ResNetForImageClassification(config)
    sample = {
        "pixel_values": torch.randn(batch, 3, pixels, pixels),
        "labels": torch.randint(1000 if size == "full" else 5, (batch,)),
    }
    kind = "ResNet-50" if size == "full" else "small ResNet"
    title = f"transformers' {kind}, batch {batch}, {pixels} x {pixels} pixels"
    return _workload("resnet", title, model, sample, ("ResNetBottleNeckLayer", "ResNetBasicLayer"))


def t5(size: str) -> Workload:
    """transformers' T5 with its default dropout and the loss of its labels, without the cache for generation."""
    from transformers import T5Config, T5ForConditionalGeneration

    layers, width, heads, length, batch, vocabulary = (
        (4, 384, 6, 128, 8, 4096) if size == "full" else (2, 32, 2, 16, 2, 64)
    )
    config = T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        use_cache=False,
    )
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config)
    source, labels = (torch.randint(vocabulary, (batch, length)) for _ in range(2))
    title = (
        f"transformers' T5, {layers} + {layers} blocks, d {width}, {heads} heads, sequences {length}, batch {batch}, "
        f"vocabulary {vocabulary}, dropout {config.dropout_rate}"
    )
    return _workload("t5", title, model, {"input_ids": source, "labels": labels}, "T5Block")


def vit(size: str) -> Workload:
    """transformers' ViT with the loss of its labels."""
    from transformers import ViTConfig, ViTForImageClassification

    layers, width, heads, pixels, patch, batch = (
        (8, 384, 6, 160, 10, 8) if size == "full" else (3, 32, 2, 16, 4, 2)
    )
    config = ViTConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        image_size=pixels,
        patch_size=patch,
    )
    config.num_labels = 10
    sample = {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(10, (batch,))}
    title = f"transformers' ViT, {layers} blocks, d {width}, {heads} heads, {pixels} x {pixels} pixels, batch {batch}"
    return _workload("vit", title, ViTForImageClassification(config), sample, "ViTLayer")


MODELS: dict[str, Callable[[str], Workload]] = {"gpt": gpt, "resnet": resnet, "t5": t5, "vit": vit}
COMPARED = "gpt", "resnet", "t5"
"""What `benchmarks.compare` shows."""


def make(name: str, size: str, device: torch.device) -> Workload:
    """The model with this name, with fixed weights and data."""
    torch.manual_seed(0)
    with device:
        return MODELS[name](size)


def _workload(
    name: str, title: str, model: nn.Module, sample: Any, classes: str | tuple[str, ...]
) -> Workload:
    wanted = (classes,) if isinstance(classes, str) else classes
    blocks = tuple(fqn for fqn, module in model.named_modules() if type(module).__name__ in wanted)
    return Workload(name, title, model.train(), sample, blocks)
