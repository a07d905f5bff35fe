"""The models that are trained on ranks: the small one of blocks, and a Llama and a ViT of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import batch, make
from torch import nn

from tests import real_models


@dataclass(frozen=True)
class Subject:
    """A model, and its batch on each rank as (arguments, keywords)."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]


def _seeded(make_one: Callable[[], real_models.RealModel], seed: int = 0) -> real_models.RealModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_one()


def _real(make_one: Callable[[], real_models.RealModel]) -> Subject:
    def batch_of(rank: int) -> Any:
        sample = _seeded(make_one, rank).sample
        return (sample, {}) if isinstance(sample, tuple) else ((), sample)

    return Subject(lambda: _seeded(make_one).model, batch_of)


SUBJECTS = {
    "Net": Subject(make, lambda rank: ((batch(rank),), {})),
    "Llama": _real(real_models.llama),
    "ViT": _real(real_models.vit),
}
