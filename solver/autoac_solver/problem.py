"""The problem that the ILP solves and the simulator judges: units to decide on, and storages that live by them.

A *unit* is what is decided as one: the values of a region that are written by common ops (an op and the in-place
ops after it; an op with several outputs), or the log-probabilities of losses. It is either recomputed in backward or
not. "Not recomputed" is *save* where somebody needs the value later, and *skip* where nobody does: whoever needs it
holds it, so both are one decision here and only the report tells them apart.

An *instance* is one allocation, alive over [start, end) on the axis of positions whenever its condition `exists`
holds. *Holders* prolong its life: it lives until the largest end among its own and those of the holders whose
condition holds. A position is one op of the planned step: forward ops, then backward ops with each region's replay
put in where the region's backward begins. Live bytes at a position are the resident bytes plus the bytes of every
instance alive there; an op's hidden workspace is an instance of length one.

The two engines differ only in which instances, holders and rows they give rise to, see `build`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Condition:
    """A conjunction of at most three literals; the empty one is always true.

    Args:
        recomputed: index of a unit that must be recomputed, -1 for none.
        kept: index of a unit that must not be recomputed, -1 for none.
        wrapped: index of a region that must be wrapped (at least one of its units is recomputed), -1 for none.
    """

    recomputed: int = -1
    kept: int = -1
    wrapped: int = -1


ALWAYS = Condition()


@dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who keeps an instance alive up to `end` (exclusive position) while `when` holds."""

    end: int
    when: Condition = ALWAYS


@dataclass(frozen=True, slots=True)
class Instance:
    """One allocation.

    Args:
        bytes: its size.
        start, end: alive at positions start <= p < end whenever it exists.
        exists: the condition under which it is allocated at all.
        holders: who prolongs its life beyond `end`.
        storage: index of the profile's storage it stands for, -1 for workspace and random-number states.
    """

    bytes: int
    start: int
    end: int
    exists: Condition = ALWAYS
    holders: tuple[Holder, ...] = ()
    storage: int = -1


@dataclass(frozen=True, slots=True)
class Unit:
    """What is decided as one.

    Args:
        region: index of its region.
        time_s: seconds that recomputing it adds to the step, the engine's bookkeeping for its ops included.
        must_save: it cannot be recomputed.
        requires: units that must be recomputed if this one is (it reads a value of theirs before the last write, or a
            policy says not to keep them for it).
        same_as: index of a unit that must be decided alike, -1 for none.
        ops: indices of the profile's ops that are run again when it is recomputed.
        must_recompute: it cannot be kept.
        hint_s: a hint, in seconds. Positive: recomputing it counts that much more than its time. Negative: keeping it
            counts that much. Hints are part of what is minimised, not of the time that is reported.
    """

    region: int
    time_s: float
    must_save: bool = False
    requires: tuple[int, ...] = ()
    same_as: int = -1
    ops: tuple[int, ...] = ()
    must_recompute: bool = False
    hint_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RegionCost:
    """A region: the seconds that wrapping it adds to the step (paid once if any of its units is recomputed)."""

    wrap_s: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class SharedCost:
    """Seconds that are added to the step once if any of some units is recomputed."""

    units: tuple[int, ...]
    time_s: float


@dataclass(frozen=True)
class Problem:
    """Units to decide on, and what lives when.

    Args:
        n_positions: length of the axis.
        resident_bytes: alive at every position, whatever is decided.
        step_s: seconds of the step with nothing recomputed.
        units, regions, instances, shared: see there.
        position_op: for each position the profile's op that runs there (for reports); may be empty in tests.
        position_replayed: for each position, whether it is a replay of that op; may be empty in tests.
    """

    n_positions: int
    resident_bytes: int
    step_s: float
    units: tuple[Unit, ...]
    regions: tuple[RegionCost, ...]
    instances: tuple[Instance, ...]
    position_op: tuple[int, ...] = field(default=(), repr=False)
    position_replayed: tuple[bool, ...] = field(default=(), repr=False)
    shared: tuple[SharedCost, ...] = ()


def validate(problem: Problem) -> None:
    """Refuse a problem with an index, size or time out of range, which elsewhere would quietly mean something else.

    Raises:
        ValueError: names the first fault.
    """
    for fault in _faults(problem):
        raise ValueError(fault)


def _faults(problem: Problem) -> Iterator[str]:
    n_units, n_regions = len(problem.units), len(problem.regions)
    if problem.n_positions < 1 or problem.resident_bytes < 0 or not _is_duration(problem.step_s):
        yield "n_positions must be positive, resident_bytes and step_s must not be negative"
    for index, region in enumerate(problem.regions):
        if not _is_duration(region.wrap_s):
            yield f"region {index}: wrap_s={region.wrap_s} is no duration"
    for index, cost in enumerate(problem.shared):
        if not _is_duration(cost.time_s) or not all(0 <= unit < n_units for unit in cost.units):
            yield f"shared cost {index}: units={cost.units} or time_s={cost.time_s} is out of range"
    for index, unit in enumerate(problem.units):
        if not _is_duration(unit.time_s):
            yield f"unit {index}: time_s={unit.time_s} is no duration"
        if not math.isfinite(unit.hint_s):
            yield f"unit {index}: hint_s={unit.hint_s} is not finite"
        if not 0 <= unit.region < n_regions:
            yield f"unit {index}: there is no region {unit.region}"
        if not all(0 <= other < n_units for other in unit.requires) or not -1 <= unit.same_as < n_units:
            yield f"unit {index}: requires={unit.requires} or same_as={unit.same_as} names no unit"
    for index, instance in enumerate(problem.instances):
        if instance.bytes < 0 or not 0 <= instance.start <= instance.end <= problem.n_positions:
            yield f"instance {index}: {instance.bytes} bytes over [{instance.start}, {instance.end})"
        for condition in (instance.exists, *(holder.when for holder in instance.holders)):
            if not (
                -1 <= condition.recomputed < n_units
                and -1 <= condition.kept < n_units
                and -1 <= condition.wrapped < n_regions
            ):
                yield f"instance {index}: {condition} names no unit or region"
        if any(holder.end > problem.n_positions for holder in instance.holders):
            yield f"instance {index}: a holder ends after the last position"


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
