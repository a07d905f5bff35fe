"""Random numbers that are drawn one at a time, which decide what a step runs: layer drop, stochastic depth.

NOTE [ Steps that vary ]
  1. A step varies where code draws one number and then decides by it: whether a layer is called, how many are. A mask
     of dropout is drawn as many numbers, and takes the same bytes whatever they are.
  2. So while a step is recorded, each number that is drawn by itself comes out as large as it can (`HIGH`). A layer
     that is skipped where the number is below its rate is then called, and so are all such layers at once.
  3. Where single numbers are drawn at all, the step is also run with the least ones (`LOW`) and with those that
     chance brings (`CHANCE`). The decided step that calls the most modules is planned for; no luck is needed.
  4. Only the values change. Generators advance as ever, and are put back with everything else. The recomputation of a
     draw comes out as the draw did.
  5. A step in which nothing is called, or everything, may be none: it has no gradients, say. Where a decided step
     fails, chance decides.
  6. Code that draws until it likes a number would never end: after `_MOST` draws in a step, chance decides again.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoac.torch_private import disable_dispatch_modes, is_fake, unset_fake_temporarily

HIGH, LOW, CHANCE = "high", "low", "chance"

_MOST = 10_000
_LEAST, _ALMOST_ONE = 2.0**-24, 1.0 - 2.0**-24
_PYTHONS = (random, ("random", "uniform"))
_NUMPYS = ("random", "random_sample", "rand", "uniform")

known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
"""Storages of single numbers with real values while a step runs on fake tensors, and of what is computed of them."""


class SingleDraws:
    """Context for one step: counts the numbers that are drawn by themselves, and says what they are.

    Args:
        outcome: `HIGH`, `LOW` or `CHANCE`.

    Attributes:
        count: how many were drawn so far, by torch, Python's `random` and numpy.
    """

    def __init__(self, outcome: str = CHANCE):
        self.outcome = outcome
        self.count = 0

    @property
    def has_decided(self) -> bool:
        """Whether any number was not what chance had brought."""
        return self.outcome != CHANCE and self.count > 0

    def _is_to_decide(self) -> bool:
        self.count += 1
        return self.outcome != CHANCE and self.count <= _MOST

    # -- torch's -----------------------------------------------------------------------------------------------

    def drawn(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """An op that draws random numbers has run; returns what is to be taken for its result."""
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            return result
        name = func.overloadpacket.__name__
        bounds = _BOUNDS.get(name)
        if bounds is None or not self._is_to_decide():
            return result
        low, high = bounds(*args, **kwargs)
        value = high if self.outcome == HIGH else low
        if is_fake(result):
            return result if name.endswith("_") else _known(result, value)
        with disable_dispatch_modes(), torch.no_grad():
            result.data.fill_(value)
        return result

    # -- Python's and numpy's ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def of_python(self) -> Iterator[None]:
        """Context in which single numbers of Python's `random` and of numpy, drawn in this thread, are decided, too."""
        places: list[tuple[Any, str]] = [(_PYTHONS[0], name) for name in _PYTHONS[1]]
        if "numpy" in sys.modules:
            places += [(sys.modules["numpy"].random, name) for name in _NUMPYS]
        originals = [(owner, name, getattr(owner, name)) for owner, name in places]
        thread = threading.get_ident()
        try:
            for owner, name, original in originals:
                setattr(owner, name, self._deciding(original, name == "uniform", thread))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _deciding(self, original: Callable[..., Any], has_bounds: bool, thread: int) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if threading.get_ident() != thread or getattr(value, "size", 1) != 1:
                return value
            if not self._is_to_decide():
                return value
            low, high = _bounds_of_uniform(args, kwargs) if has_bounds else (0.0, 1.0)
            share = _ALMOST_ONE if self.outcome == HIGH else _LEAST
            wanted = low + share * (high - low)
            if isinstance(value, float):
                return type(value)(wanted)
            value[...] = wanted
            return value

        return draw


def _bounds_of_uniform(args: Any, kwargs: Any) -> tuple[float, float]:
    low = args[0] if args else kwargs.get("low", kwargs.get("a", 0.0))
    high = args[1] if len(args) > 1 else kwargs.get("high", kwargs.get("b", 1.0))
    return float(low), float(high)


def _known(fake: torch.Tensor, value: float) -> torch.Tensor:
    """A real tensor in place of a fake one."""
    with unset_fake_temporarily(), disable_dispatch_modes():
        real = torch.full(fake.shape, value, dtype=fake.dtype)
    known.add(real.untyped_storage())
    return real


def _unit(*_: Any, **__: Any) -> tuple[float, float]:
    return _LEAST, _ALMOST_ONE


def _uniform(_: Any, low: float = 0.0, high: float = 1.0, **__: Any) -> tuple[float, float]:
    return low + _LEAST * (high - low), low + _ALMOST_ONE * (high - low)


def _coin(of: torch.Tensor, p: float | torch.Tensor | None = None, **_: Any) -> tuple[float, float]:
    """A coin that always falls on the same side falls there."""
    share = of if p is None else p
    if isinstance(share, torch.Tensor):
        if is_fake(share) or share.numel() != 1:
            return 0.0, 1.0
        with disable_dispatch_modes():
            share = float(share)
    return float(share >= 1.0), float(share > 0.0)


def _whole(*args: Any, **_: Any) -> tuple[float, float]:
    """Of `randint`, whose upper end is excluded: (high, size) or (low, high, size)."""
    *low, high, _ = args
    return (low[0] if low else 0), high - 1


_BOUNDS: dict[str, Callable[..., tuple[float, float]]] = {
    "rand": _unit,
    "rand_like": _unit,
    "uniform": _uniform,
    "uniform_": _uniform,
    "bernoulli": _coin,
    "bernoulli_": _coin,
    "randint": _whole,
}
"""By an op's name, the least and the largest number that it draws, from its arguments."""
