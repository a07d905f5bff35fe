"""Compact text encoding of integer columns, for repetitive data inside a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def encode(values: Iterable[int]) -> str:
    """Encode differences of successive values in base 36; n equal differences d in a row become "d*n".

    For example, 5, 6, 7, 8 becomes "5 1*3". `decode` in data.js reads it.
    """
    column = np.fromiter(values, dtype=np.int64)
    if not len(column):
        return ""
    differences = np.diff(column, prepend=0)
    first_of_run = np.flatnonzero(np.diff(differences, prepend=differences[0] - 1))
    counts = np.diff(first_of_run, append=len(differences))
    runs = zip(differences[first_of_run].tolist(), counts.tolist(), strict=True)
    return " ".join(_base36(d) if n == 1 else f"{_base36(d)}*{_base36(n)}" for d, n in runs)


def changes(before: np.ndarray, after: np.ndarray) -> dict[str, str]:
    """The indices at which two columns of equal length differ, and the new values there."""
    at = np.flatnonzero(before != after)
    return {"at": encode(at), "to": encode(after[at])}


def _base36(value: int) -> str:
    sign, rest, digits = "-" if value < 0 else "", abs(value), ""
    while rest >= 36:
        rest, digit = divmod(rest, 36)
        digits = _DIGITS[digit] + digits
    return sign + _DIGITS[rest] + digits


class Numbered:
    """Numbers distinct things in the order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    @property
    def things(self) -> list[Any]:
        """The numbered things, in order."""
        return list(self._numbers)
