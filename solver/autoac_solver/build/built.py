"""A problem, and what its regions and groups stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.regions import RegionRefusal
from autoac_solver.problem.problem import Action, Problem
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.profile import NEVER, Profile


@dataclass(frozen=True)
class RegionTape:
    """One region on the tape.

    Args:
        call: index of its module call.
        ops: its ops, in order.
        group_of: for each of `ops`, the group it belongs to, -1 if it is never recomputed.
        free_of_choice: for each of `ops`, whether it may be called recomputed without ever running again (sac: it
            comes after the last tensor that autograd saves, so early stop spares it).
    """

    call: int
    ops: tuple[int, ...]
    group_of: tuple[int, ...]
    free_of_choice: tuple[bool, ...]


@dataclass(frozen=True)
class Built:
    """A problem, and what its regions and groups stand for.

    Args:
        model: the engine.
        regions, problem: see there. The problem has one region more, `LOSS`, if `loss` is a group.
        group_storages: for each group, the storages that it is about.
        loss: the group of the log-probabilities of all cross entropies that may be chunked, -1 for none.
        refused: module calls that were asked for and are no regions.
        points: where regions are compiled, for each the points' names, one for each option of its group; none for one
            that is replayed.
    """

    model: EngineModel
    regions: tuple[RegionTape, ...]
    problem: Problem
    group_storages: tuple[tuple[int, ...], ...] = field(repr=False, default=())
    loss: int = -1
    refused: tuple[RegionRefusal, ...] = ()
    points: tuple[tuple[str, ...], ...] = ()

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.model.name

    def is_recomputed(self, decisions: Sequence[int], group: int) -> bool:
        """Whether a group's ops are run again."""
        return self.problem.groups[group].options[decisions[group]].action is Action.RECOMPUTE

    def point(self, region: int, decisions: Sequence[int]) -> str:
        """How a region is compiled."""
        if not self.is_compiled(region):
            return EAGER
        return self.points[region][decisions[self.regions[region].group_of[0]]]

    def is_compiled(self, region: int) -> bool:
        """Whether what is decided of a region is a point at which it is compiled."""
        return bool(self.points and self.points[region])

    def steps(self, profile: Profile, region: int, decisions: Sequence[int]) -> tuple[tuple[str, bool], ...]:
        """Overload and decision of every op of a region, in order."""
        tape = self.regions[region]
        return tuple(
            (profile.tape[op].name, spared or (group >= 0 and self.is_recomputed(decisions, group)))
            for op, group, spared in zip(tape.ops, tape.group_of, tape.free_of_choice, strict=True)
        )

    def runs(self, profile: Profile, decisions: Sequence[int]) -> np.ndarray:
        """Which positions of the planned step an op runs at, bool each.

        Not the replays of what is not recomputed, nor under engine replay of what nobody needs (any more).
        """
        again = {op for tape in self.regions for op in self._again(profile, tape, decisions)}
        problem = self.problem
        positions = zip(problem.position_op, problem.position_replayed, strict=True)
        return np.array([not replayed or op in again for op, replayed in positions], dtype=bool)

    def _again(self, profile: Profile, tape: RegionTape, decisions: Sequence[int]) -> Iterator[int]:
        """The ops of a region that run again, last ones first."""
        call = profile.calls[tape.call]
        saved = [s for s in profile.saved if call.start <= s.tick < call.end]
        begins = min((s.unpacked for s in saved if s.unpacked >= call.end), default=NEVER)
        wanted = {s.storage for s in saved if s.released >= begins}
        for op, group in zip(reversed(tape.ops), reversed(tape.group_of), strict=True):
            record = profile.tape[op]
            if group >= 0 and self.is_recomputed(decisions, group) and self.model.wanted(record, wanted):
                wanted.update(record.reads)
                yield op
