"""Lifetimes under engines that rerun a region's Python code: torch's checkpoint, with or without a policy.

NOTE [ Memory of a region that runs twice ]
  1. The second run begins at the first unpack, and stops after the last value that backward needs (early stop). Its ops
     have positions there, see `build.axis`. (`_checkpoint_without_reentrant_generator`, `_recomputation_hook` and
     `_StopRecomputationError` in torch/utils/checkpoint.py.)
  2. A wrapped region keeps its inputs and one random state until its last release. (`recompute_fn` there holds the
     arguments; `preserve_rng_state` stashes the state.) The inputs keep the autograd graph behind them alive, and with
     it tensors saved there for a result that is thrown away.
  3. Under a policy every value that is not recomputed is saved, needed or not, and its entry lives until the second run
     has passed it. (`_CachingTorchDispatchMode` and `_CachedTorchDispatchMode`, same file.) From then on, as a
     recomputed copy does, it lives as long as Python and autograd hold it.
  4. The condition "region not wrapped" is not expressible; "its largest group is saved" (`Groups.largest`) replaces it,
     which never underestimates.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from autoac_solver.build.draft import Draft, Use, lifetime
from autoac_solver.build.regions import Region
from autoac_solver.problem.problem import (
    ALWAYS,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    when_recomputed,
    when_saved,
    when_wrapped,
)
from autoac_solver.records.devices import kind_of
from autoac_solver.records.profile import NEVER, SCALAR_BYTES

CPU_RANDOM_STATE_BYTES = 5056
"""Size of a CPU generator's state; `torch.utils.checkpoint` stashes one per region."""


