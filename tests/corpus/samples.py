"""What a family's model is trained on: random tensors, by the name of its main input and by its task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.corpus.configs import LENGTH, SIDE, WORDS


def words(*shape: int, known: int = WORDS) -> torch.Tensor:
    return torch.randint(6, known, shape)


def sample_for(model: Any, task: str, batch: int) -> dict[str, Any]:
    """Keyword arguments of a step of the model.

    Raises:
        NotImplementedError: for inputs that no rule here knows.
    """
    name = model.main_input_name
    sample = _main_input(model, name, task, batch)
    accepted = _parameters(model)
    if "decoder_input_ids" in accepted and getattr(model.config, "decoder_start_token_id", None) is None:
        model.config.decoder_start_token_id = 1
    if "labels" in accepted and getattr(model.config, "pad_token_id", 0) is None:
        model.config.pad_token_id = 0
    if task.endswith("LM") or task == "SPEECH_SEQ_2_SEQ":
        length = LENGTH if name == "input_ids" else LENGTH // 2
        sample["labels"] = (
            sample["input_ids"]
            if task != "SEQ_TO_SEQ_CAUSAL_LM" and name == "input_ids"
            else words(batch, length)
        )
    elif task in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION"):
        sample["labels"] = torch.arange(batch) % 2
    elif task == "CTC":
        sample["labels"] = words(batch, 3)
    if "use_cache" in accepted:
        sample["use_cache"] = False
    return {key: value for key, value in sample.items() if key in accepted}


def _main_input(model: Any, name: str, task: str, batch: int) -> dict[str, Any]:
    config = model.config.get_text_config() if name == "input_ids" else model.config
    if name == "input_ids":
        known = min(WORDS, getattr(config, "vocab_size", None) or WORDS)  # a speech model's may be letters
        return {"input_ids": words(batch, LENGTH, known=known)}
    if name in ("pixel_values", "pixel_values_videos"):
        channels = getattr(config, "num_channels", 3)
        size = getattr(config, "image_size", SIDE)
        height, width = (size, size) if isinstance(size, int) else size
        frames = (
            (getattr(config, "num_frames", getattr(config, "frames_per_clip", 2)),) if "VIDEO" in task else ()
        )
        return {name: torch.randn(batch, *frames, channels, height, width)}
    if name == "input_values" and hasattr(config, "max_length") and hasattr(config, "num_mel_bins"):
        return {name: torch.randn(batch, config.max_length, config.num_mel_bins)}
    if name == "input_values":
        return {name: torch.randn(batch, 4000)}
    if name == "input_features":
        encoder = getattr(config, "encoder_config", config)
        bins = getattr(encoder, "num_mel_bins", None) or getattr(
            encoder, "feature_projection_input_dim", None
        )
        bins = bins or getattr(config, "input_feat_per_channel", 16)
        return {name: torch.randn(batch, 64, bins)}
    raise NotImplementedError(f"no rule for models whose main input is {name!r}")


def _parameters(model: Any) -> set[str]:
    import inspect

    return set(inspect.signature(model.forward).parameters)


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss, or the mean square of all that it returns."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = [t.float().square().mean() for t in _tensors(output) if t.requires_grad]
    return torch.stack(found).sum()


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "values"):
        for value in output.values():
            yield from _tensors(value)
