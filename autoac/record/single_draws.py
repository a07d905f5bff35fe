"""Single random draws, which decide what a step runs: layer drop, stochastic depth.

NOTE [ Steps that vary ]
  1. A step varies where code draws one number and branches on it: whether a layer is called, or how many are. A dropout
     mask is drawn as many numbers, and takes the same bytes whatever their values.
  2. So while a step is recorded, each single draw returns the largest value that it can (`HIGH`). A layer that is
     skipped if the draw is below its rate is then called, and so are all such layers at once.
  3. If there are single draws at all, the step also runs with the least values (`LOW`) and with random ones (`CHANCE`).
     Of the steps with decided draws, the one that calls the most modules is planned for; no luck is needed.
  4. Only the values change. Generators advance as usual, and are restored with everything else. A recomputed draw
     returns the value of the first one.
  5. A step that calls no layer, or all of them, may be invalid: it may have no gradients. If a step with decided draws
     fails, draws are random.
  6. Code that draws until a number meets a condition would never end: after `_MOST` draws in a step, draws are random.
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
"""Storages of single draws that have real values in a step on fake tensors, and of results computed from them."""


class SingleDraws:
    """Counts the single draws of one step, and decides their values.

    Args:
        outcome: `HIGH`, `LOW` or `CHANCE`.

    Attributes:
        count: single draws so far, by torch, Python's `random` and numpy.
    """

    def __init__(self, outcome: str = CHANCE):
        self.outcome = outcome
        self.count = 0

    @property
    def has_decided(self) -> bool:
        """Whether any draw was given a value that is not random."""
        return self.outcome != CHANCE and self.count > 0

    def _is_to_decide(self) -> bool:
        self.count += 1
        return self.outcome != CHANCE and self.count <= _MOST

    # -- torch's -----------------------------------------------------------------------------------------------

    def drawn(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Called after a random op; returns the result to use for it."""
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
        """Context in which single draws of Python's `random` and of numpy in this thread are decided as well."""
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
    """Both outcomes, unless the probability is 0 or 1."""
    share = of if p is None else p
    if isinstance(share, torch.Tensor):
        if is_fake(share) or share.numel() != 1:
            return 0.0, 1.0
        with disable_dispatch_modes():
            share = float(share)
    return float(share >= 1.0), float(share > 0.0)


def _whole(*args: Any, **_: Any) -> tuple[float, float]:
    """Least and largest integer that `randint` draws, called with (high, size) or (low, high, size)."""
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
"""Op name -> function of the op's arguments that returns the least and the largest value it draws."""
