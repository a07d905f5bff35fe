"""A family held to the contract."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tests.contract import faults, subject
from tests.corpus.exceptions import KNOWN, NOTHING_TO_SAVE
from tests.corpus.families import Family, families
from tests.corpus.make import BATCH, LARGE_BATCH, NotMadeError, make

ENGINES = ("replay", "sac")
FRACTIONS = (0.0, 0.3, 0.7)
"""Budgets: the way from the least feasible one (0) to the peak with nothing recomputed (1)."""


@dataclass(frozen=True)
class Finding:
    """What came of a family.

    Args:
        kind: "kept", "broken", "known" (as named in `exceptions`), "nothing to save" or "not made".
        words: the faults, or why there was nothing to check.
    """

    kind: str
    words: tuple[str, ...] = ()


def check(family: Family) -> Finding:
    """Plan the family's model at three budgets for both engines, and hold its steps against those without a plan."""
    for batch in (BATCH, LARGE_BATCH):
        try:
            model = subject(make(family, batch))
        except NotMadeError as error:
            return Finding("not made", (str(error),))
        found = tuple(fault for engine in ENGINES for fault in faults(model, engine, FRACTIONS))
        if sum(NOTHING_TO_SAVE in fault for fault in found) < len(ENGINES):
            return _judged(family, found)
    return Finding("nothing to save", found)


def _judged(family: Family, found: tuple[str, ...]) -> Finding:
    broken = tuple(fault for fault in found if NOTHING_TO_SAVE not in fault)
    parts, _ = KNOWN.get(family.name, ((), ""))
    parts = (parts,) if isinstance(parts, str) else parts
    if not parts:
        return Finding("broken", broken) if broken else Finding("kept")
    others = tuple(fault for fault in broken if not any(part in fault for part in parts))
    if others or not broken:
        return Finding("broken", others) if others else Finding("kept")
    return Finding("known", broken)


def drawn(number: int, slot: int, slots: int) -> Iterator[Family]:
    """Families for one of some slots, in one draw; over the draws all have their turn.

    Args:
        number: of the draw, from 0.
    """
    every = families()
    # Neighbours in the list are relatives: a step that has no factor in common with its length leads to distant ones.
    step = next(s for s in range(len(every) // 3, len(every)) if math.gcd(s, len(every)) == 1)
    for position in range(number * slots + slot, number * slots + slot + len(every) * slots, slots):
        yield every[position * step % len(every)]
