"""A problem with its link to the profile: the ops and storages of its regions and groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.losses.cross_entropy import chunkable_losses
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
        group_of: for each of `ops`, its group; -1 if it is never recomputed.
        free_of_choice: for each of `ops`, whether it counts as recomputed but never runs again (sac: early stop ends
            the second run before it, because it comes after the last tensor that autograd saves).
    """

    call: int
    ops: tuple[int, ...]
    group_of: tuple[int, ...]
    free_of_choice: tuple[bool, ...]


@dataclass(frozen=True)
class Built:
    """A problem, and the ops and storages of its regions and groups.

    Args:
        model: the engine.
        regions, problem: see their classes. The problem has one more region, `LOSS`, if `loss` is a group.
        group_storages: per group the indices of its storages.
        loss: the group of the log-probabilities of all cross entropies that may be chunked, -1 for none.
        refused: requested module calls that cannot be regions.
        points: if regions are compiled: per region the names of its points, one per option of its group; empty for a
            replayed region.
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
        """Whether a group's ops run again."""
        return self.problem.groups[group].options[decisions[group]].action is Action.RECOMPUTE

    def point(self, region: int, decisions: Sequence[int]) -> str:
        """The name of the point at which a region is compiled, `EAGER` if it is not."""
        if not self.is_compiled(region):
            return EAGER
        return self.points[region][decisions[self.regions[region].group_of[0]]]

    def is_compiled(self, region: int) -> bool:
        """Whether the options of a region are points at which it is compiled."""
        return bool(self.points and self.points[region])

    def steps(self, profile: Profile, region: int, decisions: Sequence[int]) -> tuple[tuple[str, bool], ...]:
        """Overload name and decision (true: recomputed) of every op of a region, in order."""
        tape = self.regions[region]
        return tuple(
            (profile.tape[op].name, spared or (group >= 0 and self.is_recomputed(decisions, group)))
            for op, group, spared in zip(tape.ops, tape.group_of, tape.free_of_choice, strict=True)
        )

    def runs(self, profile: Profile, decisions: Sequence[int]) -> np.ndarray:
        """Bool per position of the planned step: its op runs.

        Replays of ops that are not recomputed do not run, nor do the casts of a chunked loss as a whole. Under engine
        replay neither do replays of values that are not needed (any more).
        """
        again = {op for tape in self.regions for op in self._again(profile, tape, decisions)}
        chunked = self.loss >= 0 and self.is_recomputed(decisions, self.loss)
        losses = chunkable_losses(profile) if chunked else ()
        never = {op for loss in losses for op in loss.casts}
        problem = self.problem
        positions = zip(problem.position_op, problem.position_replayed, strict=True)
        return np.array(
            [op in again if replayed else op not in never for op, replayed in positions], dtype=bool
        )

    def _again(self, profile: Profile, tape: RegionTape, decisions: Sequence[int]) -> Iterator[int]:
        """The ops of a region that run again, in reverse order."""
        call = profile.spans[tape.call]
        saved = [s for s in profile.saved if call.start <= s.tick < call.end]
        begins = min((s.unpacked for s in saved if s.unpacked >= call.end), default=NEVER)
        wanted = {s.storage for s in saved if s.released >= begins}
        for op, group in zip(reversed(tape.ops), reversed(tape.group_of), strict=True):
            record = profile.tape[op]
            if group >= 0 and self.is_recomputed(decisions, group) and self.model.wanted(record, wanted):
                wanted.update(record.reads)
                yield op
