"""Builds the problem from a profile, a choice of regions and an engine.

NOTE [ Building a problem ]
  The tape shows the step without a plan (`autoac.record`). The problem adds the effects of a plan, in this order:
  1. `regions`: which module calls can be recomputed under this engine, and why the others cannot.
  2. `groups`: a region's ops become decision groups; a group with an op that cannot be recomputed refuses that option.
  3. `axis`: a region's ops run again where its backward begins (its first unpack).
  4. `engines`: storages live as long as their holders, and wrapping a region costs the engine's bookkeeping.
  5. `losses`: plans may also recompute the log-probabilities of cross entropies, outside of regions.
  6. `clocks`: where the host launches work for a device, times become the delay that they add to the end of the step.
  Compiled regions are one group each, see `compiled`.

  The step's order is fixed, and every op runs again at most once: a value is saved, recomputed or skipped. Checkmate
  (Jain et al., MLSys 2020, arXiv:1910.02653) also decides when each op runs, for each stage of the step. Torch reruns
  a region at its first unpack, and stops after the last tensor that backward needs: Rules 4 and 5 of NOTE
  [ Nestable Checkpoint ] in torch/utils/checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from autoac_solver.build.axis import Axis
from autoac_solver.build.built import Built, RegionTape
from autoac_solver.build.clocks import with_two_clocks
from autoac_solver.build.draft import Draft
from autoac_solver.build.engines import EngineModel, engine_model
from autoac_solver.build.groups import Groups
from autoac_solver.build.losses.chunked import (
    LOSS,
    decided_losses,
    loss_group,
    ops_of,
    with_chunked_losses,
)
from autoac_solver.build.regions import Region, choose_regions, cut_calls
from autoac_solver.build.step import Step
from autoac_solver.problem.problem import DecisionGroup, Problem, RegionCost
from autoac_solver.records.profile import NEVER, Profile


def build(
    profile: Profile,
    regions: Sequence[int],
    engine: str,
    pinned: AbstractSet[int] = frozenset(),
    repeated: AbstractSet[int] = frozenset(),
) -> Built:
    """Build the problem for these regions under this engine.

    Args:
        regions: module calls, none inside another; calls that cannot be regions are left out.
        engine: "replay", "sac", "compile", or "checkpoint" for `torch.utils.checkpoint` without a policy.
        pinned: ops that must not run again because of a policy.
        repeated: collectives that may run again because of a policy.

    Raises:
        ProfileError: the engine compiles, and the profile has no measured regions.
        ValueError: unknown engine.
    """
    model, step = engine_model(engine), Step(profile)
    if (built := model.build(profile, regions)) is not None:
        assert not {*pinned, *repeated}, "policies are refused for such engines, see `EngineModel.build`"
        return built
    found, refused = choose_regions(step, regions, model)
    losses = decided_losses(step, found, model)
    only_losses = {region.index for region in found if ops_of(losses).issuperset(region.ops)}
    groups = Groups(step, found, model, pinned, repeated, only_losses)
    draft = Draft(step, found, groups, Axis(step, found, groups, model), losses, cut_calls(step, found))
    loss = len(groups.all) if losses else -1
    storages: list[list[int]] = [[] for _ in groups.all]
    for storage, group in groups.of_storage.items():
        storages[group].append(storage)
    if losses:
        storages.append([found.log_probabilities for found in losses])
    return Built(
        model,
        tuple(_region_tape(draft, region) for region in found),
        _problem(draft, model, loss, pinned),
        tuple(tuple(sorted(own)) for own in storages),
        loss,
        refused,
    )


def _problem(draft: Draft, model: EngineModel, loss: int, pinned: AbstractSet[int]) -> Problem:
    profile, groups = draft.step.profile, list[DecisionGroup](draft.groups.all)
    first = len(draft.regions) + (loss >= 0)  # of the calls that are cut
    within = [call if call < 0 else first + call for call in map(draft.cut_call_of, draft.regions)]
    wraps = [
        RegionCost(model.wrap_s(draft, region), profile.module_name(region.call), outer)
        for region, outer in zip(draft.regions, within, strict=True)
    ]
    if loss >= 0:
        groups.append(loss_group(profile, draft.losses, len(wraps), pinned))
        wraps.append(RegionCost(0.0, LOSS))
    wraps += (
        RegionCost(model.wrap_s(draft, whole), profile.module_name(whole.call)) for whole in draft.cut_calls
    )
    problem = Problem(
        n_positions=len(draft.axis),
        resident_bytes=sum(s.bytes for s in profile.storage_table if s.alloc == NEVER),
        step_s=profile.step_s,
        groups=tuple(groups),
        regions=tuple(wraps),
        lifetimes=tuple(with_chunked_losses(draft, loss, model.lifetimes(draft))),
        position_op=tuple(draft.axis.op),
        position_replayed=tuple(draft.axis.replayed),
    )
    # Host and device times of further options are unknown, so groups that have them keep one clock.
    plain = all(len(group.options) <= 2 for group in groups)
    return with_two_clocks(draft, model, problem, loss) if profile.has_two_clocks and plain else problem


def _region_tape(draft: Draft, region: Region) -> RegionTape:
    spared = tuple(draft.groups.spared(region, op) for op in region.ops)
    groups = tuple(draft.groups.of_op.get(op, -1) for op in region.ops)
    return RegionTape(region.call, tuple(region.ops), groups, spared)
