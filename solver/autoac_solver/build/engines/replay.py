"""Engine "replay": only the recorded ops run again, on saved or recomputed inputs.

A storage is freed when Python and the rest of the step release it, but lives on
  - until autograd releases it, if autograd saved it: always if another region or code outside of regions saved it; if
    its own region saved it, only while its group is saved (for a recomputed group the replayed copy lives until then);
  - until the replay of an op that reads it, if that op is recomputed and the storage is not (or is another region's).
Where a backward keeps the graph, a replayed copy lives only until that backward has used it (until the next
replay, if it does not), and the next backward replays again. What replays read is kept until the graph is released.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.draft import Draft, Use, lifetime
from autoac_solver.build.engine_model import NOTHING
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import (
    ALWAYS,
    Extension,
    Lifetime,
    when_recomputed,
    when_saved,
)
from autoac_solver.records.devices import kind_of
from autoac_solver.records.disk.limits import Seconds
from autoac_solver.records.engines import REPLAY
from autoac_solver.records.profile import NEVER, UNPACKED_TWICE, Op, Profile


@dataclass(frozen=True, slots=True)
class ReplayCosts:
    """Seconds of the engine's bookkeeping.

    Args:
        op: per op that runs under the recording and is not recorded.
        record: per op that is recorded and runs again, in addition to `op` and the op's own time.
        saved: per tensor that passes the pack and unpack hooks.
        call: per call of a wrapped region.
    """

    op: Seconds = 4e-6
    record: Seconds = 8e-6
    saved: Seconds = 2e-6
    call: Seconds = 2e-5


class Replay:
    """See `EngineModel`."""

    name = REPLAY
    costs = ReplayCosts
    selects = True
    runs_code_twice = False
    one_random_state = False
    stops_early = False
    repeats = True
    compiles = False
    unsupported = NOTHING

    def build(self, profile: Profile, calls: Sequence[int]) -> Built | None:
        return None

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        keeps = any(window.keeps for window in region.windows)
        if keeps and step.profile.spans[region.call].once == UNPACKED_TWICE:
            yield (
                "a backward in it that keeps the graph reads `ctx.saved_tensors` twice, for which it would be computed "
                "again each time: read them once"
            )

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        return True

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        again_s = sum(step.profile.tape[op].again_s for op in ops)
        return len(region.windows) * (again_s + len(ops) * step.costs_of(self.name, ReplayCosts).record)

    def wanted(self, op: Op, storages: set[int]) -> bool:
        return not storages.isdisjoint((*op.creates, *op.writes))

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        call, own = profile.spans[tape.call], set(tape.group_of) - {-1}
        saved = {s.storage for s in profile.saved if call.start <= s.tick < call.end}
        return {group for group in own if not saved.isdisjoint(built.group_storages[group])}

    def wrap_s(self, draft: Draft, region: Region) -> float:
        costs = draft.step.costs_of(self.name, ReplayCosts)
        if draft.cut_call_of(region) >= 0 and region not in draft.cut_calls:
            return costs.call  # the call's recording goes on to another record of ops
        n_ops = len(region.ops) + draft.step.profile.spans[region.call].views
        return costs.op * n_ops + costs.saved * len(region.saved) + costs.call

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        makers = {storage: i for i, op in enumerate(draft.step.profile.tape) for storage in op.creates}
        for use in draft.uses():
            yield from lives_of(draft, use, makers)
        yield from lives_of_ops(draft)


def lives_of(draft: Draft, use: Use, makers: Mapping[int, int]) -> Iterator[Lifetime]:
    """The lifetimes of a storage: made in forward, and made again in replay.

    Args:
        makers: storage -> the op that creates it.
    """
    groups = draft.groups
    size = draft.step.profile.storage_table[use.storage].bytes
    group = groups.of_storage.get(use.storage, -1)
    region = groups.region_of.get(use.storage)
    start, end, own_end = draft.life(use.storage, use.saves)
    recomputable = groups.is_decided(use.storage)
    kept: list[Extension] = []
    own_reads: list[int] = []  # reads that run again beside the storage's own ops
    if own_end != NEVER:
        kept.append(Extension(own_end, when_saved(group)))
    for op in use.reads:
        reader = groups.of_op[op]
        home = draft.regions[groups.all[reader].region]
        if op not in home.window.rerun or groups.all[reader].must_save:
            continue
        until = draft.axis.recorded_until(home, op)
        if home is not region or not recomputable:
            kept.append(Extension(until, when_recomputed(reader)))
            continue
        own_reads.append(op)
        if reader != group and until > own_end:
            kept.append(Extension(until, when_recomputed(reader) & when_saved(group)))
    yield lifetime(size, start, end, ALWAYS, kept, use.storage)
    if not recomputable or region is None:
        return
    for number, window in enumerate(region.windows):
        first = window.rerun[makers[use.storage]]
        again = []
        if (until := _used_until(draft, region, number, use.saves)) != NEVER:
            again.append(Extension(until))
        for op in own_reads:
            when = ALWAYS if groups.of_op[op] == group else when_recomputed(groups.of_op[op])
            again.append(Extension(window.rerun[op] + 1, when))
        yield lifetime(size, first, first + 1, when_recomputed(group), again, use.storage)


def _used_until(draft: Draft, region: Region, number: int, saves: Iterable[int]) -> int:
    """The position until which autograd's handles keep a storage that one of a region's replays has made.

    Args:
        number: of the replay.
        saves: the saved tensors on the storage.

    Returns:
        `NEVER` if the region saves none of them.
    """
    window, later = region.windows[number], region.windows[number + 1 :]
    found = [NEVER]
    for index in saves:
        saved = draft.step.profile.saved[index]
        if not region.owns(saved.tick):
            continue
        if index in window.uses:
            found.append(draft.axis.position(window.uses[index]))
        else:
            found.append(later[0].first if later else draft.axis.position(saved.released))
    return max(found)


def lives_of_ops(draft: Draft, hidden: Container[int] = ()) -> Iterator[Lifetime]:
    """Workspace, and on CPU the random states: the one stashed until replay, and the generator's during the replay.

    Args:
        hidden: positions inside compiled regions, at which no op of forward or backward runs.
    """
    axis, groups, profile = draft.axis, draft.groups, draft.step.profile
    on_cpu = kind_of(profile.device) == "cpu"
    last = {op: at for at, (op, again) in enumerate(zip(axis.op, axis.replayed, strict=True)) if again}
    for position, (op, again) in enumerate(zip(axis.op, axis.replayed, strict=True)):
        record = profile.tape[op]
        group = groups.of_op.get(op, -1)
        if (again and groups.all[group].must_save) or (position in hidden and not again):
            continue
        exists = when_recomputed(group) if again else ALWAYS
        stashed = record.random_bytes if again and on_cpu else 0
        if stashed and position == last[op]:
            until = axis.recorded_until(draft.regions[groups.all[group].region], op)
            yield Lifetime(stashed, axis.forward[op], until, exists)
        if record.workspace_bytes + stashed:
            yield Lifetime(record.workspace_bytes + stashed, position, position + 1, exists)
