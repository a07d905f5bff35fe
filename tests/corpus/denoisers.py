"""Models of diffusers made small: their constructors' arguments by name, and a step that denoises a random latent."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

TEXT = 32
_BY_SIZE = {
    1: (
        "num_single_layers num_single_dit_layers num_visual_blocks approximator_layers num_refiner_layers "
        "n_refiner_layers num_text_blocks layers_per_block"
    ),
    2: (
        "num_attention_heads num_heads n_heads n_kv_heads num_cross_attention_heads num_key_value_heads "
        "ctrl_num_attention_heads num_layers n_layers num_hidden_layers depth num_mmdit_layers "
        "mmdit_layers num_frames"
    ),
    4: "in_channels out_channels norm_num_groups",
    5: "sample_frames",
    8: "max_text_seq_length",
    16: (
        "attention_head_dim head_dim cross_attention_head_dim linear_head_dim sample_size sample_width "
        "sample_height pos_embed_max_size"
    ),
    32: (
        "hidden_size dim model_dim caption_projection_dim approximator_hidden_dim text_dim text_embed_dim "
        "joint_attention_dim cross_attention_dim context_in_dim caption_channels text_in_dim in_text_dim "
        "in_text_dim2 cap_feat_dim pooled_projection_dim condition_dim text_emb_dim "
        "crossattn_proj_in_channels time_embed_dim time_dim adaln_dim freq_dim timestep_channels "
        "adaln_lora_dim"
    ),
    64: "intermediate_size ffn_dim ff_dim ffn_hidden_size ff_inner_dim rope_max_seq_len",
}
ARGUMENTS: Mapping[str, int] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""What these become, where a constructor has them and their default is a larger number."""


AXES = {2: (8, 8), 3: (4, 6, 6), 4: (4, 4, 4, 4)}
"""Parts of a head of 16, for positions of so many axes."""

WITHOUT_DEFAULT = ("cross_attention_dim", "in_channels", "sample_size", "text_embed_dim")
"""Arguments whose default is None, and which a model needs."""


def arguments(model_class: Any) -> dict[str, Any]:
    """The class's own defaults with small sizes."""
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(model_class.__init__).parameters.items():
        value: Any = parameter.default
        if name in ("axes_dims_rope", "rope_axes_dim") and isinstance(value, tuple):
            given[name] = AXES[len(value)]
        elif name == "block_out_channels" and isinstance(value, tuple):
            given[name] = (8, 16, 16, 16)[: len(value)]
        elif name in ARGUMENTS and not isinstance(value, bool):
            missing = value is inspect.Parameter.empty or (value is None and name in WITHOUT_DEFAULT)
            if missing or (isinstance(value, int) and value > ARGUMENTS[name]):
                given[name] = ARGUMENTS[name]
    return given


def sample_for(model: Any, batch: int) -> dict[str, Any]:
    """Keyword arguments of a step: a latent, times, and a text's embeddings where the model takes them."""
    taken = inspect.signature(model.forward).parameters
    config = model.config
    channels = config.in_channels
    dimensions = int(re.search(r"([123])D", type(model).__name__ + "2D").group(1))  # type: ignore[union-attr]
    latent = torch.randn(batch, channels, *((16,), (8, 8), (2, 8, 8))[dimensions - 1])
    if "CogVideo" in type(model).__name__ or "ConsisID" in type(model).__name__:
        latent = latent.transpose(1, 2)
    if "img_ids" in taken:  # packed: a sequence of patches with their places
        latent = torch.randn(batch, 16, channels)
    width = next((getattr(config, n) for n in _TEXT_WIDTHS if getattr(config, n, None)), TEXT)
    offered: dict[str, Any] = {
        "hidden_states": latent,
        "sample": latent,
        "timestep": torch.arange(batch) * 37 % 100 + 3,
        "encoder_hidden_states": torch.randn(batch, 8, width),
        "pooled_projections": torch.randn(batch, getattr(config, "pooled_projection_dim", TEXT)),
        "img_ids": torch.zeros(16, len(getattr(config, "axes_dims_rope", (0, 0, 0)))),
        "txt_ids": torch.zeros(8, len(getattr(config, "axes_dims_rope", (0, 0, 0)))),
        "encoder_attention_mask": torch.ones(batch, 8),
    }
    return {name: value for name, value in offered.items() if name in taken}


_TEXT_WIDTHS = (
    "text_dim", "text_embed_dim", "joint_attention_dim", "caption_channels", "context_in_dim", "cross_attention_dim",
)  # fmt: skip
