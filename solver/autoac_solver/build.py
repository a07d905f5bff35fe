"""From a profile, a choice of regions and an engine to the problem that is solved.

The tape shows the step with nothing held by a plan. Here we add what a plan does: a region's ops are run again where
its backward begins (its first unpack), and storages live as long as their holders.

Replay engine. A storage dies when Python and the rest of the step let go of it, but lives on
  - until autograd releases it, if autograd saved it: always when another region or the code around regions saved it;
    while its unit is kept when its own region did (for a recomputed unit, the replayed copy lives until then);
  - until the replay of an op that reads it, if that op is recomputed and the storage is not (or is another region's).
Sac engine. The region's Python code runs again, so a replayed copy, and a saved entry once the second run has passed
it, live as long as Python and autograd want. A wrapped region keeps its inputs and one random state until its last
release, and what is not recomputed is saved whether somebody needs it or not. With its inputs it keeps the graph behind
them: what autograd has saved there for a result that is thrown away lives as long as they do.
Plans of both engines may also recompute the log-probabilities of cross entropies, outside of regions: see `losses`.
Plain checkpointing, as people use it by hand, is the sac engine without a policy: everything in a region is recomputed,
side effects too, and nothing is looked up for each op. It is not planned for, but compared with.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import numpy as np

from autoac_solver.losses import ChunkableLoss, chunkable_losses
from autoac_solver.pauses import possible_pauses
from autoac_solver.problem import ALWAYS, Condition, Holder, Instance, Problem, RegionCost, SharedCost, Unit
from autoac_solver.profile import NEVER, SCALAR_BYTES, ModuleCall, Profile

LOSS = "(loss)"
"""Where the log-probabilities of cross entropies belong, which are in no region."""

CPU_RANDOM_STATE_BYTES = 5056
"""Size of a CPU generator's state; `torch.utils.checkpoint` stashes one for each region."""


@dataclass(frozen=True)
class RegionTape:
    """One region on the tape.

    Args:
        call: index of its module call.
        ops: its ops, in order.
        unit_of: for each of `ops`, the unit it belongs to, -1 if it is never recomputed.
        free_of_choice: for each of `ops`, whether it may be called recomputed without ever running again (sac: it
            comes after the last tensor that autograd saves, so early stop spares it).
    """

    call: int
    ops: tuple[int, ...]
    unit_of: tuple[int, ...]
    free_of_choice: tuple[bool, ...]


@dataclass(frozen=True)
class Built:
    """A problem, and what its regions and units stand for.

    Args:
        engine: "replay" or "sac".
        regions, problem: see there. The problem has one region more, `LOSS`, if `loss` is a unit.
        unit_storages: for each unit, the storages that it is about.
        reasons: for each unit that must be saved by its nature, why.
        loss: the unit of the log-probabilities of all cross entropies that may be chunked, -1 for none.
    """

    engine: str
    regions: tuple[RegionTape, ...]
    problem: Problem
    unit_storages: tuple[tuple[int, ...], ...] = field(repr=False, default=())
    reasons: dict[int, str] = field(repr=False, default_factory=dict)
    loss: int = -1

    def steps(
        self, profile: Profile, region: int, recomputed: Sequence[bool]
    ) -> tuple[tuple[str, bool], ...]:
        """Overload and decision of every op of a region, in order."""
        tape = self.regions[region]
        return tuple(
            (profile.tape[op].name, spared or (unit >= 0 and bool(recomputed[unit])))
            for op, unit, spared in zip(tape.ops, tape.unit_of, tape.free_of_choice, strict=True)
        )

    def runs(self, profile: Profile, recomputed: Sequence[bool]) -> np.ndarray:
        """Which positions of the planned step an op runs at, bool each.

        Not the replays of what is not recomputed, nor under engine replay of what nobody needs (any more).
        """
        again = {op for tape in self.regions for op in self._again(profile, tape, recomputed)}
        problem = self.problem
        positions = zip(problem.position_op, problem.position_replayed, strict=True)
        return np.array([not replayed or op in again for op, replayed in positions], dtype=bool)

    def _again(self, profile: Profile, tape: RegionTape, recomputed: Sequence[bool]) -> Iterator[int]:
        """The ops of a region that run again, last ones first."""
        call = profile.calls[tape.call]
        saved = [s for s in profile.saved if call.start <= s.tick < call.end]
        begins = min((s.unpacked for s in saved if s.unpacked >= call.end), default=NEVER)
        wanted = {s.storage for s in saved if s.released >= begins}
        for op, unit in zip(reversed(tape.ops), reversed(tape.unit_of), strict=True):
            record = profile.tape[op]
            needed = self.engine != "replay" or not wanted.isdisjoint((*record.creates, *record.writes))
            if unit >= 0 and recomputed[unit] and needed:
                wanted.update(record.reads)
                yield op


