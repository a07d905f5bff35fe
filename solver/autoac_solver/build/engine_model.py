"""What the planner asks of an engine: what it can decide on, what then lives when, and what its bookkeeping takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from autoac_solver.problem.problem import Lifetime
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import ModuleCall, Op, Profile

if TYPE_CHECKING:
    from autoac_solver.build.built import Built, RegionTape
    from autoac_solver.build.draft import Draft
    from autoac_solver.build.regions import Region
    from autoac_solver.build.step import Step


Costs = TypeVar("Costs")


class EngineModel(Protocol):
    """One engine on the solver's side; `build.engines` has them all.

    Attributes:
        name: in plans and messages.
        costs: a data class, what parts its bookkeeping has and how many seconds each takes where it was not measured.
            The part "record" is taken by what runs again, the others by what is wrapped.
        selects: whether it can save some of a region's values and recompute others.
        runs_code_twice: whether the region's Python code runs again.
        one_random_state: whether a region's random ops are all saved or all recomputed.
        stops_early: whether a second run ends with the last tensor that autograd saves.
        compiles: whether regions are compiled, and what is decided is at which of their measured points.
    """

    name: str
    costs: type[Any]
    selects: bool
    runs_code_twice: bool
    one_random_state: bool
    stops_early: bool
    compiles: bool

    def may_run(self, call: ModuleCall) -> bool:
        """Whether a module call may be a region, for all that its arguments tell."""
        ...

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        """Why a module call cannot be a region under this engine."""
        ...

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        """Whether an op of a region has a place where the region's ops run again."""
        ...

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        """Seconds that recomputing a group's ops adds to the step."""
        ...

    def wanted(self, op: Op, storages: set[int]) -> bool:
        """Whether a recomputed op runs again, if these storages are wanted of it."""
        ...

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        """The groups that a region's own backward needs, or its second run takes from what was saved."""
        ...

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        """What lives when."""
        ...

    def overhead(self, draft: Draft, region: Region) -> float:
        """Seconds that wrapping a region takes."""
        ...


def costs_of(profile: Profile, name: str, kind: type[Costs]) -> Costs:
    """What an engine's bookkeeping takes on the profile's machine.

    Args:
        name, kind: the engine's `name` and `costs`.

    Raises:
        ProfileError: the profile has a part of it that this engine does not have.
    """
    found = profile.costs.get(name, {})
    known = [f.name for f in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if unknown := [part for part in found if part not in known]:
        raise ProfileError(
            f"the profile has costs of engine {name!r} for {unknown[0]!r}, known are {', '.join(known)}. "
            "Record it again."
        )
    return kind(**found)
