"""The families whose ops are compared: those of `tests.real_models`, and some that take other ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests import real_models
from tests.real_models import WORDS, RealModel, causal_lm, with_labels


def wav2vec2_encoder() -> RealModel:
    """Without the CTC loss, whose shapes depend on values."""
    from transformers import Wav2Vec2Model

    config: Any = real_models.wav2vec2().model.config
    config.apply_spec_augment = False  # picks frames by their values
    return RealModel(Wav2Vec2Model(config), (torch.randn(2, 400),), lambda output: output[0].square().mean())


def gpt_neox() -> RealModel:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        hidden_dropout=0.1,
        attention_dropout=0.0625,
    )
    return causal_lm(GPTNeoXForCausalLM, config)


def qwen3() -> RealModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return causal_lm(Qwen3ForCausalLM, config)


def swin() -> RealModel:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.0,
    )
    labels = torch.tensor([0, 1, 1, 0])
    return with_labels(
        SwinForImageClassification(config), pixel_values=torch.randn(4, 3, 32, 32), labels=labels
    )


def autoencoder() -> RealModel:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    sizes: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
    }
    model = AutoencoderKL(**sizes, norm_num_groups=4, layers_per_block=1)
    return RealModel(model, (torch.randn(2, 3, 16, 16),), lambda output: output[0].square().mean())


class _SharesHeads(nn.Module):
    """A block of today's decoders in plain torch: `nn.RMSNorm`, attention whose key heads are shared, SwiGLU."""

    def __init__(self, width: int = 64, heads: int = 4, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.each = heads, shared, width // heads
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.query = nn.Linear(width, width, bias=False)
        self.key_and_value = nn.Linear(width, 2 * shared * self.each, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(*sizes, bias=False) for sizes in ((width, 96), (width, 96), (96, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        key, value = self.key_and_value(y).unflatten(-1, (2, self.shared, self.each)).unbind(2)
        query = self.query(y).unflatten(-1, (self.heads, self.each))
        attended = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True, enable_gqa=True
        )
        x = x + attended.transpose(1, 2).flatten(2)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def plain_decoder() -> RealModel:
    model = nn.Sequential(_SharesHeads(), _SharesHeads(), nn.RMSNorm(64))
    return RealModel(model, (torch.randn(2, 16, 64),), lambda output: output.square().mean())


class _ManyCasts(nn.Module):
    """Ops of each list of autocast's, in and out of order: those that models of today rarely take."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.vector = nn.Parameter(torch.randn(8))
        self.table = nn.Parameter(torch.randn(3, 8))
        self.linear, self.slope = nn.Linear(8, 8), nn.PReLU()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding="same"), nn.GroupNorm(2, 8)
        self.pair = nn.Bilinear(8, 8, 8)

    def forward(self, x: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
        y = self.slope(self.linear(x))  # in half precision under autocast
        rows = torch.cat([y, x], dim=0)
        z = torch.einsum("bi,ij->bj", rows, self.weight) + torch.outer(
            torch.mv(rows, self.vector), self.vector
        )
        z = (
            torch.addcmul(z, y.repeat(2, 1), x.repeat(2, 1))
            + torch.cross(z[:, :3], x[:1, :3].expand(8, 3), dim=1).sum()
        )
        z = (
            z
            + self.pair(z, rows)
            + torch.atan2(y.repeat(2, 1), rows)
            + torch.tensordot(y, self.weight, 1).repeat(2, 1)
        )
        grown = F.interpolate(self.norm(self.conv(picture)), scale_factor=2, mode="bilinear")
        grown = F.grid_sample(self.conv(grown), torch.zeros(2, 4, 4, 2, device=x.device), align_corners=False)
        filled = torch.zeros_like(z).index_put((torch.tensor([0, 1]),), y[:2].to(z.dtype))
        filled = filled.scatter_add(
            0, torch.zeros(2, 8, dtype=torch.long, device=x.device), y[:2].to(z.dtype)
        )
        values = (
            torch.cdist(y, self.table),
            F.cosine_similarity(y, x),
            y.norm(),
            y.norm(2, dim=1),
            torch.linalg.norm(y),
            F.normalize(y),
            y.softmax(-1),
            y.log_softmax(-1),
            F.softmax(y, -1, dtype=y.dtype),
            y.logsumexp(-1),
            y.cumsum(0),
            y.prod(),
            y.sum(0),
            y.mean(0),
            y.std(),
            y.pow(2),
            2**y,
            y.exp(),
            F.softplus(y),
            y.abs().add(1).rsqrt(),
            y.abs().add(1).log(),
            F.layer_norm(y, (8,)),
            F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="batchmean"),
            F.smooth_l1_loss(y, x),
            F.l1_loss(y, x),
            F.huber_loss(y, x),
            F.binary_cross_entropy_with_logits(y, x.sigmoid()),
            F.mse_loss(y, x),
            torch.dist(y, x),
            torch.dot(y[0], self.vector.to(y.dtype)),
            F.avg_pool2d(self.conv(picture), 2),
            torch.stack([y, y]),
            grown,
            filled,
            z,
        )
        return torch.stack([value.float().sum() for value in values])


def many_casts() -> RealModel:
    sample = torch.randn(4, 8), torch.randn(2, 8, 4, 4)
    return RealModel(_ManyCasts(), sample, lambda output: output.square().mean())


_NOT_ON_FAKES = ("wav2vec2", "lstm")  # shapes that depend on values; cuDNN's recurrent layers want a driver
ALL: dict[str, Callable[[], RealModel]] = {
    **{name: build for name, build in real_models.ALL.items() if name not in _NOT_ON_FAKES},
    **{
        build.__name__: build
        for build in (wav2vec2_encoder, gpt_neox, qwen3, swin, autoencoder, plain_decoder, many_casts)
    },
}
