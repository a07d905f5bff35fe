"""Optimizers."""

# pyright: reportPrivateImportUsage=false
# (private names are what this file is for)

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch._subclasses import FakeTensor
from torch.optim.optimizer import _foreach_supported_types


@contextlib.contextmanager
def fakes_as_parameters(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Context in which optimizers treat fake tensors as they treat these parameters.

    On a GPU they run ops over all parameters at once (`_foreach`), unless the type of one of them is not in a list.

    Source: `_default_to_fused_or_foreach` and `_foreach_supported_types` (torch/optim/optimizer.py), to
    which DTensor is added in the same way (torch/distributed/tensor/__init__.py).
    """
    known: list[type] = _foreach_supported_types
    if not all(type(parameter) in known for parameter in parameters):
        yield
        return
    known.append(FakeTensor)
    try:
        yield
    finally:
        known.remove(FakeTensor)  # and nothing that others have added since
