"""What a file may hold at most. More than this is damage or an attack, and is refused before anything is made of it.

Every limit is far above what a real profile or plan needs: a plan for a model of 80 layers is a file of some 10 MB,
nested six deep, with 27,000 ops.
"""

from __future__ import annotations

from typing import Any

MOST_FILE_BYTES = 2**28
"""Size of a file. Reading a plan takes some fifteen times as much memory, refusing a hostile file up to sixty."""
MOST_DEPTH = 32
"""Lists and objects inside of one another."""
MOST_CHARACTERS = 10_000
"""Length of a name or another text."""
MOST_BYTES = 2**60
"""Memory that a profile speaks of, all in all. Twice as much still fits the simulator's 64-bit sums."""
MOST_NUMBER = 2**60
"""Any whole number, up or down."""
MOST_SECONDS = 1e9
"""Any time."""


def is_text(value: Any) -> bool:
    """A text of sensible length without control characters, which could give orders to the reader's terminal."""
    return type(value) is str and len(value) <= MOST_CHARACTERS and value.isprintable()


def is_whole(value: Any) -> bool:
    """A whole number of sensible size; bool is none."""
    return type(value) is int and -MOST_NUMBER <= value <= MOST_NUMBER


def is_size(value: Any) -> bool:
    """A whole number that is not negative."""
    return is_whole(value) and value >= 0


def is_number(value: Any) -> bool:
    """A number of sensible size, neither infinite nor NaN."""
    return type(value) in (int, float) and abs(value) <= MOST_NUMBER


def is_seconds(value: Any) -> bool:
    """A duration."""
    return is_number(value) and 0 <= value <= MOST_SECONDS
