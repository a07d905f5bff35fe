"""Decision groups of a region's ops: which ops are decided together, and which cannot be recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from autoac_solver.build.engine_model import EngineModel
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import RECOMPUTE, DecisionGroup, save_or_recompute
from autoac_solver.records.collectives import may_repeat
from autoac_solver.records.profile import NEVER

PINNED = "a policy says so"
_NOT_TWICE = (
    "it cannot be run a second time: it has effects or random numbers that torch does not show, changes a size, or "
    "gave another value when it was tried (the profile's notes say so then)"
)
"""Reason for a group that could be recomputed but is pinned by a policy."""

COLLECTIVE = "a collective runs once, unless a policy (REPEAT_COLLECTIVES) lets it run again"
"""Reason for a collective that could run again."""

TIED = "the region has one random state, and another draw of it must be saved"
"""Reason for a random group that could be recomputed, but is tied to another that cannot."""


class Groups:
    """The decision groups of all regions.

    Args:
        step, regions, engine: the recorded step, its regions, and the engine that runs them.
        pinned: ops that must not run again because of a policy.
        repeated: collectives that may run again because of a policy.
        undecided: regions without groups: all of their ops belong to a loss, which is one group.

    Attributes:
        all: the groups, in order.
        of_op, of_storage: op -> index of its group, and storage made in a region -> index of its group.
        region_of: storage -> the region that makes it.
        largest: per region its largest group that may be recomputed, see `_largest`.
    """

    def __init__(
        self,
        step: Step,
        regions: Sequence[Region],
        engine: EngineModel,
        pinned: AbstractSet[int],
        repeated: AbstractSet[int],
        undecided: AbstractSet[int],
    ) -> None:
        self._step, self._engine, self._pinned, self._repeated = step, engine, pinned, repeated
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
        """Whether early stop ends the second run before the op, so it never runs again (sac)."""
        return region.spares and self._step.ticks[op] > region.last_save

    def _own(self, region: Region, op: int) -> list[int]:
        """The region's storages that an op creates or writes."""
        record = self._step.profile.tape[op]
        return [*record.creates, *(s for s in record.writes if self.region_of.get(s) is region)]

    def _add(self, region: Region) -> None:
        """Group the region's ops: ops that write a common storage of the region form one group."""
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
        """The group with its time, its requirements, and the reason if it must be saved."""
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
        """Reasons why an op of a group cannot be recomputed.

        Args:
            kept: storages that cannot be recomputed.
            requires: output: groups that must be recomputed with this one are added to it.
        """
        record = self._step.profile.tape[op]
        own = set(self._own(region, op))
        if not record.replayable and op not in self._repeated:
            yield COLLECTIVE if may_repeat(record.name) else _NOT_TWICE
        if own & kept:
            yield "it is written where no op is seen, or needed while its region still runs"
        if set(record.writes) - own:
            yield "the op changes something outside of the region as well"
        if record.side_effect and self._engine.runs_code_twice:
            yield f"under engine {self._engine.name} the op would have its side effect twice"
        for storage in record.reads:
            if not self._step.written_after(storage, record.tick, region.windows[-1].begin):
                continue
            owner = self.of_storage.get(storage, -1)
            if self.region_of.get(storage) is not region or owner < 0:
                yield "the op's input is no longer what it was when it would run again"
            elif owner != index:
                requires.add(owner)

    def _kept_storages(self, region: Region) -> set[int]:
        """Storages that cannot be recomputed.

        These are storages read by an op or saved by autograd before any visible op has written them (an opaque kernel
        did), and storages needed by a backward inside the region's own forward.
        """
        profile = self._step.profile
        saved = [profile.saved[index] for index in region.saved]
        kept = {s.storage for s in saved if NEVER < s.unpacked < region.end}
        raw: set[int] = set()  # Not written yet.
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
        """Tie all random groups of a region together, because torch stashes one random state per region.

        The state of the model's own generators is not stashed. Drawing from one is a side effect, see `_unfit`.
        """
        random = [g for g in groups if self._step.draws(self.all[g].ops)]
        reason = next((self.all[g].reason for g in random if self.all[g].must_save), "")
        for group in random:
            tied = replace(self.all[group], same_as=random[0] if group != random[0] else -1)
            if reason and not tied.must_save:
                tied = tied.refusing(RECOMPUTE, f"{TIED}: {reason}")
            self.all[group] = tied

    def _may_be_spared(self, region: Region) -> bool:
        """Whether the ops after the last save count as recomputed without a decision, because they never run again.

        They do not if one of them must be saved (its inputs would have changed, or early stop can be off), requires
        another group, or is random (random groups are tied together). Then they are decided like other ops.
        """
        late = [op for op in region.ops if self._step.ticks[op] > region.last_save]
        groups = [self.all[group] for group in {self.of_op[op] for op in late if op in self.of_op}]
        tied = any(g.must_save or g.options[RECOMPUTE].requires or self._step.draws(g.ops) for g in groups)
        return self._pinned.isdisjoint(late) and not tied

    def _largest(self, n_regions: int) -> list[int]:
        """Per region the group of most bytes that may be recomputed, -1 for none.

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
    """Connected components of ops by common storages, ordered by first op. Ops without storages are left out."""
    root_of: dict[int, int] = {}

    def find(storage: int) -> int:
        while root_of[storage] != storage:
            root_of[storage] = root_of[root_of[storage]]  # Path halving: long chains take linear time.
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
