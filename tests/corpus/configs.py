"""Configurations made small: a family's own default configuration, with its sizes replaced by their names.

What is no size (drop rates, activations, norms, positions, kinds of layers) stays as the family has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

WORDS = 99
LENGTH = 32
SIDE = 32

_BY_SIZE = {
    1: "first_k_dense_replace",
    2: (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers depth decoder_layers "
        "num_decoder_layers num_encoder_layers encoder_num_layers num_blocks num_key_value_heads "
        "decoder_num_key_value_heads encoder_num_key_value_heads linear_num_key_heads "
        "linear_num_value_heads n_group topk_group num_codebooks num_conv_pos_embedding_groups "
        "num_experts_per_tok moe_topk top_k_experts moe_k num_frames mask_time_length"
    ),
    4: (
        "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads attention_heads num_decoder_attention_heads "
        "decoder_num_attention_heads encoder_num_attention_heads num_experts num_local_experts "
        "n_routed_experts moe_num_experts index_n_heads mamba_n_heads window_size"
    ),
    5: "num_queries",
    8: (
        "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim d_head linear_key_head_dim "
        "linear_value_head_dim attention_head_size swa_head_dim kv_lora_rank q_lora_rank rotary_dim "
        "index_head_dim state_size mamba_d_state mamba_d_head num_conv_pos_embeddings "
        "hidden_size_per_layer_input sliding_window"
    ),
    9: "entity_vocab_size pronunciation_vocab_size shape_vocab_size",
    16: (
        "entity_emb_size flow_size num_mel_bins codevector_dim proj_codevector_dim classifier_proj_size "
        "xvector_output_dim"
    ),
    17: "spectrogram_bins",
    32: (
        "hidden_size d_model n_embd embed_dim dim embedding_size hidden_dim encoder_hidden_dim "
        "fusion_hidden_size pooler_output_size neck_out_channels moe_intermediate_size "
        "shared_expert_intermediate_size expert_dim emb_dim image_size"
    ),
    64: (
        "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner shared_intermediate_size "
        "intermediate_size_mlp feed_forward_dim max_position_embeddings n_positions max_source_positions "
        "max_target_positions upsample_initial_channel"
    ),
    99: "vocab_size n_words vocab_size_per_layer_input src_vocab_size tgt_vocab_size",
}
SIZES: Mapping[str, int] = {name: size for size, names in _BY_SIZE.items() for name in names.split()}
"""What these numbers become, where a configuration has them and they are larger."""

WIDTHS = (16, 24, 32, 48, 64)
LISTS: Mapping[str, tuple[int, ...]] = {
    "hidden_sizes": WIDTHS,
    "embed_dims": WIDTHS,
    "neck_hidden_sizes": WIDTHS,
    "encoder_hidden_sizes": WIDTHS,
    "conv_dim": (16,) * 10,
    "tdnn_dim": (16,) * 10,
    "depths": (1, 2, 1, 1, 1),
    "num_blocks": (1, 2, 1, 1, 1),
}
"""What lists of numbers become, at their own length."""


def small_config(config_class: Any) -> Any:
    """The class's default configuration with small sizes.

    Raises:
        Exception: whatever the class says of these numbers.
    """
    return config_class(**_arguments(config_class))


def _arguments(config_class: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    defaults = config_class()
    for name, parameter in inspect.signature(config_class.__init__).parameters.items():
        value = parameter.default if parameter.default is not None else getattr(defaults, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            if name in SIZES and value > SIZES[name]:
                given[name] = SIZES[name]
            elif name.endswith(("token_id", "token_index")) and value >= WORDS:
                given[name] = 5
        elif isinstance(value, (list, tuple)) and name in LISTS and len(value) <= len(LISTS[name]):
            given[name] = list(LISTS[name][: len(value)])
    if (getattr(defaults, "pad_token_id", None) or 0) >= WORDS:
        given["pad_token_id"] = 0
    heads, of_keys = (getattr(defaults, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
    if of_keys is not None and (of_keys == heads or "kv_lora_rank" in given):
        given["num_key_value_heads"] = SIZES["num_attention_heads"]  # no groups of heads
    if defaults.num_labels > 9:
        given["num_labels"] = 2
    for name, inner in getattr(config_class, "sub_configs", {}).items():
        inner = type(getattr(defaults, name, None)) if not hasattr(inner, "model_type") else inner
        if getattr(defaults, name, None) is not None and inspect.isclass(inner):
            given[name] = _arguments(inner)
    return given
