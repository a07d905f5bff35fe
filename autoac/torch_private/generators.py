"""Random number generators."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import functools
from typing import Any

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on this device use unless they are given one.

    Source: `default_generators` of torch.cuda (torch/cuda/__init__.py) and of other device modules.
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]


@functools.cache
def overload_with_generator(func: Any) -> Any:
    """The overload that takes a generator as well, of a factory such as `rand`; None if there is none.

    Source: the overloads named "generator" in torch's aten/src/ATen/native/native_functions.yaml.
    """
    if func._overloadname != "default" or func.namespace != "aten":
        return None
    taking = getattr(func.overloadpacket, "generator", None)
    if taking is None:
        return None
    own = [(a.name, str(a.type)) for a in func._schema.arguments]
    others = [(a.name, str(a.type)) for a in taking._schema.arguments if a.name != "generator"]
    return taking if own == others else None
