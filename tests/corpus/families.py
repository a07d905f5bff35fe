"""The families of models that the installed transformers and diffusers have: their own lists, so that new ones come in.

A family is a `model_type` of transformers with the first class that trains it for one of `TASKS`, or a model class of
diffusers. Families of `tests/real_models.py` are left out.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "TIME_SERIES_PREDICTION",
    "TEXT_TO_WAVEFORM",
    "VIDEO_CLASSIFICATION",
    "DEPTH_ESTIMATION",
)
"""Tables of transformers' auto classes, in the order in which a family's class is looked for."""

ELSEWHERE = frozenset(
    [
        "albert",
        "bert",
        "clip",
        "convnext",
        "gpt2",
        "llama",
        "mamba",
        "mixtral",
        "resnet",
        "t5",
        "vit",
        "wav2vec2",
        "whisper",
        "UNet2DModel",
        "DiTTransformer2DModel",
    ]
)
"""Families that `tests/real_models.py` has."""


@dataclass(frozen=True, order=True)
class Family:
    """A family of models.

    Args:
        library: "transformers" or "diffusers".
        name: the `model_type`, or the name of the class in diffusers.
        task: the table of transformers that lists it; "" for diffusers.
        class_name: the class that is built.
    """

    library: str
    name: str
    task: str
    class_name: str

    def model_class(self) -> Any:
        """The class that is built."""
        return getattr(importlib.import_module(self.library), self.class_name)


def families() -> list[Family]:
    """All families of the installed versions, by name."""
    return sorted(_transformers() + _diffusers(), key=lambda family: family.name.casefold())


def _transformers() -> list[Family]:
    from transformers.models.auto import modeling_auto

    found: dict[str, Family] = {}
    for task in TASKS:
        for name, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            class_name = classes if isinstance(classes, str) else classes[0]
            if name not in ELSEWHERE:
                found.setdefault(name, Family("transformers", name, task, class_name))
    return list(found.values())


def _diffusers() -> list[Family]:
    from diffusers import models

    names = [name for modules in models._import_structure.values() for name in modules]
    denoisers = [name for name in names if "Transformer" in name or name.startswith("UNet")]
    return [
        Family("diffusers", name, "", name) for name in set(denoisers) - ELSEWHERE if name.endswith("Model")
    ]
