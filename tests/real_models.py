"""Models as people train them, tiny and from random numbers: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 61
PICTURES = (4, 3, 32, 32)


@dataclass(frozen=True)
class RealModel:
    """A model with what it is trained on.

    Args:
        model: in training mode.
        sample: positional (a tuple) or keyword arguments (a dict).
        loss: from the model's output to a scalar.
        target: what `loss` compares the output with, if the sample does not hold it.
    """

    model: nn.Module
    sample: dict[str, Any] | tuple[torch.Tensor, ...]
    loss: Callable[[Any], torch.Tensor]
    target: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All that is there before the step: parameters, buffers, sample and target."""
        values = self.sample.values() if isinstance(self.sample, dict) else self.sample
        given = [v for v in (*values, self.target) if isinstance(v, torch.Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *given]


def with_labels(model: nn.Module, **sample: Any) -> RealModel:
    """A model that computes its own loss, as those of transformers do when they are given labels."""
    return RealModel(model, sample, lambda output: output.loss)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(3, WORDS, shape)


def causal_lm(model: Callable[[Any], nn.Module], config: Any) -> RealModel:
    """A decoder that predicts the next words, without a cache."""
    ids = words(4, 32)
    return with_labels(model(config), input_ids=ids, labels=ids, use_cache=False)


# -- transformers ------------------------------------------------------------------------------------------------------


def gpt2() -> RealModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=3, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2
    )
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    return causal_lm(GPT2LMHeadModel, config)


def llama() -> RealModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return causal_lm(LlamaForCausalLM, config)


def bert() -> RealModel:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    ids = words(4, 32)
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[0, 20:] = 0
    return with_labels(BertForMaskedLM(config), input_ids=ids, attention_mask=mask, labels=ids)


def vit() -> RealModel:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=4,
        hidden_dropout_prob=0.1,
    )
    labels = torch.tensor([0, 1, 1, 0])
    return with_labels(ViTForImageClassification(config), pixel_values=torch.randn(PICTURES), labels=labels)


def resnet() -> RealModel:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 24, 32], depths=[2, 1, 1], layer_type="basic")
    labels = torch.tensor([0, 1, 1, 0])
    return with_labels(
        ResNetForImageClassification(config), pixel_values=torch.randn(PICTURES), labels=labels
    )


def convnext() -> RealModel:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 2, 1, 1],
        drop_path_rate=0.1,
        image_size=PICTURES[-1],
        patch_size=2,
    )
    labels = torch.tensor([0, 1, 1, 0])
    return with_labels(
        ConvNextForImageClassification(config), pixel_values=torch.randn(PICTURES), labels=labels
    )


def mixtral() -> RealModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    ids = words(4, 24)
    return with_labels(MixtralForCausalLM(config), input_ids=ids, labels=ids, use_cache=False)


def t5() -> RealModel:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=WORDS, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8)
    config.decoder_start_token_id = 0
    return with_labels(
        T5ForConditionalGeneration(config), input_ids=words(4, 24), labels=words(4, 16), use_cache=False
    )


def albert() -> RealModel:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=WORDS,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.1,
    )
    ids = words(4, 32)
    return with_labels(AlbertForMaskedLM(config), input_ids=ids, labels=ids)


def mamba() -> RealModel:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=WORDS, hidden_size=24, num_hidden_layers=2, state_size=4)
    ids = words(2, 12)
    return with_labels(MambaForCausalLM(config), input_ids=ids, labels=ids, use_cache=False)


def whisper() -> RealModel:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=24,
        max_target_positions=16,
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    features = torch.randn(4, 8, 48)
    return with_labels(
        WhisperForConditionalGeneration(config), input_features=features, labels=words(4, 12), use_cache=False
    )


def wav2vec2() -> RealModel:
    """Masks the time axis by numpy's random numbers."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=4,
        layerdrop=0.0,
    )
    return with_labels(Wav2Vec2ForCTC(config), input_values=torch.randn(2, 400), labels=words(2, 6))


def clip() -> RealModel:
    """Two towers."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "projection_dim": 16,
    }
    text = CLIPTextConfig(
        vocab_size=WORDS, max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes
    )
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    config = CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16)
    return with_labels(
        CLIPModel(config), input_ids=words(4, 16), pixel_values=torch.randn(PICTURES), return_loss=True
    )


# -- diffusers ---------------------------------------------------------------------------------------------------------


def unet() -> RealModel:
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
        dropout=0.1,
    )
    picture, noise = torch.randn(2, 3, 16, 16), torch.randn(2, 3, 16, 16)
    sample = {"sample": picture, "timestep": torch.tensor([3, 70])}
    return RealModel(model, sample, lambda output: F.mse_loss(output.sample, noise), noise)


def dit() -> RealModel:
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    latent, noise = torch.randn(4, 4, 8, 8), torch.randn(4, 4, 8, 8)
    sample = {
        "hidden_states": latent,
        "timestep": torch.tensor([3, 70, 5, 9]),
        "class_labels": torch.tensor([1, 2, 3, 4]),
    }
    return RealModel(model, sample, lambda output: F.mse_loss(output.sample, noise), noise)


# -- plain torch -------------------------------------------------------------------------------------------------------


def torch_transformer() -> RealModel:
    model = nn.Transformer(
        d_model=32,
        nhead=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        dim_feedforward=64,
        dropout=0.1,
        batch_first=True,
    )
    return RealModel(
        model, (torch.randn(4, 24, 32), torch.randn(4, 16, 32)), lambda output: output.square().mean()
    )


class Tagger(nn.Module):
    """A recurrent model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.encoder = nn.LSTM(24, 24, num_layers=2, dropout=0.2, bidirectional=True, batch_first=True)
        self.mixer = nn.Sequential(
            nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48)
        )
        self.head = nn.Linear(48, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.encoder(self.embedding(ids))
        return self.head(x + self.mixer(x))


def lstm() -> RealModel:
    ids, tags = words(4, 24), words(4, 24)
    return RealModel(
        Tagger(), (ids,), lambda logits: F.cross_entropy(logits.flatten(0, 1), tags.flatten()), tags
    )


class ConvBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(n_out)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class SegmentationUNet(nn.Module):
    """Down and up again, with skips across."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 16), ConvBlock(16, 24)])
        self.pool = nn.MaxPool2d(2)
        self.lift = nn.ModuleList([nn.ConvTranspose2d(24, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.up = nn.ModuleList([ConvBlock(32, 16), ConvBlock(16, 8)])
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x if not skips else self.pool(x))
            skips.append(x)
        skips.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([lift(x), skips.pop()], dim=1))
        return self.head(x)


def cnn_with_skips() -> RealModel:
    labels = torch.randint(0, 4, (2, 32, 32))
    return RealModel(
        SegmentationUNet(),
        (torch.randn(2, 3, 32, 32),),
        lambda logits: F.cross_entropy(logits, labels),
        labels,
    )


ALL: dict[str, Callable[[], RealModel]] = {
    build.__name__: build
    for build in (
        gpt2, llama, bert, vit, resnet, convnext, mixtral, t5, albert, mamba, whisper, wav2vec2, clip,
        unet, dit, torch_transformer, lstm, cnn_with_skips,
    )
}  # fmt: skip


def make(name: str, families: Mapping[str, Callable[[], RealModel]] | None = None) -> RealModel:
    """The model with this name, always the same, in training mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = (families or ALL)[name]()
    made.model.train()
    return made
