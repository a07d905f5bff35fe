"""Records this folder's profiles: `python profiles/record.py [name ...]`. See the README here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import autoac
from autoac.demo.gpt import GPT, Text

FOLDER = Path(__file__).resolve().parent


def gpt() -> autoac.Profile:
    """The GPT of `autoac demo`."""
    text = Text(seed=0)
    return autoac.profile(GPT(len(text.alphabet)), text.batch())


def unet() -> autoac.Profile:
    """A diffusers UNet, whose layers are of uneven size."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64, 96),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
        norm_num_groups=8,
    )
    sample = {"sample": torch.randn(8, 3, 32, 32), "timestep": torch.randint(1000, (8,))}
    return autoac.profile(model, sample, loss=lambda output: output.sample.mean())


def llama() -> autoac.Profile:
    """A Llama with 8B parameters, on a GPU that need not be there."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    ids = torch.zeros(4, 4096, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters())
    return autoac.profile(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer, device="h200")


PROFILES: dict[str, Callable[[], autoac.Profile]] = {
    "gpt-8-blocks-cpu": gpt,
    "unet-3-levels-cpu": unet,
    "llama-8b-h200-estimated": llama,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or PROFILES:
        profile = PROFILES[name]()
        profile.save(FOLDER / f"{name}.json")
        print(f"{name}: {profile}", *profile.notes, sep="\n    ")
