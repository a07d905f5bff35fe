"""Parsing of memory amounts and overheads; internally bytes are ints and seconds are floats."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

from autoac_solver.records.disk.limits import MOST_BYTES
from autoac_solver.records.errors import BudgetFormatError
from autoac_solver.records.format import format_bytes, format_seconds

__all__ = ["format_bytes", "format_seconds", "parse_bytes", "parse_overhead"]

_UNIT_BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT = re.compile(r"\s*([0-9]{1,1000}(?:\.[0-9]{1,1000})?)\s*(%|[kmgt]i?b)\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*%\s*")
_POSSIBLE = (
    "a positive int is bytes; as text write a number and a unit: KB, MB, GB, TB (powers of 1000) or "
    'KiB, MiB, GiB, TiB (powers of 1024), for example "20GB" or "18.5 GiB"; "80%" is of the device\'s total memory'
)


def parse_bytes(value: int | str, total_bytes: int | None = None) -> int:
    """Parse an amount of memory into bytes, rounded down.

    Args:
        value: bytes as an int, or text such as "20GB", "18.5 GiB" or "80%".
        total_bytes: the total that a percentage refers to; None if unknown.

    Returns:
        The amount in bytes, at least 1.

    Raises:
        BudgetFormatError: anything else; units are never guessed ("20" and "20G" are refused).
    """
    amount_bytes = _from_text(value, total_bytes) if isinstance(value, str) else _from_int(value)
    if amount_bytes < 1:
        raise BudgetFormatError(f"{_shown(value)} is not a positive number of bytes: {_POSSIBLE}")
    if amount_bytes > MOST_BYTES:
        raise BudgetFormatError(f"{_shown(value)} is more than any device has: {_POSSIBLE}")
    return amount_bytes


def parse_overhead(value: float | str) -> float:
    """Parse an overhead into extra time / step time.

    Args:
        value: text such as "5%", or the share as a number from 0 to 1.

    Raises:
        ValueError: anything else; 5 is refused, because it may mean 5 % or five times.
    """
    share = value
    if isinstance(value, str):
        match = _PERCENT.fullmatch(value)
        share = None if match is None else float(match[1]) / 100
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(
            f'max_overhead is {_shown(value)}; write extra time as a share of the step\'s: "5%", or 0.05, at most 1.'
        )
    return float(share)


def _shown(value: object) -> str:
    """The value as written, truncated if it is very long."""
    if isinstance(value, int) and abs(value) > 10**100:
        return "an int of more than 100 digits"
    return repr(value) if len(repr(value)) < 200 else f"{value!r:.80}..."


def _from_int(value: object) -> int:
    """An int (numpy ints, too) as bytes; bools are refused."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        meant = (
            f"; for bytes write int({value!r})" if isinstance(value, float) and 1 <= value < math.inf else ""
        )
        raise BudgetFormatError(f"{value!r} is not an amount of memory{meant}: {_POSSIBLE}")
    return operator.index(value)  # pyright: ignore[reportArgumentType]


def _from_text(text: str, total_bytes: int | None) -> int:
    """A number with a unit, or a percentage of `total_bytes`."""
    match = _TEXT.fullmatch(text)
    if match is None:
        # Some tools read "20G" as 20 x 10^9 bytes, others (docker, slurm, the JVM) as 20 x 2^30.
        unit_cut_short, short = _TEXT.fullmatch(text.strip() + "B"), text.strip()
        meant = ""
        if unit_cut_short:
            meant = f', did you mean "{short}B"' + ("?" if short[-1] in "iI" else f' or "{short}iB"?')
        raise BudgetFormatError(f"{_shown(text)} is not an amount of memory{meant}: {_POSSIBLE}")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit != "%":
        return int(number * _UNIT_BYTES[unit])
    if total_bytes is None:
        raise BudgetFormatError(
            f"{text!r} is a share of a total that is not known here: give bytes instead, {_POSSIBLE}"
        )
    if number > 100:
        raise BudgetFormatError(
            f"{text!r} is more than the total of {format_bytes(total_bytes)}: {_POSSIBLE}"
        )
    return int(number * total_bytes / 100)
