"""Random numbers that torch's checkpoint does not restore: drawn beside other threads, or by Python and numpy.

NOTE [ The second run's random numbers ]
  1. torch stashes the states of its generators where the region begins, and sets them back for the second run. Threads
     share these generators: if another one draws before a random op, in either run, the op gets other numbers. So while
     there are other threads, the results of random ops that run again are compared (`Drawn`); a difference is an
     error. On a GPU, where reading results would make the host wait, the generator's seed and offset after the op are
     compared instead. That misses a draw right before the op in one run and right after it in the other.
  2. Nothing is compared in a process with one thread. No tensor is made for it: predicted peaks hold either way.
  3. The generators of Python's `random` and of `numpy.random` are set back for regions that draw from them
     (`HostRandoms`). Whether a region does is seen in its first call, since reading numpy's state takes long. If it was
     another thread that drew then, the second run draws nothing, and the states are left alone from then on.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Self

import numpy as np

from autoac.device import streams
from autoac.execute.checksums import checksum_in_little_memory
from autoac.ops.generators import disturbed, generators_of
from autoac.ops.info import OpInfo, op_info, tensors_in
from autoac.step.restore import host_random_states
from autoac.torch_private import TorchDispatchMode, is_sharded_type, on_fake_tensors

Result = tuple[Any, ...]
"""The properties of a random op's result that are compared between the two runs."""


class Drawn:
    """Results of the random ops of one call of a region in the first run, by overload, in order."""

    def __init__(self) -> None:
        self.results: dict[Any, deque[Result]] = {}

    def add(self, func: Any, info: OpInfo, args: Any, kwargs: Any, result: Any) -> None:
        """Note an op that has drawn from a shared generator, and will run again."""
        self.results.setdefault(func, deque()).append(_compared(info, args, kwargs, result))


class DrawingTheSame(TorchDispatchMode):
    """Compares random ops with the first run's. To be entered before selective checkpointing, so that it sees only the
    ops that run again.

    Args:
        drawn: by the first run.
        region: its name, for the error.
    """

    supports_higher_order_operators = True

    def __init__(self, drawn: Drawn, region: str):
        super().__init__()
        self.left = {
            func: deque(results) for func, results in drawn.results.items()
        }  # there may be another backward
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_sharded_type, types)):
            return NotImplemented  # the policy has seen the ops on the local parts
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        expected = self.left.get(func)
        if expected and not on_fake_tensors():
            info = op_info(func)
            if may_draw(info, args) and _compared(info, args, kwargs, result) != expected.popleft():
                raise disturbed(func, self.region)
        return result


def may_draw(info: OpInfo, args: Any) -> bool:
    """Whether a call may draw random numbers; an op of a library may do so without being declared random."""
    return info.unknown or info.draws_random(args)


def _compared(info: OpInfo, args: Any, kwargs: Any, result: Any) -> Result:
    tensors = list(tensors_in(result))
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tuple(map(checksum_in_little_memory, tensors))
    by = streams()
    generators = [g for g in generators_of(info, args, kwargs) if by is not None and by.has(g)]
    return tuple((generator.initial_seed(), generator.get_offset()) for generator in generators)


class HostRandoms:
    """The states of Python's `random` and of `numpy.random` where a region begins; a context that sets them back."""

    def __init__(self) -> None:
        self.states = host_random_states()
        self.drew = True  # whether anything was drawn within the context

    def changed(self) -> bool:
        """Whether anything was drawn since."""
        now = host_random_states()
        return [_flat(state) for _, state in self.states] != [_flat(state) for _, state in now]

    def __enter__(self) -> Self:
        self.found = host_random_states()
        _set(self.states)
        return self

    def __exit__(self, *exception: Any) -> None:
        self.drew = self.changed()
        _set(self.found)


def _set(states: list[tuple[Any, Any]]) -> None:
    for set_state, state in states:
        set_state(state)


def _flat(state: Any) -> Any:
    """A state, to be compared: numpy's is a dictionary, which holds arrays."""
    if isinstance(state, dict):
        return tuple((key, _flat(item)) for key, item in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state