class Rerun:
    """The lifetimes of a draft whose regions' code runs twice.

    Args:
        draft: the problem's parts.
        watches: the engine keeps the tensors that recomputed ops read, to compare them with those of the second run.
    """

    def __init__(self, draft: Draft, watches: bool) -> None:
        self._draft, self._watches = draft, watches
        self._profile, self._axis, self._groups = draft.step.profile, draft.axis, draft.groups
        tape = self._profile.tape
        made = {storage for op in tape for storage in op.creates}
        self._read = {storage for op in tape for storage in op.reads}
        self._cached_casts = {storage for op in tape if op.cached_cast for storage in op.creates}
        table = enumerate(self._profile.storage_table)
        self._made_by_no_op = {
            i: s for i, s in table if s.alloc != NEVER and i not in made and not s.is_gathered
        }
        self._first_again = [self._first_position(group) for group in self._groups.all]
        self._keepers = self._keepers_of_saved()
        self._state_keepers = self._keepers_of_states()

    def lifetimes(self) -> Iterator[Lifetime]:
        """All lifetimes."""
        for use in self._draft.uses():
            yield from self._storage(use)
        yield from self._workspace()
        yield from self._random_states()
        yield from self._made_again_by_no_op()

    def _storage(self, use: Use) -> list[Lifetime]:
        """The lifetimes of a storage: made in the first run, and made again in the second."""
        record = self._profile.storage_table[use.storage]
        group = self._groups.of_storage.get(use.storage, -1)
        region = self._groups.region_of.get(use.storage)
        takers = [*use.inputs, *self._state_keepers.get(use.storage, ())]
        extensions = [
            Extension(self._axis.position(taker.last_release), when_wrapped(taker.index))
            for taker in takers
            if taker is not region
        ]
        casts, casts_held, saves = self._casts_in_other_regions(use, region)
        extensions += casts_held
        start, end, own_end = self._draft.life(use.storage, saves)
        decided = group >= 0 and region is not None and not self._groups.all[group].must_save
        for index in saves:
            own = decided and region is not None and region.owns(self._profile.saved[index].tick)
            for keeper in self._keepers.get(index, ()):
                when = _saved_and_wrapped(group if own else -1, keeper.index)
                extensions.append(Extension(self._axis.position(keeper.last_release), when))
        if group < 0 or region is None:
            maker = self._maker_without_op(use.storage)
            if maker is not None:
                end, own_end = self._life_without_op(use.storage, maker, saves)
                extensions.append(Extension(own_end, when_saved(self._groups.largest[maker.index])))
                extensions += self._watched_until_rerun(maker, use.reads)
            return [lifetime(record.bytes, start, end, ALWAYS, extensions, use.storage), *casts]
        if own_end != NEVER:
            extensions.append(Extension(own_end, when_saved(group)))
        extensions += self._saved_for_nothing(region, group, decided)
        own_saves = [s for i in saves if region.owns((s := self._profile.saved[i]).tick)]
        again: list[Lifetime] = []
        first, _ = self._first_again[group]
        if first != NEVER:
            # A graph freed within forward is freed at the same point of the second run, with its saved tensors.
            last = max([record.free, *(saved.released for saved in own_saves)])
            gone = max(self._axis.rerun_free(region, last), first + 1)
            when = _saved_and_wrapped(group if decided else -1, region.index)
            extensions.append(Extension(gone, when))
            if decided:
                dropped = max((saved.dropped for saved in own_saves), default=NEVER)
                held = [Extension(self._axis.position(dropped))] if own_saves else []
                again.append(lifetime(record.bytes, first, gone, when_recomputed(group), held, use.storage))
        return [lifetime(record.bytes, start, end, ALWAYS, extensions, use.storage), *casts, *again]

    def _first_position(self, group: DecisionGroup) -> tuple[int, bool]:
        """The position where the first of a group's ops runs again (`NEVER`: none), and whether some ops do not."""
        rerun = self._draft.regions[group.region].window.rerun
        again = [rerun[op] for op in group.ops if op in rerun]
        return min(again, default=NEVER), len(again) < len(group.ops)

    def _saved_for_nothing(self, region: Region, group: int, decided: bool) -> Iterator[Extension]:
        """Entries saved for ops that early stop cuts off from the second run are held to the region's last release."""
        _, stops_before = self._first_again[group]
        if stops_before and not self._groups.spared(region, self._groups.all[group].ops[0]):
            asked = _saved_and_wrapped(group if decided else -1, region.index)
            yield Extension(self._axis.position(region.last_release), asked)

    # -- casts of autocast -------------------------------------------------------------------------------------

    def _casts_in_other_regions(
        self, use: Use, maker: Region | None
    ) -> tuple[list[Lifetime], list[Extension], list[int]]:
        """The effect of regions that took a cast from autocast's cache in their first run.

        Returns:
            The casts made again in their second runs, their holds on the first cast, and the saves by all others.
        """
        lifetimes: list[Lifetime] = []
        extensions: list[Extension] = []
        saves = use.saves
        for region in self._draft.regions if use.storage in self._cached_casts else ():
            if region is not maker and self._groups.largest[region.index] >= 0:
                own = [index for index in saves if region.owns(self._profile.saved[index].tick)]
                lifetimes += self._cast_again(use.storage, region, own, use.reads)
                extensions += self._cast_held_by(region, own, use.reads)
                saves = [index for index in saves if index not in own]
        return lifetimes, extensions, saves

    def _cast_again(
        self, storage: int, region: Region, saves: Iterable[int], reads: Iterable[int]
    ) -> Iterator[Lifetime]:
        """The cast that a region's second run makes.

        It is made for the op at whose save the run stops, too: its arguments are cast before that.
        """
        ticks, window = self._draft.step.ticks, region.window
        after = bisect_right(ticks, region.last_save)
        at = [ticks[op] for op in reads if op in region.ops and op <= after]
        if at:
            end = max((self._profile.saved[index].dropped for index in saves), default=NEVER)
            # A run that stops before its first op has no position of its own.
            last = max(window.first, window.end - 1)
            start = min(self._axis.rerun_at(region, min(at)), last)
            until = max(window.end, self._axis.position(end))  # Cached until the run ends.
            if start < until:
                size = self._profile.storage_table[storage].bytes
                yield Lifetime(size, start, until, when_wrapped(region.index), (), storage)

    def _cast_held_by(
        self, region: Region, saves: Iterable[int], reads: Iterable[int]
    ) -> Iterator[Extension]:
        """A region's holds on a cast that its second run makes again: to its own last release only if not wrapped."""
        end = max((self._profile.saved[index].released for index in saves), default=NEVER)
        yield Extension(self._axis.position(end), when_saved(self._groups.largest[region.index]))
        yield from self._watched_until_rerun(region, reads)

    # -- graphs behind inputs ----------------------------------------------------------------------------------

    def _keepers_of_saved(self) -> dict[int, list[Region]]:
        """For saved tensors that no backward unpacks: the later regions whose inputs were computed from them."""
        ticks = self._draft.step.ticks
        unused = [(i, saved) for i, saved in enumerate(self._profile.saved) if saved.unpacked == NEVER]
        found: dict[int, list[Region]] = {}
        for region in self._draft.regions:
            kept = [(i, s) for i, s in unused if s.tick < region.start < s.released < region.last_release]
            behind = self._ops_behind(region) if kept else set()
            for index, saved in kept:
                next_op = bisect_left(ticks, saved.tick)  # Saved just before its op ran, or just after.
                if not behind.isdisjoint((next_op - 1, next_op)):
                    found.setdefault(index, []).append(region)
        return found

    def _keepers_of_states(self) -> dict[int, list[Region]]:
        """For random states of the user's own checkpoints: the regions that keep the tensors such a checkpoint saved.

        A checkpoint stashes the state first and saves its inputs next; the same graph holds both.
        """
        table, found = self._profile.storage_table, {}
        states = [
            storage
            for storage in self._made_by_no_op
            if table[storage].bytes != SCALAR_BYTES and storage not in self._read
        ]
        for index, keepers in self._keepers.items():
            tick = self._profile.saved[index].tick
            last_op = self._draft.step.last_tick_before(tick)
            found |= {state: keepers for state in states if last_op < table[state].alloc < tick}
        return found

    def _ops_behind(self, region: Region) -> set[int]:
        """The ops from which the region's inputs were computed, directly or indirectly."""
        wanted = set(self._profile.calls[region.call].inputs)
        behind: set[int] = set()
        for index in range(bisect_left(self._draft.step.ticks, region.start) - 1, -1, -1):
            op = self._profile.tape[index]
            if not wanted.isdisjoint((*op.creates, *op.writes)):
                behind.add(index)
                wanted.update(op.reads)
        return behind

    # -- memory that is no storage of an op --------------------------------------------------------------------

    def _workspace(self) -> Iterator[Lifetime]:
        """Bytes that are alive only while an op runs."""
        for position, (op, again) in enumerate(zip(self._axis.op, self._axis.replayed, strict=True)):
            size, group = self._profile.tape[op].workspace_bytes, self._groups.of_op.get(op, -1)
            if size and not (again and self._groups.all[group].must_save):
                exists = when_recomputed(group) if again else ALWAYS
                yield Lifetime(size, position, position + 1, exists)

    def _random_states(self) -> Iterator[Lifetime]:
        """The random state stashed per region, and the current one, saved and restored around the second run."""
        if kind_of(self._profile.device) != "cpu":
            return
        for region in self._draft.regions:
            exists, position = when_wrapped(region.index), self._axis.position
            start, end = position(region.start), position(region.last_release)
            yield Lifetime(CPU_RANDOM_STATE_BYTES, start, end, exists)
            yield Lifetime(CPU_RANDOM_STATE_BYTES, region.window.first, region.window.end, exists)

    def _maker_without_op(self, storage: int) -> Region | None:
        """The region whose code makes this storage without an op (`torch.tensor`), in both runs; None for none."""
        if storage not in self._made_by_no_op or storage not in self._read:
            return None
        tick = self._profile.storage_table[storage].alloc
        makers = (region for region in self._draft.regions if region.owns(tick))
        return next((region for region in makers if self._groups.largest[region.index] >= 0), None)

    def _watched_until_rerun(self, maker: Region, reads: Iterable[int]) -> Iterator[Extension]:
        """The engine's holds on tensors that recomputed ops read, which it compares at the second run."""
        for op in reads if self._watches else ():
            group = self._groups.of_op[op]
            if self._groups.all[group].region == maker.index and not self._groups.all[group].must_save:
                spared = self._groups.spared(maker, op)
                when = when_wrapped(maker.index) if spared else when_recomputed(group)
                yield Extension(maker.window.first, when)

    def _life_without_op(self, storage: int, maker: Region, saves: Iterable[int]) -> tuple[int, int]:
        """Two ends of a storage that a region's first run made without an op.

        Returns:
            The last release by all others, and the last one by the region's own autograd, for a region not wrapped.
        """
        saved = [self._profile.saved[index] for index in saves]
        free = self._profile.storage_table[storage].free
        own = max((s.released for s in saved if maker.owns(s.tick)), default=free)
        others = max((s.released for s in saved if not maker.owns(s.tick)), default=free)
        return self._axis.position(max(free, others)), self._axis.position(own)

    def _made_again_by_no_op(self) -> Iterator[Lifetime]:
        """Storages that a region's second run makes without an op.

        These are numbers that autograd saves, tensors of Python numbers, and random states of the user's checkpoints.
        Such a state is held by the graph of the user's checkpoint, which is freed with the second run.
        """
        table, released = self._profile.storage_table, self._released_by_own_region()
        for region in self._draft.regions:
            window, exists = region.window, when_wrapped(region.index)
            again = [
                (table[storage], released.get(storage, NEVER))
                for storage in self._made_by_no_op
                if region.owns(table[storage].alloc) and table[storage].alloc <= region.last_save
            ]
            scalars = sum(record.bytes for record, _ in again if record.bytes == SCALAR_BYTES)
            if scalars:
                yield Lifetime(scalars, window.first, self._axis.position(region.last_release), exists)
            for record, own in again if window.rerun else ():
                # A storage made after the last op counts from it: early stop may end the run at that point.
                start = min(self._axis.rerun_at(region, record.alloc), window.end - 1)
                end = max(self._axis.rerun_free(region, record.free), self._axis.position(own))
                if record.bytes != SCALAR_BYTES and start < end:
                    yield Lifetime(record.bytes, start, end, exists)

    def _released_by_own_region(self) -> dict[int, int]:
        """Storage made in a region -> tick of the last release by that region's autograd."""
        released: dict[int, int] = {}
        for region in self._draft.regions:
            for saved in (self._profile.saved[index] for index in region.saved):
                if region.owns(self._profile.storage_table[saved.storage].alloc):
                    released[saved.storage] = max(released.get(saved.storage, NEVER), saved.released)
        return released


def _saved_and_wrapped(group: int, region: int) -> Condition:
    """The condition that the region is wrapped and the group, if any, is saved (-1: no group)."""
    return when_wrapped(region) if group < 0 else when_saved(group) & when_wrapped(region)
