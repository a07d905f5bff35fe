"""`--hf`: a model of transformers from its configuration, on the meta device, with a batch and an optimizer."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from autoac.cli.target import Target
from autoac.cli.users_code import TargetError

_NAME = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
"""A model's name on the hub: "owner/name", or a name alone."""


def load_pretrained(source: str, batch: int, seq: int, dtype: str | None, optimizer: str) -> Target:
    """A causal language model without its weights, in train mode and without a KV cache.

    Args:
        source: a configuration file (.json), a folder with config.json, or a model's name on the Hugging Face hub, of
            which transformers then fetches the configuration; weights are not read.
        batch, seq: rows and tokens of the sample, which has `input_ids` and `labels` of int64 [batch, seq].
        dtype: of the parameters; None for the configuration's.
        optimizer: "adamw" or "none".

    Raises:
        typer.BadParameter: there is no such file, or the model has fewer positions.
        TargetError: transformers cannot make a causal language model of it.
    """
    is_local = Path(source).exists()
    if not is_local and (source.endswith(".json") or not _NAME.fullmatch(source)):
        raise typer.BadParameter(
            f"there is no file or folder {source!r}, and a model's name on the hub is of another form.",
            param_hint="'--hf'",
        )
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=is_local, trust_remote_code=False)
        config.use_cache = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options).train()
            ids = torch.zeros(batch, seq, dtype=torch.int64)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).split("\n")[0]
        hint = "--hf is for causal language models; name a factory for any other model."
        raise TargetError(f"no model can be made of {source}: {line}", hint) from error
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq > positions:
        raise typer.BadParameter(f"the model has {positions} positions.", param_hint="'--seq'")
    stepping = torch.optim.AdamW(model.parameters()) if optimizer == "adamw" else None
    return Target(source, model, {"input_ids": ids, "labels": ids}, optimizer=stepping)
