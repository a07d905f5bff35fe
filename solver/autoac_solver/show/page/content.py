"""The page's data: one copy of all data that plans share, and per plan the differences to the previous one.

The data holds lifetimes, not live bytes: start and length of every allocation of a plan. From these the page computes
live bytes by kind, and at every op the live tensors and their modules.

Plans with the same regions have the same ops in the same order, one *axis*; plans with other regions have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoac_solver.build.built import Built
from autoac_solver.build.stacking import stacked
from autoac_solver.plan.recorded.programs import region_calls
from autoac_solver.plan.recorded.report import KINDS
from autoac_solver.plan.recorded.step import PlannedStep
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER, Profile
from autoac_solver.show.page.columns import Numbered, changes, encode

DECISIONS = ("save", "recompute", "skip")


def page_content(plans: Sequence[PlanRecord], chosen: int) -> dict[str, Any]:
    """The data block of the page.

    Args:
        plans: plans of one profile, by budget, ascending.
        chosen: index of the plan that the page is about.

    Raises:
        ProfileError: a plan's programs do not belong to its profile, or the profile has unknown kinds of memory.
    """
    profile = plans[chosen].profile
    if unknown := {storage.kind for storage in profile.storage_table} - set(KINDS):
        raise ProfileError(f"the profile has storages of unknown kind {min(unknown)!r:.80}. Record it again.")
    names, modules, reasons = Numbered(), Numbered(), Numbered()
    modules("")  # Number 0: outside of all modules.
    axes: dict[tuple[int, ...], _Axis] = {}
    rows = []
    for plan in plans:
        calls = region_calls(plan)
        if calls not in axes:
            policies = [applied.policy for applied in plan.policies]
            stack = stacked(profile, calls, plan.engine, policies, must_match=False)
            axes[calls] = _Axis(len(axes), profile, stack.built)
        rows.append(axes[calls].plan(plan))
    return {
        "kinds": KINDS,
        "decisions": DECISIONS,
        "chosen": chosen,
        "step_s": plans[chosen].predicted_step_s,
        "device_bytes": profile.device_bytes,
        "use": {
            "engine": plans[chosen].engine,
            "optimizer": any(storage.kind == "Optstate" for storage in profile.storage_table),
            "policies": bool(plans[chosen].policies),
            "headroom_bytes": plans[chosen].headroom_bytes,
            "budget_of": plans[chosen].budget_of,
        },
        "resident_bytes": [
            sum(s.bytes for s in profile.storage_table if s.alloc == NEVER and s.kind == kind)
            for kind in KINDS
        ],
        "ops": {
            "name": encode(names(op.name) for op in profile.tape),
            "module": encode(modules(profile.module_name(op.module)) for op in profile.tape),
            "backward": encode(op.backward for op in profile.tape),
        },
        "storages": _storages(profile, modules),
        "axes": [axis.data(profile, modules, reasons) for axis in axes.values()],
        "plans": rows,
        "names": names.things,
        "modules": modules.things,
        "reasons": reasons.things,
        "sources": [module and profile.source_of(module) for module in modules.things],
    }


def _storages(profile: Profile, modules: Numbered) -> dict[str, Any]:
    """Per storage: size, kind, the op that made it (-1: none), and its module as in `report.holders_at`."""
    made_by = {storage: index for index, op in enumerate(profile.tape) for storage in op.creates}
    sizes, holders = Numbered(), []
    for index, storage in enumerate(profile.storage_table):
        maker = made_by.get(index, -1)
        if storage.kind == "Gradient":
            holder = ""
        elif storage.name:
            holder = storage.name.rpartition(".")[0]
        else:
            holder = profile.module_name(profile.tape[maker].module) if maker >= 0 else ""
        holders.append(modules(holder))
    return {
        "size": encode(sizes(storage.bytes) for storage in profile.storage_table),
        "sizes_bytes": sizes.things,
        "kind": encode(KINDS.index(storage.kind) for storage in profile.storage_table),
        "holder": encode(holders),
        "op": encode(made_by.get(index, -1) for index in range(len(profile.storage_table))),
    }


class _Axis:
    """The ops of plans with the same regions, in order, and the lifetimes over them."""

    def __init__(self, number: int, profile: Profile, built: Built) -> None:
        self.number = number
        self.built = built
        self.simulator = Simulator(built.problem)
        self.values = [(s, group) for group, storages in enumerate(built.group_storages) for s in storages]
        self.start = np.array([i.start for i in built.problem.lifetimes], dtype=np.int64)
        self.lasts = np.zeros(len(self.start), dtype=np.int64)  # Of the last plan; 0 if it does not exist.
        self.decided = np.zeros(len(self.values), dtype=np.int64)
        group_of_op = {op: index for index, group in enumerate(built.problem.groups) for op in group.ops}
        self.rerun_group = [
            group_of_op[op] if again else -1
            for op, again in zip(built.problem.position_op, built.problem.position_replayed, strict=True)
        ]

    def plan(self, plan: PlanRecord) -> dict[str, Any]:
        """A plan's numbers, and its changes against the previous plan on this axis."""
        step = PlannedStep(plan, self.built)
        table = step.decisions[step.decisions["storage"] >= 0]  # A compiled region is no value.
        decided = np.array([DECISIONS.index(decision) for decision in table["decision"]], dtype=np.int64)
        exists, end = self.simulator.lives(step.options)
        lasts = np.where(exists, end - self.start, 0)
        row = {
            "axis": self.number,
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.predicted_peak_bytes,
            "extra_s": plan.predicted_extra_s,
            "bound_s": plan.bound_s,
            "gap": plan.gap,
            "status": plan.status,
            "regions": len(plan.regions),
            "wrapped": sum(region.wrapped for region in plan.regions),
            "compiled": sum(region.point != EAGER for region in plan.regions),
            "chunked": plan.chunked_losses,
            "lasts": changes(self.lasts, lasts),
            "decided": changes(self.decided, decided),
        }
        self.lasts, self.decided = lasts, decided
        return row

    def data(self, profile: Profile, modules: Numbered, reasons: Numbered) -> dict[str, Any]:
        """The data that all plans on this axis share."""
        problem = self.built.problem
        nameless = [lifetime for lifetime in problem.lifetimes if lifetime.storage < 0]
        return {
            "op": encode(problem.position_op),
            "again": encode(problem.position_replayed),
            "rerun_group": encode(self.rerun_group),
            "regions": [region.name for region in problem.regions],
            "group_region": encode(group.region for group in problem.groups),
            "group_time_ns": encode(round(group.recompute_s * 1e9) for group in problem.groups),
            "group_must_save": encode(group.must_save for group in problem.groups),
            "group_reason": encode(
                reasons(group.reason if group.must_save else "") for group in problem.groups
            ),
            "value_storage": encode(storage for storage, _ in self.values),
            "value_group": encode(group for _, group in self.values),
            "start": encode(self.start),
            "storage": encode(i.storage for i in problem.lifetimes),
            # Lifetimes that are no storages: workspace, random-number states, and what compiled modules keep.
            "nameless_bytes": encode(i.bytes for i in nameless),
            "nameless_keeper": encode(
                modules(profile.module_name(i.call)) if i.call >= 0 else -1 for i in nameless
            ),
        }
