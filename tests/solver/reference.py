"""The definitions of `problem` word for word, slow and without numpy, and exhaustive search over all decisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autoac_solver.problem import Condition, Instance, Problem, Unit


def holds(problem: Problem, condition: Condition, recomputed: Sequence[bool]) -> bool:
    """Whether each literal that the condition has is true."""
    if condition.recomputed != -1 and not recomputed[condition.recomputed]:
        return False
    if condition.kept != -1 and recomputed[condition.kept]:
        return False
    return condition.wrapped == -1 or is_wrapped(problem, condition.wrapped, recomputed)


def is_wrapped(problem: Problem, region: int, recomputed: Sequence[bool]) -> bool:
    """Whether any unit of the region is recomputed."""
    return any(again for unit, again in zip(problem.units, recomputed, strict=True) if unit.region == region)


def is_alive(problem: Problem, instance: Instance, recomputed: Sequence[bool], position: int) -> bool:
    """Whether an instance lives at a position."""
    ends = [holder.end for holder in instance.holders if holds(problem, holder.when, recomputed)]
    lives = instance.start <= position < max([instance.end, *ends])
    return lives and holds(problem, instance.exists, recomputed)


def live_bytes(problem: Problem, recomputed: Sequence[bool]) -> list[int]:
    """Bytes at each position."""
    return [
        problem.resident_bytes
        + sum(i.bytes for i in problem.instances if is_alive(problem, i, recomputed, position))
        for position in range(problem.n_positions)
    ]


def extra_s(problem: Problem, recomputed: Sequence[bool]) -> float:
    """Seconds added to the step."""
    units_s = sum(unit.time_s for unit, again in zip(problem.units, recomputed, strict=True) if again)
    wraps_s = (r.wrap_s for k, r in enumerate(problem.regions) if is_wrapped(problem, k, recomputed))
    shared_s = (s.time_s for s in problem.shared if any(recomputed[unit] for unit in s.units))
    return units_s + sum(wraps_s) + sum(shared_s)


def hint_s(problem: Problem, recomputed: Sequence[bool]) -> float:
    """What the hints count that are not followed."""
    total = 0.0
    for unit, again in zip(problem.units, recomputed, strict=True):
        if unit.hint_s > 0 and again:
            total += unit.hint_s
        if unit.hint_s < 0 and not again:
            total -= unit.hint_s
    return total


def permitted(problem: Problem, recomputed: Sequence[bool]) -> bool:
    """Whether no rule is broken."""
    for unit, again in zip(problem.units, recomputed, strict=True):
        if again and (unit.must_save or not all(recomputed[other] for other in unit.requires)):
            return False
        if unit.must_recompute and not again:
            return False
        if unit.same_as != -1 and recomputed[unit.same_as] != again:
            return False
    return True


@dataclass(frozen=True)
class Choice:
    """One row of the exhaustive table."""

    recomputed: tuple[bool, ...]
    peak_bytes: int
    extra_s: float
    objective_s: float


def _options(unit: Unit) -> tuple[bool, ...]:
    return tuple(again for again in (False, True) if not (unit.must_save if again else unit.must_recompute))


def all_choices(problem: Problem, peak_bytes) -> list[Choice]:
    """Every permitted decision; `peak_bytes` counts its peak."""
    decisions = itertools.product(*map(_options, problem.units))
    return [
        Choice(d, peak_bytes(d), extra_s(problem, d), extra_s(problem, d) + hint_s(problem, d))
        for d in decisions
        if permitted(problem, d)
    ]
