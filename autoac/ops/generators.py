"""The generators that an op may draw from, and their states.

NOTE [ States of generators and other threads ]
  Torch holds a generator's C++ lock while it makes the Python object of the state it returns, and waits for that lock
  without releasing Python's (THPGenerator_getState in torch/csrc/Generator.cpp). Before Python 3.12, making an object
  may run the garbage collector, whose finalizers may let another thread run. If that thread asks for the state of the
  same generator, the two wait for each other forever. So states are read and set by one thread at a time, and without
  garbage collection. Other libraries' threads that read states do not take part.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch

from autoac.ops.info import OpInfo, read_tensors
from autoac.torch_private import default_generator, is_fake
from autoac_solver.records.names import region_in_words


def generators_of(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generator that a random op draws from; for an unknown op, all that it may draw from."""
    given = info.generator(args, kwargs)
    if given is not None:
        return [given]
    if not info.unknown:
        return [default_generator(_device(info, args, kwargs))]
    tensors = [tensor for tensor in read_tensors(info, args, kwargs) if not is_fake(tensor)]
    devices = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "meta")
    return [default_generator(device) for device in {torch.device("cpu"): None} | devices]


_one_at_a_time = threading.RLock()


def state_of(generator: torch.Generator) -> torch.Tensor:
    """A generator's state, see NOTE [ States of generators and other threads ]."""
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return generator.get_state()
        finally:
            if collects:
                gc.enable()


def set_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Set a generator's state, see NOTE [ States of generators and other threads ]."""
    with _one_at_a_time:
        generator.set_state(state)


def _device(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    for position in info.tensors:
        if position < len(args) and args[position] is not None:
            return args[position].device
    return torch.device("cpu")


def disturbed(func: Any, region: str) -> RuntimeError:
    """The error of an op that drew other random numbers for backward than in forward."""
    return RuntimeError(_DISTURBED.format(op=func, region=region_in_words(region)))


_DISTURBED = (
    "{op} in {region} must draw its random numbers again for backward, and drew others: another thread has "
    "drawn from the same generator in between, or what the op is given has changed. Give that thread a "
    "`torch.Generator` of its own (`torch.rand(..., generator=g)`), or plan with a larger budget, so that the op is "
    "not run again."
)
