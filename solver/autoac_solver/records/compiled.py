"""What compiled regions take, measured: a table in the profile, one row of points for all regions that are alike.

A *point* is one way to compile a region: what its compiled forward keeps for its compiled backward. Its name says it
all, so that a plan can be carried out without the table:

    "save:0,2"    the results of the region's first and third heavy op are kept, and what torch's min cut then takes
    "save:"       no heavy op's result is kept
    "torch:0.5"   torch's own choice at `torch._functorch.config.activation_memory_budget = 0.5`
    "eager"       the region runs as it is written, and autograd keeps what it wants
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from autoac_solver.records.disk.limits import Seconds, Size

EAGER = "eager"
"""The point of a region that is not compiled."""

TORCHS = "torch:1"
"""The point of a region that is compiled as torch does by default."""

MOST_POINTS = 10
"""Of a region. A file has a digit for the option of a group."""

_POINT = r"\A(eager|save:(\d{1,6}(,\d{1,6}){0,999})?|torch:(0|1|0\.\d{1,6}))\Z"
PointName = Annotated[str, Meta(pattern=_POINT)]


@dataclass(frozen=True, slots=True)
class CompiledPoint:
    """One way to compile a region, and what was measured of it.

    Args:
        name: which, see above.
        kept_bytes: kept from the end of forward to backward, besides inputs, parameters and outputs.
        forward_bytes, backward_bytes: the most that is alive in forward and in backward above what was at its start.
            Results count: outputs and what is kept, and gradients.
        forward_s, backward_s: the least of some rounds; what else runs on the machine only adds to it.
        holds_output: an output is kept, too.
    """

    name: PointName
    kept_bytes: Size
    forward_bytes: Size
    backward_bytes: Size
    forward_s: Seconds
    backward_s: Seconds
    holds_output: bool = False

    @property
    def time_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def is_dominated_by(self, other: CompiledPoint) -> bool:
        """Whether another point is as good in everything, and better in something."""
        mine, its = self._merits(), other._merits()
        return its != mine and all(a <= b for a, b in zip(its, mine, strict=True))

    def _merits(self) -> tuple[float, ...]:
        return (
            self.time_s,
            self.kept_bytes,
            self.forward_bytes,
            self.backward_bytes,
            float(self.holds_output),
        )


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """Regions that are alike: the same class, code path, shapes and types.

    Args:
        calls: their module calls.
        heavy: names of the heavy ops in their compiled forward, in order: what the numbers in points' names stand for.
        points: what was measured, in no order; none where they cannot be compiled.
        failure: why they cannot be, "" if they can.
    """

    calls: tuple[Size, ...]
    heavy: tuple[str, ...]
    points: tuple[CompiledPoint, ...]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class CompiledTable:
    """All that was measured of compiled regions.

    Args:
        regions: see there; no call is in two.
        unseen_bytes: by how much the measured peak of a whole planned step was above the predicted one (negative:
            below), of the last plan that was tried on the model.
        seconds: what compiling and measuring took.
    """

    regions: tuple[CompiledRegion, ...]
    unseen_bytes: int = 0
    seconds: Seconds = 0.0

    def of_call(self, call: int) -> CompiledRegion | None:
        """The region of a module call."""
        return next((region for region in self.regions if call in region.calls), None)


def undominated(points: tuple[CompiledPoint, ...]) -> tuple[CompiledPoint, ...]:
    """The points that no other one dominates, the fastest first; of equal ones the first."""
    best = [point for point in points if not any(point.is_dominated_by(other) for other in points)]
    unique = {point._merits(): point for point in reversed(best)}
    return tuple(sorted(unique.values(), key=lambda point: (point.time_s, point.kept_bytes)))


def kept_ops(name: str) -> tuple[int, ...]:
    """The heavy ops whose results a point of ours keeps, by number.

    Raises:
        ValueError: it is no such point.
    """
    kind, _, numbers = name.partition(":")
    if kind != "save" or not re.match(_POINT, name):
        raise ValueError(f"{name!r:.80} is no point that names what is kept")
    return tuple(int(number) for number in numbers.split(",") if number)


def torchs_budget(name: str) -> float | None:
    """The fraction of a point of torch's, None if it is another one."""
    kind, _, share = name.partition(":")
    return float(share) if kind == "torch" else None


def in_words(name: str, heavy: tuple[str, ...]) -> str:
    """A point for people."""
    if name == EAGER:
        return "not compiled"
    if (share := torchs_budget(name)) is not None:
        return "compiled as torch does" if share == 1 else f"compiled as torch does at a budget of {share:g}"
    kept = kept_ops(name)
    if not kept:
        return "compiled, no heavy op kept"
    if len(kept) == len(heavy):
        return "compiled, all heavy ops kept"
    names = ", ".join(f"{heavy[i]} ({i})" if i < len(heavy) else str(i) for i in kept)
    return f"compiled, kept: {names}"
