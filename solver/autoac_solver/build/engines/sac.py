"""Engine "sac": a policy for torch's selective checkpointing, which reruns the region's Python code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.draft import Draft
from autoac_solver.build.engine_model import NOTHING
from autoac_solver.build.engines.rerun import Rerun
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import Lifetime
from autoac_solver.records.disk.limits import Seconds
from autoac_solver.records.engines import SAC
from autoac_solver.records.profile import (
    CACHED,
    FOREIGN,
    INFERENCE,
    NEVER,
    UNPACKED_TWICE,
    UNRULED,
    Op,
    Profile,
)


@dataclass(frozen=True, slots=True)
class SacCosts:
    """Seconds of the bookkeeping of torch's selective checkpointing.

    Args:
        op: per op of a region, forward and second run together.
        saved: per tensor that passes the pack and unpack hooks.
        call: per call of a wrapped region.
    """

    op: Seconds = 2.5e-5
    saved: Seconds = 4e-6
    call: Seconds = 1e-4


class Sac:
    """See `EngineModel`."""

    name = SAC
    costs: type[Any] = SacCosts
    selects = True
    runs_code_twice = True
    one_random_state = True
    stops_early = True
    repeats = False
    compiles = False
    unsupported = NOTHING

    def build(self, profile: Profile, calls: Sequence[int]) -> Built | None:
        return None

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        call = step.profile.calls[region.call]
        if call.changes_arguments:
            yield "it changes an object that it is given (a cache, say), so its code cannot run twice"
        if call.once == INFERENCE:
            yield "it makes or is given tensors of inference mode, which selective checkpointing cannot save"
        if call.once == FOREIGN:
            yield "code in it that torch does not see writes a tensor, and would write the saved one a second time"
        if call.once == UNRULED:
            yield "it runs a higher-order op (`torch.cond`, say) that torch's selective checkpointing has no rule for"
        if len(region.windows) > 1:
            yield "a second backward goes over its graph, which selective checkpointing refuses where a value is saved"
        if _changes_what_would_be_saved(step.profile, region.ops):
            yield "an op in it changes the size of a tensor, of which selective checkpointing saves the old size"
        yield from refuses_second_run(step, region)

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        return step.ticks[op] < region.last_save

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        tape = step.profile.tape
        return sum(tape[op].again_s for op in ops if tape[op].tick < region.last_save)

    def wanted(self, op: Op, storages: set[int]) -> bool:
        return True

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        pairs = zip(tape.group_of, tape.free_of_choice, strict=True)
        return {group for group, free in pairs if group >= 0 and not free}

    def wrap_s(self, draft: Draft, region: Region) -> float:
        costs = draft.step.costs_of(self.name, SacCosts)
        n_ops = len(region.ops) + draft.step.profile.calls[region.call].views
        return costs.op * n_ops + costs.saved * len(region.saved) + costs.call

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        return Rerun(draft, watches=True).lifetimes()


def refuses_second_run(step: Step, region: Region) -> Iterator[str]:
    """Reasons why torch's checkpoint, with or without a policy, cannot rerun a region's code."""
    profile = step.profile
    if profile.calls[region.call].once == CACHED:
        yield "it reads cached parametrizations, and `parametrize.cached` is over when its code would run again"
    if profile.calls[region.call].once == UNPACKED_TWICE:
        yield "a backward in it reads `ctx.saved_tensors` twice, which torch's checkpoint refuses: read them once"
    if any(NEVER < profile.saved[i].unpacked < region.end for i in region.saved):
        yield "it runs a backward inside of its forward, which torch's checkpoint refuses"
    inputs = profile.calls[region.call].inputs
    if any(step.written_after(storage, region.start, region.begin_backward) for storage in inputs):
        yield "an input of it is written in place before its code would run again"


def _changes_what_would_be_saved(profile: Profile, ops: range) -> bool:
    """Whether an op resizes a tensor that one of these ops has made (`resize_`, `out=`).

    Such an op is recorded as not replayable. Selective checkpointing saves the tensor when it is made, and the saved
    tensor keeps its size of that time.
    """
    made: set[int] = set()
    for record in (profile.tape[op] for op in ops):
        made.update(record.creates)
        resizes = not record.replayable and record.name.startswith("aten.")
        if resizes and not made.isdisjoint(record.writes):
            return True
    return False
