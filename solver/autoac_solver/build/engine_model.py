"""The planner's interface to an engine: possible decisions, resulting lifetimes, and the cost of its bookkeeping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from autoac_solver.problem.problem import Lifetime
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import Op, Profile

if TYPE_CHECKING:
    from autoac_solver.build.built import Built, RegionTape
    from autoac_solver.build.draft import Draft
    from autoac_solver.build.regions import Region
    from autoac_solver.build.step import Step


Costs = TypeVar("Costs")

NOTHING: Mapping[str, str] = MappingProxyType({})
"""`EngineModel.unsupported` of an engine that supports all arguments."""


class EngineModel(Protocol):
    """The solver's model of one engine; all are in `build.engines`.

    Attributes:
        name: used in plans and messages.
        costs: a dataclass of the parts of its bookkeeping, with default seconds for unmeasured ones. Part "record" is
            paid by ops that run again, the others by wrapped regions.
        selects: it can save some of a region's values and recompute others.
        runs_code_twice: the region's Python code runs again.
        one_random_state: a region's random ops are all saved or all recomputed.
        stops_early: a second run ends with the last tensor that autograd saves.
        repeats: each further backward over a graph that was kept recomputes a region anew.
        compiles: regions are compiled; the decision is among their measured points.
        unsupported: what plans for it cannot have, and the message that refuses it: see `engines/compile.py`.
    """

    name: str
    costs: type[Any]
    selects: bool
    runs_code_twice: bool
    one_random_state: bool
    stops_early: bool
    repeats: bool
    compiles: bool
    unsupported: Mapping[str, str]

    def build(self, profile: Profile, calls: Sequence[int]) -> Built | None:
        """The problem of an engine that decides on whole regions; None if it is built from their ops.

        No policies reach it, so an engine with such problems has "policies" in `unsupported`.
        """
        ...

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        """Reasons why a module call cannot be a region under this engine."""
        ...

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        """Whether an op of a region has a position in the region's window."""
        ...

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        """Seconds that recomputing a group's ops adds to the step."""
        ...

    def wanted(self, op: Op, storages: set[int]) -> bool:
        """Whether a recomputed op runs again if these storages are needed."""
        ...

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        """The groups that a region's own backward needs, or that its second run reads from saved values."""
        ...

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        """All lifetimes."""
        ...

    def wrap_s(self, draft: Draft, region: Region) -> float:
        """Seconds that wrapping a region adds to the step."""
        ...


def costs_of(profile: Profile, name: str, kind: type[Costs]) -> Costs:
    """The cost of an engine's bookkeeping on the profile's machine.

    Args:
        name, kind: the engine's `name` and `costs`.

    Raises:
        ProfileError: the profile has a cost that this engine does not know.
    """
    found = profile.costs.get(name, {})
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := [part for part in found if part not in known]:
        raise ProfileError(
            f"the profile has costs of engine {name!r} for {unknown[0]!r}, known are {', '.join(known)}. "
            "Record it again."
        )
    return kind(**found)
