"""Models that are split over ranks: a small transformer, a Llama, and the styles of their layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HEADS, LENGTH, WORDS, BATCH, LAYERS = 32, 4, 64, 64, 4, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = (
            layer(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = cast("list[Layer]", nn.ModuleList(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make() -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer()


class Autocast(Transformer):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(ids)


def make_autocast() -> Transformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Autocast()


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def ids(seed: int = 0) -> torch.Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def by_layer() -> dict[str, ParallelStyle]:
    """Attention and the two linear layers, each in parts; what is between is on all ranks."""
    return {
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }


def by_sequence() -> dict[str, ParallelStyle]:
    """What is between is split along the sequence; the residual stream is a DTensor, too."""
    part, whole = Shard(1), Replicate()
    to_part: dict[str, Any] = {"output_layouts": part, "use_local_output": False}
    gathered = {"input_layouts": (part,), "desired_input_layouts": (whole,)}
    return {
        **by_layer(),
        "words": RowwiseParallel(input_layouts=whole, **to_part),
        "layers.*.norm": SequenceParallel(),
        "layers.*.norm2": SequenceParallel(),
        "layers.*.attention": PrepareModuleInput(**gathered),
        "layers.*.attention.out": RowwiseParallel(**to_part),
        "layers.*.up": ColwiseParallel(input_layouts=part),
        "layers.*.down": RowwiseParallel(**to_part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


def with_loss_in_parts() -> dict[str, ParallelStyle]:
    """The logits stay in parts, for `loss_parallel`."""
    return {
        **by_layer(),
        "head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
    }


def split(model: Any, mesh: DeviceMesh, styles: Callable[[], dict[str, ParallelStyle]]) -> Any:
    return parallelize_module(model, mesh, styles())


def loss_of(output: Any) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids(1).flatten())
