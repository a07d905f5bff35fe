"""The private cache of parametrized parameters."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch.nn.utils import parametrize


def reads_cached_parametrizations(module: torch.nn.Module) -> bool:
    """Whether a call of the module now would find parametrized parameters in the cache of `parametrize.cached`.

    Source: `_cache_enabled` in torch/nn/utils/parametrize.py.
    """
    return parametrize._cache_enabled > 0 and any(map(parametrize.is_parametrized, module.modules()))
