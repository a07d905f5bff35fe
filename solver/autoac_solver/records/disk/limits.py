"""What a file may hold at most. More than this is damage or an attack, and is refused before anything is made of it.

Every limit is far above what a real profile or plan needs: a plan for a model of 80 layers is a file of some 10 MB,
nested six deep, with 27,000 ops.

The types below carry their limits with them; `schema` checks data against them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

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

# Unicode's categories Cc, Cf, Cs, Co, Zl, Zp, and Zs but for the space: they could give orders to the reader's
# terminal, or make one name look like another. Written out, so that all versions of Python refuse the same.
_UNPRINTABLE = (
    r"\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ud800-\uf8ff\ufeff\ufff0-\ufffb\ufffe\uffff\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000f0000-\U0010ffff"
)
PRINTABLE = rf"\A[^{_UNPRINTABLE}]*\Z"

Text = Annotated[str, Meta(max_length=MOST_CHARACTERS, pattern=PRINTABLE)]
"""A text of sensible length without control characters."""
Whole = Annotated[int, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
"""A whole number of sensible size."""
Size = Annotated[int, Meta(ge=0, le=MOST_NUMBER)]
"""A whole number that is not negative."""
Number = Annotated[float, Meta(ge=-MOST_NUMBER, le=MOST_NUMBER)]
"""A number of sensible size, neither infinite nor NaN."""
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
"""A duration."""


def one_of(*known: str) -> Meta:
    """For a text that is one of these."""
    return Meta(pattern=rf"\A({'|'.join(known)})\Z")
