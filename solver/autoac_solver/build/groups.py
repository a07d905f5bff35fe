"""A region's ops become decision groups: which ops are decided as one, and what makes an op unfit for recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import RECOMPUTE, DecisionGroup, save_or_recompute
from autoac_solver.records.profile import NEVER

PINNED = "a policy says so"
"""Why a group must be saved that could be recomputed."""

TIED = "the region has one random state, and another draw of it must be saved"
"""Why a random group must be saved that by itself could be recomputed."""


class Groups:
    """The decision groups of all regions.

    Args:
        step, regions, engine: the recorded step, its regions, and the engine that runs them.
        pinned: ops that must not be run again because the user says so.
        undecided: regions without groups of their own: all of their ops belong to a loss, decided on as a whole.

    Attributes:
        all: the groups, in order.
        of_op, of_storage: their indices by op, and by storage of their region.
        region_of: the region that makes a storage, by storage.
        largest: for each region its largest group that may be recomputed, see `_largest`.
    """

    def __init__(
        self,
        step: Step,
        regions: Sequence[Region],
        engine: EngineModel,
        pinned: AbstractSet[int],
        undecided: AbstractSet[int],
    ) -> None:
        self._step, self._engine, self._pinned = step, engine, pinned
        tape = step.profile.tape
        self.region_of = {s: region for region in regions for op in region.ops for s in tape[op].creates}
        self.of_op: dict[int, int] = {}
        self.of_storage: dict[int, int] = {}
        self.all: list[DecisionGroup] = []
        for region in regions:
            if region.index not in undecided:
                self._add(region)
        self.largest = self._largest(len(regions))

    def is_decided(self, storage: int) -> bool:
        """Whether a storage's group may be recomputed."""
        group = self.of_storage.get(storage, -1)
        return group >= 0 and not self.all[group].must_save

    def spared(self, region: Region, op: int) -> bool:
        """Whether early stop ends the second run before the op, so that it never runs again (sac)."""
        return region.spares and self._step.ticks[op] > region.last_save

    def _own(self, region: Region, op: int) -> list[int]:
        """The storages of a region that an op makes or writes."""
        record = self._step.profile.tape[op]
        return [*record.creates, *(s for s in record.writes if self.region_of.get(s) is region)]

    def _add(self, region: Region) -> None:
        """Group the region's ops: those that write a common storage of the region belong together."""
        first = len(self.all)
        for ops in _connected([(op, self._own(region, op)) for op in region.ops]):
            index = len(self.all)
            for op in ops:
                self.of_op[op] = index
                self.of_storage |= dict.fromkeys(self._own(region, op), index)
            self.all.append(save_or_recompute(region.index, 0.0, ops=tuple(ops)))
        kept = self._kept_storages(region)
        for index in range(first, len(self.all)):
            self.all[index] = self._group(region, index, kept)
        if self._engine.one_random_state:
            self._tie_random(range(first, len(self.all)))
        region.spares = self._engine.stops_early and self._may_be_spared(region)

    def _group(self, region: Region, index: int, kept: set[int]) -> DecisionGroup:
        """A group with its time, what it requires, and why it must be saved if so."""
        ops, tape = self.all[index].ops, self._step.profile.tape
        requires: set[int] = set()
        reasons = [reason for op in ops for reason in self._unfit(region, index, op, kept, requires)]
        must_save = ""
        if reasons and self._engine.selects:
            must_save = f"{tape[ops[0]].name}: {reasons[0]}"
        elif not self._pinned.isdisjoint(ops):
            must_save = PINNED
        time_s = self._engine.again_s(self._step, region, ops)
        return save_or_recompute(
            region.index, time_s, requires=sorted(requires), must_save=must_save, ops=ops
        )

    def _unfit(
        self, region: Region, index: int, op: int, kept: set[int], requires: set[int]
    ) -> Iterator[str]:
        """The reasons that make an op of a group unfit for recomputation.

        Args:
            kept: storages that cannot be recomputed.
            requires: output; the groups that must be recomputed with this one are added.
        """
        record = self._step.profile.tape[op]
        own = set(self._own(region, op))
        if not record.replayable:
            yield "it cannot be run a second time"
        if own & kept:
            yield "it is written where no op is seen, or needed while its region still runs"
        if set(record.writes) - own:
            yield "the op changes something outside of the region as well"
        if record.side_effect and self._engine.runs_code_twice:
            yield f"under engine {self._engine.name} the op would have its side effect twice"
        for storage in record.reads:
            if not self._step.written_after(storage, record.tick, region.begin_backward):
                continue
            owner = self.of_storage.get(storage, -1)
            if self.region_of.get(storage) is not region or owner < 0:
                yield "the op's input is no longer what it was when it would run again"
            elif owner != index:
                requires.add(owner)

    def _kept_storages(self, region: Region) -> set[int]:
        """Storages that cannot be recomputed.

        Those that are read, or saved by autograd, before any visible op has written them (an opaque kernel did), and
        those that a backward inside of the region's own forward needs.
        """
        profile = self._step.profile
        saved = [profile.saved[index] for index in region.saved]
        kept = {s.storage for s in saved if NEVER < s.unpacked < region.end}
        raw: set[int] = set()  # not written yet
        saves = sorted((s.tick, s.storage) for s in saved)
        cursor = 0
        for op in region.ops:
            record = profile.tape[op]
            while cursor < len(saves) and saves[cursor][0] < record.tick:
                kept |= raw & {saves[cursor][1]}
                cursor += 1
            kept |= raw & (set(record.reads) - set(record.writes))
            raw -= set(record.writes)
            if record.uninitialised:
                raw |= set(record.creates)
        return kept | (raw & {storage for _, storage in saves[cursor:]})

    def _tie_random(self, groups: range) -> None:
        """Let all random groups of a region be decided alike, for torch stashes one random state a region.

        The state of a generator of the model's own is not stashed. Drawing from it is a side effect, see `_unfit`.
        """
        random = [g for g in groups if self._step.draws(self.all[g].ops)]
        reason = next((self.all[g].reason for g in random if self.all[g].must_save), "")
        for group in random:
            tied = replace(self.all[group], same_as=random[0] if group != random[0] else -1)
            if reason and not tied.must_save:
                tied = tied.refusing(RECOMPUTE, f"{TIED}: {reason}")
            self.all[group] = tied

    def _may_be_spared(self, region: Region) -> bool:
        """Whether the ops after the last save count as recomputed without a decision, as they never run again.

        They do not if one of them must be saved (it would find its inputs changed, or early stop can be off), requires
        another group, or is random (random groups are decided alike). Then they are decided on like other ops.
        """
        late = [op for op in region.ops if self._step.ticks[op] > region.last_save]
        groups = [self.all[group] for group in {self.of_op[op] for op in late if op in self.of_op}]
        tied = any(g.must_save or g.options[RECOMPUTE].requires or self._step.draws(g.ops) for g in groups)
        return self._pinned.isdisjoint(late) and not tied

    def _largest(self, n_regions: int) -> list[int]:
        """For each region the group of most bytes that may be recomputed, -1 if none may.

        Almost every plan that wraps the region recomputes this group.
        """
        sizes: dict[int, int] = {}
        for storage, group in self.of_storage.items():
            if not self.all[group].must_save:
                sizes[group] = sizes.get(group, 0) + self._step.profile.storage_table[storage].bytes
        largest = [-1] * n_regions
        for group, size in sizes.items():
            region = self.all[group].region
            if largest[region] < 0 or size > sizes[largest[region]]:
                largest[region] = group
        return largest


def _connected(storages_of: list[tuple[int, list[int]]]) -> list[list[int]]:
    """Sets of ops that are connected by common storages, ordered by their first op. Ops without any are left out."""
    root_of: dict[int, int] = {}

    def find(storage: int) -> int:
        while root_of[storage] != storage:
            root_of[storage] = root_of[root_of[storage]]  # halves the path, else chains take quadratic time
            storage = root_of[storage]
        return storage

    for _, storages in storages_of:
        for storage in storages:
            root_of.setdefault(storage, storage)
            root_of[find(storage)] = find(storages[0])
    members: dict[int, list[int]] = {}
    for op, storages in storages_of:
        if storages:
            members.setdefault(find(storages[0]), []).append(op)
    return list(members.values())
