"""Limits of a file's contents. More than this is damage or an attack, and is refused before any object is built.

Every limit is far above what a real profile or plan needs: a plan for a model of 80 layers is a file of some 10 MB,
nested six deep, with 27,000 ops.

The types below carry their limits; `schema` checks data against them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_FILE_BYTES = 2**27
"""Most bytes of a file. Together with the next two this keeps the memory for reading or refusing it below some 2 GB: a
list takes three bytes of a file and 72 of memory, so that the size alone would allow for several times as much."""
MOST_VALUES = 2**23
"""Most commas of a file, of which a plan has one in eight bytes."""
MOST_PARTS = 2**21
"""Most lists, objects and names in objects, of which a plan has one in seventy bytes; a name takes some 300 of memory.
"""
MOST_DEPTH = 32
"""Deepest nesting of lists and objects."""
MOST_CHARACTERS = 10_000
"""Most characters of a name or another text."""
MOST_BYTES = 2**60
"""Most bytes of memory in a profile, in total. Twice as much still fits the simulator's 64-bit sums."""
MOST_NUMBER = 2**60
"""Largest absolute value of an integer."""
MOST_SECONDS = 1e9
"""Longest time."""

# Unicode categories Cc, Cf, Cs, Co, Zl, Zp, and Zs except the space: they could control the reader's terminal, or make
# one name look like another. They are written out so that all Python versions refuse the same characters.
_UNPRINTABLE = (
    r"\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ud800-\uf8ff\ufeff\ufff0-\ufffb\ufffe\uffff\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000f0000-\U0010ffff"
)
PRINTABLE = rf"\A[^{_UNPRINTABLE}]*\Z"

Text = Annotated[str, Meta(max_length=MOST_CHARACTERS, pattern=PRINTABLE)]
"""A text within the length limit, without control characters."""
Whole = Annotated[int, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
"""An integer within the limits."""
Size = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""A non-negative integer within the limits."""
Number = Annotated[float, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
"""A float within the limits, neither infinite nor NaN."""
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
"""A non-negative duration within the limits."""


def one_of(*known: str) -> Meta:
    """Constraint on a text: one of `known`."""
    return Meta(pattern=rf"\A({'|'.join(known)})\Z")
