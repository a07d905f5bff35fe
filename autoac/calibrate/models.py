"""Two models in plain torch, made of common layers: a Llama-shaped decoder and a bottleneck ResNet.

`autoac calibrate` times them, and `autoac selfcheck` trains them; nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Sample = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a decoder."""

    layers: int
    width: int
    hidden: int
    heads: int
    key_heads: int
    vocabulary: int
    length: int
    batch: int


@dataclass(frozen=True)
class ResNetShape:
    """Sizes of a convolutional network: blocks and channels of each stage."""

    blocks: tuple[int, ...]
    channels: tuple[int, ...]
    pixels: int
    batch: int


LLAMA = {
    "tiny": LlamaShape(4, 128, 352, 4, 2, 512, 64, 2),
    "small": LlamaShape(8, 384, 1024, 6, 2, 4096, 256, 4),
    "full": LlamaShape(16, 2048, 5632, 16, 8, 32000, 2048, 4),
}
RESNET = {
    "tiny": ResNetShape((2, 2), (16, 32), 32, 4),
    "small": ResNetShape((2, 3, 4), (32, 64, 128), 96, 8),
    "full": ResNetShape((3, 4, 23, 3), (64, 128, 256, 512), 224, 64),
}


class DecoderLayer(nn.Module):
    """Attention with rotary positions and shared key heads, then a gated MLP; RMS norms before both."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.heads, self.key_heads = shape.heads, shape.key_heads
        self.head_width = shape.width // shape.heads
        keys = shape.key_heads * self.head_width
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, keys, bias=False)
        self.value = nn.Linear(shape.width, keys, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        x = x + self.output(self._attend(self.attention_norm(x), cosine, sine))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _attend(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        query = self.query(x).view(batch, length, self.heads, self.head_width).transpose(1, 2)
        key = self.key(x).view(batch, length, self.key_heads, self.head_width).transpose(1, 2)
        value = self.value(x).view(batch, length, self.key_heads, self.head_width).transpose(1, 2)
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        repeats = self.heads // self.key_heads
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).reshape(batch, length, -1)


def _rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


class Llama(nn.Module):
    """A decoder whose output is the loss of predicting each next token."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        width = shape.width // shape.heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(shape.length), frequencies).repeat(1, 2)
        self.cosine: torch.Tensor
        self.sine: torch.Tensor
        self.register_buffer("cosine", angles.cos())
        self.register_buffer("sine", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1])
        length = x.shape[1]
        for layer in self.layers:
            x = layer(x, self.cosine[:length], self.sine[:length])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


class Bottleneck(nn.Module):
    """Three convolutions, the second one spatial, with a skip; the output has four times the channels."""

    def __init__(self, given: int, channels: int, stride: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(given, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.spatial = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * channels)
        changes = stride != 1 or given != 4 * channels
        self.skip = (
            nn.Sequential(nn.Conv2d(given, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels))
            if changes
            else nn.Identity()
        )
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.norm1(self.reduce(x)))
        y = self.act(self.norm2(self.spatial(y)))
        return self.act(self.norm3(self.expand(y)) + self.skip(x))


class ResNet(nn.Module):
    """A bottleneck ResNet whose output is the loss of classifying the pictures."""

    def __init__(self, shape: ResNetShape) -> None:
        super().__init__()
        first = shape.channels[0]
        self.stem = nn.Sequential(
            nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks, given = [], first
        for stage, (count, channels) in enumerate(zip(shape.blocks, shape.channels, strict=True)):
            for index in range(count):
                blocks.append(Bottleneck(given, channels, 2 if stage and not index else 1))
                given = 4 * channels
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(given, 1000)

    def forward(self, pictures: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stem(pictures))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), classes)


def llama(shape: LlamaShape, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Sample]:
    """A decoder in training mode and a batch of random tokens."""
    torch.manual_seed(0)
    model = Llama(shape).to(device=device, dtype=dtype)
    return model, (torch.randint(shape.vocabulary, (shape.batch, shape.length + 1), device=device),)


def resnet(shape: ResNetShape, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, Sample]:
    """A ResNet in training mode and a batch of random pictures."""
    torch.manual_seed(0)
    model = ResNet(shape).to(device=device, dtype=dtype)
    pictures = torch.randn(shape.batch, 3, shape.pixels, shape.pixels, device=device, dtype=dtype)
    return model, (pictures, torch.randint(1000, (shape.batch,), device=device))
