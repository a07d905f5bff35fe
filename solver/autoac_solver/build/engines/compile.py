"""Engine "compile": regions compiled by `torch.compile`, with a choice of one of several measured points for each.

Such a region is one decision group, see `build.compiled`. Its ops have no groups and no positions in a window, because
recomputation in compiled code is part of the measured backward. Regions that are not compiled run under engine
replay, in the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.compiled import build_compiled
from autoac_solver.build.draft import Draft
from autoac_solver.build.engines.replay import Replay
from autoac_solver.build.regions import Region
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import Lifetime
from autoac_solver.records.engines import COMPILE
from autoac_solver.records.profile import UNPACKED_TWICE, UNRULED, Op, Profile

_REPLAY = Replay()

_MEASURES = "measures compiled code on the device at hand"
UNSUPPORTED: Mapping[str, str] = {
    "policies": "follows no policies: what a compiled region keeps is chosen as a whole. Plan without policies, or "
    "with engine='replay' or 'sac'.",
    "max_overhead": "plans for a budget, not for max_overhead: autoac.tradeoff over autoac.profile(..., "
    "engine='compile') shows what each budget costs.",
    "budget_of": "plans for allocated memory: budget_of='reserved' needs to know each allocation, and those of "
    "compiled code are not. Leave it out and leave headroom, or take engine='replay'.",
    "mode": f"{_MEASURES}, and mode='fake' runs nothing on it: leave one of them out.",
    "device": f"{_MEASURES}, and device= is for another one: leave one of them out.",
    "parallel": "does not plan for absent ranks (parallel=, --fsdp, --tp): plan on the ranks themselves, or take "
    "engine='sac' for a compiled model.",
    "sizes": "cannot have plans that take turns on a model (buckets): plan for the largest batch, or with "
    "engine='replay'.",
}
"""What plans for engine compile cannot have: arguments of `autoac.plan`, and "sizes" for `autoac.plan_buckets`."""


@dataclass(frozen=True)
class CompileCosts:
    """No parts: the overhead of calling compiled code is included in the measured times of its points."""


class Compile:
    """See `EngineModel`."""

    name = COMPILE
    costs = CompileCosts
    selects = True
    runs_code_twice = False
    one_random_state = False
    stops_early = False
    repeats = True
    compiles = True
    unsupported: Mapping[str, str] = UNSUPPORTED

    def build(self, profile: Profile, calls: Sequence[int]) -> Built:
        return build_compiled(profile, calls, self)

    def refuses(self, step: Step, region: Region) -> Iterator[str]:
        call = step.profile.spans[region.call]
        if call.changes_arguments:
            yield "it changes an object among its arguments (a cache of keys and values, say)"
        if len(region.windows) > 1:
            yield "a second backward goes over its graph, which compiled code refuses"
        table = step.profile.compiled
        if table is None:  # regions to be compiled are chosen
            if call.once not in ("", UNRULED, UNPACKED_TWICE):
                yield f"it is better not compiled: it has {call.once}"
            return
        measured = table.of_call(region.call)
        if measured is None:
            yield "it was not compiled and measured when the profile was made"
        elif measured.failure:
            yield f"it is not compiled: {measured.failure}"

    def reruns(self, step: Step, region: Region, op: int) -> bool:
        return False

    def again_s(self, step: Step, region: Region, ops: Sequence[int]) -> float:
        return 0.0

    def wanted(self, op: Op, storages: set[int]) -> bool:
        return _REPLAY.wanted(op, storages)

    def needed(self, profile: Profile, built: Built, tape: RegionTape) -> set[int]:
        return _REPLAY.needed(profile, built, tape)

    def lifetimes(self, draft: Draft) -> Iterator[Lifetime]:
        """Lifetimes without any compiled region."""
        for use in draft.uses():
            start, end, own_end = draft.life(use.storage, use.saves)
            size = draft.step.profile.storage_table[use.storage].bytes
            yield Lifetime(size, start, max(end, own_end), storage=use.storage)

    def wrap_s(self, draft: Draft, region: Region) -> float:
        return 0.0