def build(
    profile: Profile, regions: Sequence[int], engine: str, pinned: AbstractSet[int] = frozenset()
) -> Built:
    """The problem for these regions under this engine.

    Args:
        regions: module calls, none inside another; those without anything to decide on are left out.
        engine: "replay", "sac", or "checkpoint" for `torch.utils.checkpoint` without a policy.
        pinned: ops that must not be run again because the user says so.
    """
    return _Builder(profile, regions, engine, pinned).built()


def may_run_twice(call: ModuleCall) -> bool:
    """Whether a module's code may run a second time, as engine sac has it, for all that its arguments tell."""
    return not call.changes_arguments


class _Region:
    """A region while the problem is built."""

    def __init__(self, profile: Profile, call: int, ops: range, saved: list[int]):
        self.call = call
        self.ops = ops
        self.saved = saved
        record = profile.calls[call]
        self.start, self.end = record.start, record.end
        self.begin_backward = min(
            (profile.saved[s].unpacked for s in saved if profile.saved[s].unpacked >= self.end), default=NEVER
        )
        self.last_save = max((profile.saved[s].tick for s in saved), default=NEVER)
        self.last_release = max((profile.saved[s].released for s in saved), default=NEVER)
        self.index = -1  # among the problem's regions
        self.first_position = -1  # of its replay window
        self.spares = False  # whether its ops after the last save need no decision (sac), see `_spared`
        self.rerun: dict[int, int] = {}  # op -> position of its replay, in their order
        self.rerun_ticks: list[int] = []  # of these ops
        self.window_end = -1

    def owns(self, tick: int) -> bool:
        return self.start <= tick < self.end


def _ops_of(losses: Iterable[ChunkableLoss]) -> set[int]:
    """Of forward."""
    return {op for loss in losses for op in (loss.log_softmax, loss.loss)}


