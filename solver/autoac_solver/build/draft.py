"""The parts of a problem that precede its lifetimes: step, regions, groups, axis, losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoac_solver.build.axis import Axis
from autoac_solver.build.groups import Groups
from autoac_solver.build.losses.cross_entropy import ChunkableLoss
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import ALWAYS, Condition, Extension, Lifetime
from autoac_solver.records.profile import NEVER


@dataclass(frozen=True)
class Use:
    """The uses of a storage.

    Args:
        storage: its index.
        saves: indices of saved tensors on it.
        reads: ops of regions that read it and may run again.
        inputs: regions that have it among their inputs.
    """

    storage: int
    saves: list[int]
    reads: list[int]
    inputs: list[Region]


@dataclass(frozen=True)
class Draft:
    """The parts of a problem.

    Args:
        step, regions, groups, axis: see their classes.
        losses: the cross entropies that may be chunked.
        cut_calls: calls that have parts among the regions; each of these is recorded as a whole.
    """

    step: Step
    regions: list[Region]
    groups: Groups
    axis: Axis
    losses: tuple[ChunkableLoss, ...]
    cut_calls: tuple[Region, ...] = ()

    def cut_call_of(self, region: Region) -> int:
        """Index of the cut call that a region is a part of, -1 for none."""
        return next((i for i, whole in enumerate(self.cut_calls) if whole.owns(region.start)), -1)

    def uses(self) -> Iterator[Use]:
        """The uses of every storage that the step allocates."""
        profile = self.step.profile
        saves: dict[int, list[int]] = {}
        reads: dict[int, list[int]] = {}
        inputs: dict[int, list[Region]] = {}
        for index, saved in enumerate(profile.saved):
            saves.setdefault(saved.storage, []).append(index)
        for region in self.regions:
            for op in region.ops:
                for storage in profile.tape[op].reads if op in self.groups.of_op else ():
                    reads.setdefault(storage, []).append(op)
            for storage in set(profile.spans[region.call].inputs):
                inputs.setdefault(storage, []).append(region)
        for index, storage in enumerate(profile.storage_table):
            if storage.is_gathered and storage.alloc != NEVER:
                yield Use(index, [], [], [])  # Nothing keeps it.
            elif storage.alloc != NEVER and storage.bytes:
                yield Use(index, saves.get(index, []), reads.get(index, []), inputs.get(index, []))

    def life(self, storage: int, saves: Iterable[int]) -> tuple[int, int, int]:
        """Start, end under all decisions, and the last release by its own region's autograd (NEVER: none)."""
        record = self.step.profile.storage_table[storage]
        region = self.groups.region_of.get(storage)
        end, own_end = record.free, NEVER
        decided = self.groups.is_decided(storage)
        for index in saves:
            saved = self.step.profile.saved[index]
            if decided and region is not None and region.owns(saved.tick):
                own_end = max(own_end, saved.released)
            else:
                end = max(end, saved.released)
        position = self.axis.position
        return position(record.alloc), position(end), NEVER if own_end == NEVER else position(own_end)


def lifetime(
    size: int, start: int, end: int, exists: Condition, extensions: list[Extension], storage: int
) -> Lifetime:
    """A lifetime without redundant extensions: those that end no later than an unconditional one."""
    if not extensions:
        return Lifetime(size, start, end, exists, (), storage)
    always = max([end, *(e.end for e in extensions if e.when == ALWAYS)])
    longest: dict[Condition, int] = {}
    for extension in extensions:
        if extension.end > always:
            longest[extension.when] = max(longest.get(extension.when, 0), extension.end)
    kept = tuple(Extension(until, when) for when, until in longest.items())
    return Lifetime(size, start, always, exists, kept, storage)
