"""What the page draws, as plain data: what all plans share once, and for each plan what differs from the one before.

The page is given lives rather than live bytes: for every allocation of a plan where it begins and how long it lasts.
From these it adds up live bytes by kind, and can tell at every op which tensors are alive and whose they are.

Plans with the same regions have the same ops in the same order, one *axis*; plans with other regions have another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoac_solver.build import Built
from autoac_solver.errors import ProfileError
from autoac_solver.page.columns import Numbered, changes, encode
from autoac_solver.plan_record import PlanRecord
from autoac_solver.profile import NEVER, Profile
from autoac_solver.report import KINDS
from autoac_solver.simulator import Simulator
from autoac_solver.stacking import stacked

DECISIONS = ("save", "recompute", "skip")


def page_content(plans: Sequence[PlanRecord], chosen: int) -> dict[str, Any]:
    """The data block of the page.

    Args:
        plans: plans of one profile, by budget, ascending.
        chosen: index of the plan that the page is about.

    Raises:
        ProfileError: a plan's tables do not belong to its profile, or that has kinds of memory that nobody knows.
    """
    profile = plans[chosen].profile
    if unknown := {storage.kind for storage in profile.storage_table} - set(KINDS):
        raise ProfileError(f"the profile has storages of unknown kind {min(unknown)!r:.80}. Record it again.")
    names, modules = Numbered(), Numbered()
    modules("")  # number 0: outside of all modules
    axes: dict[tuple[int, ...], _Axis] = {}
    rows = []
    for plan in plans:
        calls = _region_calls(plan)
        if calls not in axes:
            policies = [applied.policy for applied in plan.policies]
            stack = stacked(profile, calls, plan.engine, policies, must_match=False)
            axes[calls] = _Axis(len(axes), profile, stack.built)
        rows.append(axes[calls].plan(plan))
    return {
        "kinds": KINDS,
        "decisions": DECISIONS,
        "chosen": chosen,
        "step_s": profile.step_s,
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
        "axes": [axis.data() for axis in axes.values()],
        "plans": rows,
        "names": names.things,
        "modules": modules.things,
    }


def _storages(profile: Profile, modules: Numbered) -> dict[str, Any]:
    """Size, kind, the op that made it (-1: none), and the module that it is counted for, as in `report.holders_at`."""
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


def _region_calls(plan: PlanRecord) -> tuple[int, ...]:
    """The module calls that are the plan's regions."""
    calls = {(call.fqn, call.call): index for index, call in enumerate(plan.profile.calls) if call.grad}
    try:
        return tuple(calls[region.fqn, region.call] for region in plan.regions)
    except KeyError as error:
        raise ProfileError(
            f"the plan has a region {error} that its profile does not know. Make it again."
        ) from None


class _Axis:
    """The ops of plans with the same regions in the order in which they run, and what lives along them."""

    def __init__(self, number: int, profile: Profile, built: Built) -> None:
        self.number = number
        self.built = built
        self.simulator = Simulator(built.problem)
        self.values = [(s, unit) for unit, group in enumerate(built.unit_storages) for s in group]
        self.start = np.array([i.start for i in built.problem.instances], dtype=np.int64)
        self.lasts = np.zeros(len(self.start), dtype=np.int64)  # of the last plan: 0 for what does not exist
        self.decided = np.zeros(len(self.values), dtype=np.int64)
        unit_of_op = {op: index for index, unit in enumerate(built.problem.units) for op in unit.ops}
        self.rerun_unit = [
            unit_of_op[op] if again else -1
            for op, again in zip(built.problem.position_op, built.problem.position_replayed, strict=True)
        ]

    def plan(self, plan: PlanRecord) -> dict[str, Any]:
        """A plan as numbers, and as changes to the plan before it on this axis."""
        decided = self._decided(plan)
        recomputed = np.zeros(len(self.built.problem.units), dtype=bool)
        for (_, unit), decision in zip(self.values, decided, strict=True):
            recomputed[unit] |= DECISIONS[decision] == "recompute"
        if self.simulator.simulate(recomputed).peak_bytes != plan.predicted_peak_bytes:
            raise ProfileError("the plan's decisions do not lead to its predicted peak. Make it again.")
        exists, end = self.simulator.lives(recomputed)
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
            "chunked": plan.chunked_losses,
            "lasts": changes(self.lasts, lasts),
            "decided": changes(self.decided, decided),
        }
        self.lasts, self.decided = lasts, decided
        return row

    def _decided(self, plan: PlanRecord) -> np.ndarray:
        """For each value the index of its decision in `DECISIONS`."""
        columns = plan.decision_columns
        try:
            if list(zip(columns["storage"], columns["unit"], strict=True)) != self.values:
                raise ValueError("it lists other values")
            return np.array([DECISIONS.index(decision) for decision in columns["decision"]], dtype=np.int64)
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(
                f"the plan's table of decisions does not belong to its profile ({error}). Make it again."
            ) from error

    def data(self) -> dict[str, Any]:
        """What the plans on this axis share."""
        problem = self.built.problem
        return {
            "op": encode(problem.position_op),
            "again": encode(problem.position_replayed),
            "rerun_unit": encode(self.rerun_unit),
            "regions": [region.name for region in problem.regions],
            "unit_region": encode(unit.region for unit in problem.units),
            "unit_time_ns": encode(round(unit.time_s * 1e9) for unit in problem.units),
            "unit_must_save": encode(unit.must_save for unit in problem.units),
            "value_storage": encode(storage for storage, _ in self.values),
            "value_unit": encode(unit for _, unit in self.values),
            "start": encode(self.start),
            "storage": encode(i.storage for i in problem.instances),
            # of those that stand for no storage: workspace and random-number states
            "nameless_bytes": encode(i.bytes for i in problem.instances if i.storage < 0),
        }
