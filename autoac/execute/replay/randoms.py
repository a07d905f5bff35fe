"""Random numbers of recorded ops: stash a generator's state, and draw the same numbers again from it.

NOTE [ Random numbers ]
  1. A generator's state is stashed before a recorded op draws from it. The replay of the op starts from that state, and
     leaves the generator as it found it.
  2. Threads share generators. Regions exclude each other by a lock (`drawing`), which other code's threads do not take.
     While there are other threads, an op that takes a generator is replayed with a private one. Any other op is
     replayed on the shared generator, and must leave it in the same state as in forward.
  3. Another thread may also draw in forward, between the stash and the op. So while there are other threads, a checksum
     of the state after the op is kept: a replay that ends in another state drew other numbers, and is an error.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autoac.ops.generators import disturbed, set_state, state_of
from autoac.ops.info import op_info
from autoac.torch_private import disable_dispatch_modes, overload_with_generator

drawing = threading.RLock()


class Stash:
    """A generator's state before an op, and a checksum of the state after it if other threads may interfere."""

    __slots__ = ("end", "generator", "state")

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self.state = state_of(generator)
        self.end: int | None = None

    def op_is_over(self) -> None:
        """Take the checksum after the op, if it is needed."""
        if threading.active_count() > 1:
            self.end = _checksum(self.generator)

    def has_drawn(self) -> bool:
        """Whether the generator's state has changed."""
        with disable_dispatch_modes():  # a tape below would take the states for tensors of the step
            return not torch.equal(self.state, state_of(self.generator))


def draw_again(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], stashes: Sequence[Stash], region: str
) -> Any:
    """Run an op with the numbers that it drew when its stashes were made.

    Raises:
        RuntimeError: another thread has drawn from the same generator in between.
    """
    with drawing:
        alone = threading.active_count() == 1
        private = None if alone or len(stashes) > 1 else _with_generator(func, args, kwargs)
        if private is not None:
            generator = _private(stashes[0].generator.device)
            set_state(generator, stashes[0].state)
            result = private(generator)
            _check(stashes[0], generator, func, region)
            return result
        found = [state_of(stash.generator) for stash in stashes]
        for stash in stashes:
            set_state(stash.generator, stash.state)
        try:
            result = func(*args, **kwargs)
            for stash in stashes:
                if not alone:
                    _check(stash, stash.generator, func, region)
            return result
        finally:
            for stash, state in zip(stashes, found, strict=True):
                set_state(stash.generator, state)


def _check(stash: Stash, generator: torch.Generator, func: Any, region: str) -> None:
    if stash.end is not None and _checksum(generator) != stash.end:
        raise disturbed(func, region)


def _with_generator(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[torch.Generator], Any] | None:
    """The op as a function of the generator that it draws from; None if it takes none."""
    where = op_info(func).generator_at
    if isinstance(where, str):
        return lambda generator: func(*args, **{**kwargs, where: generator})
    if where is not None and where < len(args):
        return lambda generator: func(*args[:where], generator, *args[where + 1 :], **kwargs)
    taking = None if where is not None else overload_with_generator(func)
    return None if taking is None else lambda generator: taking(*args, **kwargs, generator=generator)


class _Private(threading.local):
    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}


_privates = _Private()


def _private(device: torch.device) -> torch.Generator:
    found = _privates.generators.get(device)
    if found is None:
        found = _privates.generators[device] = torch.Generator(device)
    return found


def _checksum(generator: torch.Generator) -> int:
    state = state_of(generator)
    return zlib.crc32((ctypes.c_char * state.nbytes).from_address(state.data_ptr()))
