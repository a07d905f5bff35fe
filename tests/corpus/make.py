"""A family's model with its sample, tiny and from random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.corpus import denoisers, samples
from tests.corpus.configs import small_config
from tests.corpus.families import Family
from tests.real_models import RealModel

MOST_PARAMETERS = 3_000_000
"""More are not tiny: a size that the rules do not know stayed as it was."""

BATCH, LARGE_BATCH = 4, 24
SEED = 0


class NotMadeError(Exception):
    """The rules of the corpus make no model, or no step, of this family: its message says where they failed."""


def make(family: Family, batch: int = BATCH) -> RealModel:
    """The family's model in training mode and a sample, always the same.

    Raises:
        NotMadeError: if the rules do not fit this family; no plan has anything to do with that.
    """
    torch.manual_seed(SEED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _made(family, batch)
    except NotMadeError:
        raise
    except Exception as error:  # whatever the library says of our numbers
        raise NotMadeError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def _made(family: Family, batch: int) -> RealModel:
    build = _builder(family)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build().parameters())
    if parameters > MOST_PARAMETERS:
        raise NotMadeError(f"{parameters} parameters are left")
    model = build().train()
    diffusers = family.library == "diffusers"
    sample = (
        denoisers.sample_for(model, batch) if diffusers else samples.sample_for(model, family.task, batch)
    )
    real = RealModel(model, sample, samples.loss_of)
    loss = real.loss(model(**sample))
    loss.backward()
    model.zero_grad(set_to_none=True)
    if not loss.isfinite():
        raise NotMadeError("the loss is not finite")
    return real


def _builder(family: Family) -> Callable[[], Any]:
    model_class = family.model_class()
    if family.library == "diffusers":
        return lambda: model_class(**denoisers.arguments(model_class))
    return lambda: model_class(small_config(model_class.config_class))