class _Builder:
    def __init__(self, profile: Profile, regions: Sequence[int], engine: str, pinned: AbstractSet[int]):
        if engine not in ("replay", "sac", "checkpoint"):
            raise ValueError(f"engine is {engine!r}; known are 'replay', 'sac' and 'checkpoint'")
        self.profile = profile
        self.engine = engine
        self.reruns_code = engine != "replay"
        self.pinned = pinned
        self.reasons: dict[int, str] = {}
        self.ticks = [op.tick for op in profile.tape]
        self.writes: dict[int, list[int]] = {}  # storage -> ticks at which it is written
        for op in profile.tape:
            for storage in op.writes:
                self.writes.setdefault(storage, []).append(op.tick)
        self.regions = self._regions(regions)
        self.region_of_storage = self._owners()
        self.unit_of_op: dict[int, int] = {}
        self.unit_of_storage: dict[int, int] = {}
        self.units: list[Unit] = []
        for region in self.regions:
            if not self.loss_ops.issuperset(region.ops):
                self._add_units(region)
        self.loss_unit = len(self.units) if self.losses else -1
        self._place_windows()
        self.keepers = self._keepers() if self.reruns_code else {}
        self.cached_casts = {storage for op in profile.tape if op.cached_cast for storage in op.creates}
        made = {storage for op in profile.tape for storage in op.creates}
        self.read = {storage for op in profile.tape for storage in op.reads}
        self.made_by_no_op = {
            index: storage
            for index, storage in enumerate(profile.storage_table)
            if storage.alloc != NEVER and index not in made
        }
        self.state_keepers = self._state_keepers()
        self._often_recomputed = self._largest_units()

    # -- regions and units -------------------------------------------------------------------------------------

    def _regions(self, calls: Sequence[int]) -> list[_Region]:
        saved_ticks = [(s.tick, i) for i, s in enumerate(self.profile.saved)]
        saved_ticks.sort()
        profile, found = self.profile, []
        for call in calls:
            record = profile.calls[call]
            if self.engine == "sac" and not may_run_twice(record):
                continue
            ops = range(bisect_left(self.ticks, record.start), bisect_left(self.ticks, record.end))
            first = bisect_left(saved_ticks, (record.start, -1))
            last = bisect_left(saved_ticks, (record.end, -1))
            region = _Region(profile, call, ops, [i for _, i in saved_ticks[first:last]])
            if self.engine == "sac" and self._changes_what_would_be_saved(ops):
                continue
            if self.reruns_code and any(NEVER < profile.saved[i].unpacked < record.end for i in region.saved):
                continue  # selective checkpointing refuses a backward inside of the region's forward
            if record.grad and ops and region.begin_backward != NEVER and not self._loses_input(region):
                found.append(region)
        found.sort(key=lambda region: region.start)
        self.losses = self._losses(found)
        self.loss_ops = _ops_of(self.losses)
        for index, region in enumerate(found):
            region.index = index
        return found

    def _loses_input(self, region: _Region) -> bool:
        """Whether the region's code cannot run again (sac), as an input is no longer there: torch refuses that."""
        record = self.profile.calls[region.call]
        return self.reruns_code and any(
            self._written_after(storage, record.start, region.begin_backward) for storage in record.inputs
        )

    def _changes_what_would_be_saved(self, ops: range) -> bool:
        """Whether an op changes the size of a tensor that one of these ops has made (`resize_`, `out=`).

        It is recorded as one that cannot run again. What selective checkpointing saves of the tensor when it is made
        keeps the size that it had then.
        """
        tape, made = self.profile.tape, set[int]()
        for op in ops:
            record = tape[op]
            made.update(record.creates)
            if (
                not record.replayable
                and record.name.startswith("aten.")
                and not made.isdisjoint(record.writes)
            ):
                return True
        return False

    def _owners(self) -> dict[int, _Region]:
        owners = {}
        for region in self.regions:
            for op in region.ops:
                for storage in self.profile.tape[op].creates:
                    owners[storage] = region
        return owners

    def _add_units(self, region: _Region) -> None:
        """Group the region's ops into units: ops that write a common storage of the region belong together."""
        tape = self.profile.tape
        group: dict[int, int] = {}  # storage -> representative storage

        def find(storage: int) -> int:
            while group[storage] != storage:
                storage = group[storage]
            return storage

        own_of = {}
        for op in region.ops:
            own = [
                *tape[op].creates,
                *(s for s in tape[op].writes if self.region_of_storage.get(s) is region),
            ]
            own_of[op] = own
            for storage in own:
                group.setdefault(storage, storage)
                group[find(storage)] = find(own[0])
        members: dict[int, list[int]] = {}
        for op, own in own_of.items():
            if own:
                members.setdefault(find(own[0]), []).append(op)
        for ops in members.values():
            index = len(self.units)
            for op in ops:
                self.unit_of_op[op] = index
                for storage in own_of[op]:
                    self.unit_of_storage[storage] = index
            self.units.append(Unit(region=region.index, time_s=0.0, ops=tuple(ops)))
        first_unit = len(self.units) - len(members)
        opaque = self._kept_storages(region)
        for index in range(first_unit, len(self.units)):
            self.units[index] = self._unit(region, index, opaque)
        if self.engine == "sac":
            self._tie_random_units(range(first_unit, len(self.units)))
        region.spares = self._spares(region)

    def _unit(self, region: _Region, index: int, opaque: set[int]) -> Unit:
        ops = self.units[index].ops
        requires: set[int] = set()
        reasons: list[str] = []
        for op in ops:
            record = self.profile.tape[op]
            own = {*record.creates, *(s for s in record.writes if self.region_of_storage.get(s) is region)}
            if not record.replayable:
                reasons.append("it cannot be run a second time")
            if own & opaque:
                reasons.append("it is written where no op is seen, or needed while its region still runs")
            if set(record.writes) - own:
                reasons.append("the op changes something outside of the region as well")
            if record.side_effect and self.reruns_code:
                reasons.append("under engine sac the op would have its side effect twice")
            for storage in record.reads:
                if not self._written_after(storage, record.tick, region.begin_backward):
                    continue
                owner = self.unit_of_storage.get(storage, -1)
                if self.region_of_storage.get(storage) is not region or owner < 0:
                    reasons.append("the op's input is no longer what it was when it would run again")
                elif owner != index:
                    requires.add(owner)
        reruns = [op for op in ops if not self.reruns_code or self.profile.tape[op].tick < region.last_save]
        time_s = sum(self.profile.tape[op].again_s for op in reruns)
        if self.engine == "replay":
            time_s += len(ops) * self.profile.costs.replay_record
        if reasons and self.engine != "checkpoint":
            self.reasons[index] = f"{self.profile.tape[ops[0]].name}: {reasons[0]}"
        must_save = index in self.reasons or not self.pinned.isdisjoint(ops)
        return Unit(region.index, time_s, must_save, tuple(sorted(requires)), -1, ops)

    def _kept_storages(self, region: _Region) -> set[int]:
        """Storages that cannot be recomputed.

        Those that are read, or saved by autograd, before any visible op has written them (an opaque kernel did), and
        those that a backward inside of the region's own forward needs.
        """
        raw: set[int] = set()
        opaque = {
            self.profile.saved[s].storage
            for s in region.saved
            if NEVER < self.profile.saved[s].unpacked < region.end
        }
        saves = sorted((self.profile.saved[s].tick, self.profile.saved[s].storage) for s in region.saved)
        cursor = 0
        for op in region.ops:
            record = self.profile.tape[op]
            while cursor < len(saves) and saves[cursor][0] < record.tick:
                opaque |= raw & {saves[cursor][1]}
                cursor += 1
            opaque |= raw & (set(record.reads) - set(record.writes))
            raw -= set(record.writes)
            if record.uninitialised:
                raw |= set(record.creates)
        return opaque | (raw & {storage for _, storage in saves[cursor:]})

    def _written_after(self, storage: int, tick: int, before: int) -> bool:
        ticks = self.writes.get(storage, ())
        position = bisect_right(ticks, tick)
        return position < len(ticks) and ticks[position] < before

    def _tie_random_units(self, units: range) -> None:
        """Torch stashes one random state a region: its random ops are all saved or all recomputed.

        It does not stash that of a generator of the model's own, to draw from which is a side effect.
        """

        random = [u for u in units if self._draws(self.units[u].ops)]
        must_save = any(self.units[u].must_save for u in random)
        for unit in random:
            same_as = random[0] if unit != random[0] else -1
            self.units[unit] = replace(self.units[unit], must_save=must_save, same_as=same_as)

    def _draws(self, ops: Iterable[int]) -> bool:
        """Whether one of these ops draws from the random state that torch stashes for the region."""
        tape = self.profile.tape
        return any(tape[op].random_bytes and not tape[op].side_effect for op in ops)

    # -- positions ---------------------------------------------------------------------------------------------

    def _place_windows(self) -> None:
        """The axis: the tape's ops in order, and before the first unpack of each region its ops once more."""
        windows = sorted(self.regions, key=lambda region: region.begin_backward)
        self.position_op: list[int] = []
        self.position_replayed: list[bool] = []
        self.position_ticks: list[int] = []  # ops of a window stand at the tick of its first unpack
        next_op = 0
        for region in windows:
            stop = bisect_left(self.ticks, region.begin_backward)
            self._append(range(next_op, stop), False, None)
            next_op = stop
            region.first_position = len(self.position_op)
            ops = [
                op
                for op in region.ops
                if op in self.unit_of_op and (not self.reruns_code or self.ticks[op] < region.last_save)
            ]
            region.rerun = {op: region.first_position + i for i, op in enumerate(ops)}
            region.rerun_ticks = [self.ticks[op] for op in ops]
            self._append(ops, True, region.begin_backward)
            region.window_end = len(self.position_op)
        self._append(range(next_op, len(self.ticks)), False, None)
        self.forward_position = {
            op: p
            for p, (op, again) in enumerate(zip(self.position_op, self.position_replayed, strict=True))
            if not again
        }

    def _append(self, ops: Sequence[int], replayed: bool, tick: int | None) -> None:
        self.position_op.extend(ops)
        self.position_replayed.extend([replayed] * len(ops))
        self.position_ticks.extend(self.ticks[op] if tick is None else tick for op in ops)

    def _position(self, tick: int) -> int:
        """First position at or after this tick: what dies at a tick is not alive there."""
        return bisect_left(self.position_ticks, tick)

    # -- losses ------------------------------------------------------------------------------------------------

    def _losses(self, regions: list[_Region]) -> tuple[ChunkableLoss, ...]:
        """The cross entropies that may be chunked: outside of the regions, and none of them has a hand in their logits.

        A region that is nothing but such a loss does not count: nothing is decided on in it.
        """
        losses = () if self.engine == "checkpoint" else chunkable_losses(self.profile)
        if not losses:
            return ()
        tape = self.profile.tape
        others = [region for region in regions if not _ops_of(losses).issuperset(region.ops)]
        ops = {op for region in others for op in region.ops}
        held = {storage for region in others for storage in self.profile.calls[region.call].inputs}
        held |= {storage for op in ops for storage in set(tape[op].reads) - set(tape[op].writes)}
        # What a region's ops make and do not recompute, selective checkpointing keeps whether it is needed or not.
        held |= {storage for op in ops for storage in tape[op].creates} if self.reruns_code else set()
        fine = all(
            loss.log_softmax not in ops and not (loss.alone and loss.logits in held) for loss in losses
        )
        return losses if fine else ()

    def _with_chunked_loss(
        self, loss: ChunkableLoss, instances: list[Instance], saved_of: Mapping[int, list[int]]
    ) -> Iterator[Instance]:
        """What it changes in the lives of storages if the loss is chunked."""
        gone = (loss.log_probabilities, loss.gradient) if loss.alone else (loss.log_probabilities,)
        # The gradient is in the logits from there on, if it is written over them.
        last = loss.gradient if loss.alone else loss.log_probabilities
        _, end, _ = self._life(last, saved_of.get(last, []))
        held = Holder(end, Condition(recomputed=self.loss_unit))
        for instance in instances:
            if instance.storage in gone:
                yield replace(instance, exists=Condition(kept=self.loss_unit))
            elif instance.storage == loss.logits and instance.exists == ALWAYS and end > instance.end:
                yield replace(instance, holders=(*instance.holders, held))
            else:
                yield instance

    def _loss_instances(self) -> Iterator[Instance]:
        """What chunked losses hold besides."""
        when = Condition(recomputed=self.loss_unit)
        for loss in self.losses:
            for op, extra in (
                (loss.log_softmax, loss.forward_bytes),
                (loss.loss, loss.loss_bytes),
                (loss.backward, loss.backward_bytes),
            ):
                yield Instance(extra, self.forward_position[op], self.forward_position[op] + 1, when)

    # -- instances ---------------------------------------------------------------------------------------------

    def built(self) -> Built:
        """The problem, with what its units stand for."""
        instances = [*self._storage_instances(), *self._op_instances(), *self._loss_instances()]
        units = list(self.units)
        costs = self.profile.costs
        wraps: list[RegionCost] = []
        shared: list[SharedCost] = []
        for region in self.regions:
            record = self.profile.calls[region.call]
            per_op, per_saved, per_call = {
                "replay": (costs.replay_op, costs.replay_saved, costs.replay_call),
                "sac": (costs.sac_op, costs.sac_saved, costs.sac_call),
                "checkpoint": (0.0, costs.sac_saved, costs.sac_call),
            }[self.engine]
            wrap_s = per_op * (len(region.ops) + record.views) + per_saved * len(region.saved) + per_call
            if self.engine == "replay":
                paused_s, units_s = self._pauses(region)
                wrap_s += paused_s
                shared += units_s
            wraps.append(RegionCost(wrap_s, self.profile.module_name(region.call)))
        if self.losses:
            ops = tuple(loss.log_softmax for loss in self.losses)
            time_s = sum(self.profile.tape[op].again_s for op in ops)
            units.append(Unit(len(wraps), time_s, not self.pinned.isdisjoint(ops), ops=ops))
            wraps.append(RegionCost(0.0, LOSS))
        problem = Problem(
            n_positions=len(self.position_op),
            resident_bytes=self.profile.resident_bytes,
            step_s=self.profile.step_s,
            units=tuple(units),
            regions=tuple(wraps),
            instances=tuple(instances),
            position_op=tuple(self.position_op),
            position_replayed=tuple(self.position_replayed),
            shared=tuple(shared),
        )
        storages: list[list[int]] = [[] for _ in self.units]
        for storage, unit in self.unit_of_storage.items():
            storages[unit].append(storage)
        if self.losses:
            storages.append([loss.log_probabilities for loss in self.losses])
        return Built(
            self.engine,
            tuple(self._region_tape(region) for region in self.regions),
            problem,
            tuple(tuple(sorted(group)) for group in storages),
            self.reasons,
            self.loss_unit,
        )

    def _pauses(self, region: _Region) -> tuple[float, list[SharedCost]]:
        """What pauses change in the cost of wrapping: seconds if all are made, and what it costs to leave each out."""
        costs, never = self.profile.costs, {self.profile.calls[other.call].fqn for other in self.regions}
        shared = []
        for pause in possible_pauses(self.profile, region.call, never):
            ops = region.ops[pause.start : pause.end]
            units = {self.unit_of_op[op] for op in ops if op in self.unit_of_op}
            shared.append(SharedCost(tuple(sorted(units)), pause.seen * costs.replay_op - costs.replay_pause))
        return -sum(cost.time_s for cost in shared), shared

    def _region_tape(self, region: _Region) -> RegionTape:
        spared = tuple(self._spared(region, op) for op in region.ops)
        units = tuple(self.unit_of_op.get(op, -1) for op in region.ops)
        return RegionTape(region.call, tuple(region.ops), units, spared)

    def _spared(self, region: _Region, op: int) -> bool:
        """Whether early stop spares the op (sac), whatever is decided."""
        return region.spares and self.ticks[op] > region.last_save

    def _spares(self, region: _Region) -> bool:
        """Whether the ops after the last save may be called recomputed, as they never run again.

        Not where one of them must be saved (it would find its inputs changed, or early stop can be off), where it goes
        only with another, or where it is random, since those all go one way: then all are decided on as the others are.
        """
        late = [op for op in region.ops if self.ticks[op] > region.last_save]
        units = [self.units[unit] for unit in {self.unit_of_op[op] for op in late if op in self.unit_of_op}]
        tied = any(unit.must_save or unit.requires or self._draws(unit.ops) for unit in units)
        return self.reruns_code and self.pinned.isdisjoint(late) and not tied

    def _storage_instances(self) -> list[Instance]:
        saved_of: dict[int, list[int]] = {}
        for index, saved in enumerate(self.profile.saved):
            saved_of.setdefault(saved.storage, []).append(index)
        reads_of: dict[int, list[int]] = {}
        for region in self.regions:
            for op in region.ops:
                if op in self.unit_of_op:
                    for storage in self.profile.tape[op].reads:
                        reads_of.setdefault(storage, []).append(op)
        inputs_of: dict[int, list[_Region]] = {}
        for region in self.regions:
            for storage in set(self.profile.calls[region.call].inputs):
                inputs_of.setdefault(storage, []).append(region)
        add = self._replay_instances if self.engine == "replay" else self._sac_instances
        instances: list[Instance] = []
        for index, storage in enumerate(self.profile.storage_table):
            if storage.alloc == NEVER or not storage.bytes:
                continue
            saves = saved_of.get(index, [])
            instances += add(index, saves, reads_of.get(index, []), inputs_of.get(index, []))
        for loss in self.losses:
            instances = list(self._with_chunked_loss(loss, instances, saved_of))
        return instances

    def _life(self, storage: int, saves: list[int]) -> tuple[int, int, int]:
        """Start, end whatever is decided, and the end of what its own region's autograd wants (-1: nothing)."""
        record = self.profile.storage_table[storage]
        region = self.region_of_storage.get(storage)
        end, own_end = record.free, NEVER
        decided = storage in self.unit_of_storage and not self.units[self.unit_of_storage[storage]].must_save
        for index in saves:
            saved = self.profile.saved[index]
            if decided and region is not None and region.owns(saved.tick):
                own_end = max(own_end, saved.released)
            else:
                end = max(end, saved.released)
        start = self._position(record.alloc)
        return start, self._position(end), NEVER if own_end == NEVER else self._position(own_end)

    def _replay_instances(
        self, storage: int, saves: list[int], reads: list[int], inputs: list[_Region]
    ) -> list[Instance]:
        size = self.profile.storage_table[storage].bytes
        unit = self.unit_of_storage.get(storage, -1)
        region = self.region_of_storage.get(storage)
        start, end, own_end = self._life(storage, saves)
        recomputable = unit >= 0 and not self.units[unit].must_save
        kept: list[Holder] = []
        again: list[Holder] = []
        if own_end != NEVER:
            kept.append(Holder(own_end, Condition(kept=unit)))
            again.append(Holder(own_end))
        for op in reads:
            reader = self.unit_of_op[op]
            home = self.regions[self.units[reader].region]
            if op not in home.rerun or self.units[reader].must_save:
                continue
            until = home.rerun[op] + 1
            if home is not region or not recomputable:
                kept.append(Holder(until, Condition(recomputed=reader)))
            elif reader == unit:
                again.append(Holder(until))
            else:
                if until > own_end:
                    kept.append(Holder(until, Condition(recomputed=reader, kept=unit)))
                again.append(Holder(until, Condition(recomputed=reader)))
        instances = [_instance(size, start, end, ALWAYS, kept, storage)]
        if recomputable and region is not None:
            first = min(
                region.rerun[op] for op in self.units[unit].ops if storage in self.profile.tape[op].creates
            )
            instances.append(_instance(size, first, first + 1, Condition(recomputed=unit), again, storage))
        return instances

    def _sac_instances(
        self, storage: int, saves: list[int], reads: list[int], inputs: list[_Region]
    ) -> list[Instance]:
        record = self.profile.storage_table[storage]
        unit = self.unit_of_storage.get(storage, -1)
        region = self.region_of_storage.get(storage)
        holders = [
            Holder(self._position(taker.last_release), Condition(wrapped=taker.index))
            for taker in [*inputs, *self.state_keepers.get(storage, ())]
            if taker is not region
        ]
        casts, casts_held, saves = self._casts_in_other_regions(storage, region, saves, reads)
        holders += casts_held
        start, end, own_end = self._life(storage, saves)
        decided = unit >= 0 and region is not None and not self.units[unit].must_save
        for index in saves:
            own = decided and region is not None and region.owns(self.profile.saved[index].tick)
            for keeper in self.keepers.get(index, ()):
                when = Condition(kept=unit if own else -1, wrapped=keeper.index)
                holders.append(Holder(self._position(keeper.last_release), when))
        if unit < 0 or region is None:
            maker = self._maker_without_op(storage)
            if maker is not None:
                end, own_end = self._life_without_op(storage, maker, saves)
                holders.append(Holder(own_end, Condition(kept=self._often_recomputed[maker.index])))
                holders += self._watched_until_rerun(maker, reads)
            return [_instance(record.bytes, start, end, ALWAYS, holders, storage), *casts]
        made = [region.rerun[op] for op in self.units[unit].ops if op in region.rerun]
        if own_end != NEVER:
            holders.append(Holder(own_end, Condition(kept=unit)))
        instances = [*casts]
        stops_before = len(made) < len(self.units[unit].ops)
        if stops_before and not self._spared(region, self.units[unit].ops[0]):
            # saved for a second run that stops before it would ask
            asked = Condition(kept=unit if decided else -1, wrapped=region.index)
            holders.append(Holder(self._position(region.last_release), asked))
        if made:
            first = min(made)
            # A graph that dies within forward dies as late in the second run, and with it what autograd saved.
            own = [saved for s in saves if region.owns((saved := self.profile.saved[s]).tick)]
            gone = max(self._rerun_free(region, max([record.free, *(s.released for s in own)])), first + 1)
            holders.append(Holder(gone, Condition(kept=unit if decided else -1, wrapped=region.index)))
            if decided:
                again = [Holder(self._position(max(saved.dropped for saved in own)))] if own else []
                instances.append(
                    _instance(record.bytes, first, gone, Condition(recomputed=unit), again, storage)
                )
        return [_instance(record.bytes, start, end, ALWAYS, holders, storage), *instances]

    def _casts_in_other_regions(
        self, storage: int, maker: _Region | None, saves: list[int], reads: list[int]
    ) -> tuple[list[Instance], list[Holder], list[int]]:
        """What regions do with a cast that autocast had at hand for them in their first run.

        Returns:
            The casts that their second runs make anew, who of them holds the first one, and the saves of others.
        """
        instances: list[Instance] = []
        holders: list[Holder] = []
        for region in self.regions if storage in self.cached_casts else ():
            if region is not maker and self._often_recomputed[region.index] >= 0:
                own = [index for index in saves if region.owns(self.profile.saved[index].tick)]
                instances += self._cast_again(storage, region, own, reads)
                holders += self._cast_held_by(region, own, reads)
                saves = [index for index in saves if index not in own]
        return instances, holders, saves

    def _cast_again(
        self, storage: int, region: _Region, saves: Iterable[int], reads: Iterable[int]
    ) -> Iterator[Instance]:
        """The cast that a region's second run makes.

        Also for the op at whose save the run ends: its arguments are cast before.
        """
        after = bisect_right(self.ticks, region.last_save)
        at = [self.ticks[op] for op in reads if op in region.ops and op <= after]
        if at:
            end = max((self.profile.saved[index].dropped for index in saves), default=NEVER)
            # Where the run ends before any op it has no position of its own.
            last = max(region.first_position, region.window_end - 1)
            start = min(self._rerun_at(region, min(at)), last)
            until = max(region.window_end, self._position(end))  # autocast keeps it to the end of the run
            if start < until:
                exists = Condition(wrapped=region.index)
                yield Instance(self.profile.storage_table[storage].bytes, start, until, exists, (), storage)

    def _cast_held_by(self, region: _Region, saves: Iterable[int], reads: Iterable[int]) -> Iterator[Holder]:
        """How long a region holds a cast that is made anew in its second run: the whole of it only if not wrapped.

        That cannot be said, but that one of its units is kept.
        """
        end = max((self.profile.saved[index].released for index in saves), default=NEVER)
        yield Holder(self._position(end), Condition(kept=self._often_recomputed[region.index]))
        yield from self._watched_until_rerun(region, reads)

    def _keepers(self) -> dict[int, list[_Region]]:
        """For saved tensors that no backward comes for: the later regions whose inputs were made from them."""
        unused = [(index, saved) for index, saved in enumerate(self.profile.saved) if saved.unpacked == NEVER]
        found: dict[int, list[_Region]] = {}
        for region in self.regions:
            kept = [
                (index, saved)
                for index, saved in unused
                if saved.tick < region.start < saved.released < region.last_release
            ]
            behind = self._ops_behind(region) if kept else set()
            for index, saved in kept:
                next_op = bisect_left(self.ticks, saved.tick)
                if not behind.isdisjoint(
                    (next_op - 1, next_op)
                ):  # saved just before its op ran, or just after
                    found.setdefault(index, []).append(region)
        return found

    def _state_keepers(self) -> dict[int, list[_Region]]:
        """For random states of the user's own checkpoints: the regions that keep what such a checkpoint has saved.

        It stashes the state first and saves its inputs next, and one graph holds both.
        """
        table, found = self.profile.storage_table, {}
        states = [
            storage
            for storage in self.made_by_no_op
            if table[storage].bytes != SCALAR_BYTES and storage not in self.read
        ]
        for index, keepers in self.keepers.items():
            tick = self.profile.saved[index].tick
            last_op = self._last_tick_before(tick)
            found |= {state: keepers for state in states if last_op < table[state].alloc < tick}
        return found

    def _largest_units(self) -> list[int]:
        """For each region the unit of most bytes that may be recomputed, -1 if none may.

        A region is hardly wrapped without it.
        """
        sizes: dict[int, int] = {}
        for storage, unit in self.unit_of_storage.items():
            if not self.units[unit].must_save:
                sizes[unit] = sizes.get(unit, 0) + self.profile.storage_table[storage].bytes
        largest = [-1] * len(self.regions)
        for unit, size in sizes.items():
            region = self.units[unit].region
            if largest[region] < 0 or size > sizes[largest[region]]:
                largest[region] = unit
        return largest

    def _last_tick_before(self, tick: int) -> int:
        """Of the ops."""
        index = bisect_left(self.ticks, tick)
        return self.ticks[index - 1] if index else NEVER

    def _ops_behind(self, region: _Region) -> set[int]:
        """The ops that the region's inputs were made by, from all that these read."""
        wanted = set(self.profile.calls[region.call].inputs)
        behind: set[int] = set()
        for index in range(bisect_left(self.ticks, region.start) - 1, -1, -1):
            op = self.profile.tape[index]
            if not wanted.isdisjoint((*op.creates, *op.writes)):
                behind.add(index)
                wanted.update(op.reads)
        return behind

    def _rerun_free(self, region: _Region, free: int) -> int:
        """Where the second run of the region's code lets go of what the first let go of at tick `free`."""
        return region.window_end if free > region.end else self._rerun_at(region, free)

    def _rerun_at(self, region: _Region, tick: int) -> int:
        """The position after those at which the region's ops before this tick run again."""
        return region.first_position + bisect_left(region.rerun_ticks, tick)

    def _op_instances(self) -> list[Instance]:
        """Workspace and random-number states."""
        instances = []
        on_cpu = self.profile.device.split(":")[0] == "cpu"
        for position, op in enumerate(self.position_op):
            record = self.profile.tape[op]
            unit = self.unit_of_op.get(op, -1)
            again = self.position_replayed[position]
            if again and self.units[unit].must_save:
                continue
            exists = Condition(recomputed=unit) if again else ALWAYS
            extra = record.workspace_bytes
            if again and self.engine == "replay" and on_cpu:
                extra += record.random_bytes  # the generator's own state, put back after the replay
                if record.random_bytes:
                    start = self.forward_position[op]
                    instances.append(Instance(record.random_bytes, start, position + 1, exists))
            if extra:
                instances.append(Instance(extra, position, position + 1, exists))
        if self.reruns_code and on_cpu:
            for region in self.regions:
                exists = Condition(wrapped=region.index)
                start, end = self._position(region.start), self._position(region.last_release)
                instances.append(Instance(CPU_RANDOM_STATE_BYTES, start, end, exists))
                instances.append(
                    Instance(CPU_RANDOM_STATE_BYTES, region.first_position, region.window_end, exists)
                )
        if self.reruns_code:
            instances += self._made_again_by_no_op()
        return instances

    def _maker_without_op(self, storage: int) -> _Region | None:
        """The region whose code makes this storage without an op (`torch.tensor`), and again in its second run."""
        if storage not in self.made_by_no_op or storage not in self.read:
            return None
        tick = self.profile.storage_table[storage].alloc
        makers = (region for region in self.regions if region.owns(tick))
        return next((region for region in makers if self._often_recomputed[region.index] >= 0), None)

    def _watched_until_rerun(self, maker: _Region, reads: Iterable[int]) -> Iterator[Holder]:
        """The engine's own hold: it compares what recomputed ops have read with what is there at the second run."""
        for op in reads if self.engine == "sac" else ():
            unit = self.unit_of_op[op]
            if self.units[unit].region == maker.index and not self.units[unit].must_save:
                spared = self._spared(maker, op)
                when = Condition(wrapped=maker.index) if spared else Condition(recomputed=unit)
                yield Holder(maker.first_position, when)

    def _life_without_op(self, storage: int, maker: _Region, saves: Iterable[int]) -> tuple[int, int]:
        """Ends of what a region's first run has made by no op: for others, and for what its own autograd has saved.

        The latter holds where the region is not wrapped. That cannot be said, but that one of its units is kept.
        """
        saved = [self.profile.saved[index] for index in saves]
        free = self.profile.storage_table[storage].free
        own = max((s.released for s in saved if maker.owns(s.tick)), default=free)
        others = max((s.released for s in saved if not maker.owns(s.tick)), default=free)
        return self._position(max(free, others)), self._position(own)

    def _made_again_by_no_op(self) -> Iterator[Instance]:
        """What a region's second run makes and no op does.

        That are numbers that autograd saves, tensors of Python's numbers, and the user's own random states. A state is
        held by the graph of the user's checkpoint, which dies with the second run.
        """
        table = self.profile.storage_table
        released: dict[
            int, int
        ] = {}  # storage -> when autograd lets go of what its own region has saved of it
        for region in self.regions:
            for saved in (self.profile.saved[index] for index in region.saved):
                if region.owns(table[saved.storage].alloc):
                    released[saved.storage] = max(released.get(saved.storage, NEVER), saved.released)
        for region in self.regions:
            again = [
                (table[storage], released.get(storage, NEVER))
                for storage in self.made_by_no_op
                if region.owns(table[storage].alloc) and table[storage].alloc <= region.last_save
            ]
            exists = Condition(wrapped=region.index)
            scalars = sum(record.bytes for record, _ in again if record.bytes == SCALAR_BYTES)
            if scalars:
                end = self._position(region.last_release)
                yield Instance(scalars, region.first_position, end, exists)
            for record, own in again if region.rerun else ():
                # What is made after the last op is counted with it: early stop may end the run just then.
                start = min(self._rerun_at(region, record.alloc), region.window_end - 1)
                end = max(self._rerun_free(region, record.free), self._position(own))
                if record.bytes != SCALAR_BYTES and start < end:
                    yield Instance(record.bytes, start, end, exists)


def _instance(
    size: int, start: int, end: int, exists: Condition, holders: list[Holder], storage: int
) -> Instance:
    """An instance without the holders that can never matter: those that end no later than another always does."""
    if not holders:
        return Instance(size, start, end, exists, (), storage)
    always = max([end, *(h.end for h in holders if h.when == ALWAYS)])
    longest: dict[Condition, int] = {}
    for holder in holders:
        if holder.end > always:
            longest[holder.when] = max(longest.get(holder.when, 0), holder.end)
    return Instance(size, start, always, exists, tuple(Holder(e, w) for w, e in longest.items()), storage)
