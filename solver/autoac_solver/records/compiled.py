"""Measurements of compiled regions: a table in the profile, with one row of points for all equal regions.

A *point* is one way to compile a region: a choice of the values that its compiled forward keeps for its compiled
backward. Its name defines it completely, so a plan can be carried out without the table:

    "save:0,2"    the results of the region's first and third heavy op are kept, plus those that torch's min cut adds
    "save:"       no heavy op's result is kept
    "torch:0.5"   torch's own choice at `torch._functorch.config.activation_memory_budget = 0.5`
    "eager"       the region runs uncompiled, and autograd saves its usual tensors
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
"""The point of a region compiled with torch's default settings."""

MOST_POINTS = 10
"""Most points of a region; files store a group's option as one digit."""

_POINT = r"\A(eager|save:(\d{1,6}(,\d{1,6}){0,999})?|torch:(0|1|0\.\d{1,6}))\Z"
PointName = Annotated[str, Meta(pattern=_POINT)]


@dataclass(frozen=True, slots=True)
class CompiledPoint:
    """One way to compile a region, with its measurements.

    Args:
        name: see the module's docstring.
        kept_bytes: bytes kept from the end of forward to backward, except inputs, parameters and outputs; those of a
            tail with the outputs that it holds.
        forward_bytes, backward_bytes: peak live bytes in forward and in backward above those at its start, including
            results: outputs and kept values, and gradients. Whoever calls it holds its outputs and their gradients.
        sole_backward_bytes: the same in backward if nobody but the code holds its outputs and their gradients: it frees
            them on the way.
        forward_s, backward_s: minimum over several rounds; other load on the machine only adds to it.
        holds_output: whether outputs are kept.
        holds_inputs: whether any tensor that it is called with is.
    """

    name: PointName
    kept_bytes: Size
    forward_bytes: Size
    backward_bytes: Size
    sole_backward_bytes: Size
    forward_s: Seconds
    backward_s: Seconds
    holds_output: bool = False
    holds_inputs: bool = True

    @property
    def time_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s

    def is_dominated_by(self, other: CompiledPoint) -> bool:
        """Whether another point is at least as good in every respect and better in one."""
        mine, its = self._merits(), other._merits()
        return its != mine and all(a <= b for a, b in zip(its, mine, strict=True))

    def _merits(self) -> tuple[float, ...]:
        return (
            self.time_s,
            self.kept_bytes,
            self.forward_bytes,
            self.backward_bytes,
            self.sole_backward_bytes,
            float(self.holds_output),
            float(self.holds_inputs),
        )


@dataclass(frozen=True, slots=True)
class CompiledRegion:
    """Equal regions: the same class, code path, shapes and dtypes.

    Args:
        calls: their module calls.
        heavy: names of the heavy ops in their compiled forward, in order; the numbers in points' names index it.
        points: measured points in no particular order. Of regions that are not compiled, `EAGER` or none.
        failure: why they are not compiled, "" if they are.
        inputs: the tensors that they are called with, such as "float32[8,128,64]"; "" if there are none.
    """

    calls: tuple[Size, ...]
    heavy: tuple[str, ...]
    points: tuple[CompiledPoint, ...]
    failure: str = ""
    inputs: str = ""


@dataclass(frozen=True, slots=True)
class CompiledTable:
    """All measurements of compiled regions.

    Args:
        regions: see `CompiledRegion`; no call is in two of them.
        unseen_bytes: measured minus predicted peak of a whole planned step, for the last plan tried on the model.
        seconds: time spent on compiling and measuring.
    """

    regions: tuple[CompiledRegion, ...]
    unseen_bytes: int = 0
    seconds: Seconds = 0.0

    def of_call(self, call: int) -> CompiledRegion | None:
        """The region of a module call."""
        return next((region for region in self.regions if call in region.calls), None)


def undominated(points: tuple[CompiledPoint, ...]) -> tuple[CompiledPoint, ...]:
    """The points that no other point dominates, fastest first; of equal points the first."""
    best = [point for point in points if not any(point.is_dominated_by(other) for other in points)]
    unique = {point._merits(): point for point in reversed(best)}
    return tuple(sorted(unique.values(), key=lambda point: (point.time_s, point.kept_bytes)))


def kept_ops(name: str) -> tuple[int, ...]:
    """The indices of the heavy ops whose results a "save:" point keeps.

    Raises:
        ValueError: it is no "save:" point.
    """
    kind, _, numbers = name.partition(":")
    if kind != "save" or not re.match(_POINT, name):
        raise ValueError(f"{name!r:.80} is no point that names what is kept")
    return tuple(int(number) for number in numbers.split(",") if number)


def torchs_budget(name: str) -> float | None:
    """The memory budget of a "torch:" point, None for any other point."""
    kind, _, share = name.partition(":")
    return float(share) if kind == "torch" else None


def in_words(name: str, heavy: tuple[str, ...]) -> str:
    """A point as readable text."""
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
