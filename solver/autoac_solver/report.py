"""Tables and words about decisions: what is done with each value, what is alive when, who holds the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from autoac_solver.build import Built
from autoac_solver.format import format_bytes, format_seconds
from autoac_solver.problem import ALWAYS, Instance
from autoac_solver.profile import KINDS, NEVER, Profile
from autoac_solver.simulator import Simulator


def decisions_table(profile: Profile, built: Built, recomputed: Sequence[bool]) -> pd.DataFrame:
    """One row a value: its region, the op that makes it, bytes, and what is done with it.

    `decision` is "recompute"; "save" where it is kept for somebody who needs it in backward; "skip" where nobody does.
    `time_s` is what recomputing its unit adds to the step; values with the same `unit` are decided as one.
    """
    made_by = {storage: op for op in profile.tape for storage in op.creates}
    needed = _needed_storages(profile, built, recomputed)
    rows: list[dict[str, Any]] = []
    for index, (unit, storages) in enumerate(zip(built.problem.units, built.unit_storages, strict=True)):
        region = built.problem.regions[unit.region].name
        for storage in storages:
            op = made_by.get(storage)
            kept = "save" if storage in needed else "skip"
            rows.append(
                {
                    "region": region,
                    "module": profile.module_name(op.module) if op else "",
                    "op": op.name if op else "",
                    "bytes": profile.storage_table[storage].bytes,
                    "decision": "recompute" if recomputed[index] else kept,
                    "time_s": unit.time_s,
                    "must_save": unit.must_save,
                    "unit": index,
                    "storage": storage,
                }
            )
    columns = ["region", "module", "op", "bytes", "decision", "time_s", "must_save", "unit", "storage"]
    return pd.DataFrame(rows, columns=columns)


def _needed_storages(profile: Profile, built: Built, recomputed: Sequence[bool]) -> set[int]:
    """Storages that autograd saved, or that an op which is run again reads."""
    needed = {saved.storage for saved in profile.saved}
    for unit, again in zip(built.problem.units, recomputed, strict=True):
        if again:
            for op in unit.ops:
                needed.update(profile.tape[op].reads)
    return needed


def timeline_table(profile: Profile, built: Built, recomputed: Sequence[bool]) -> pd.DataFrame:
    """One row a position of the planned step: op, module, phase, live bytes, and these by kind of memory."""
    problem = built.problem
    frame = pd.DataFrame(
        {
            "op": [profile.tape[op].name for op in problem.position_op],
            "module": [profile.module_name(profile.tape[op].module) for op in problem.position_op],
            "phase": [
                "recompute" if again else "backward" if profile.tape[op].backward else "forward"
                for op, again in zip(problem.position_op, problem.position_replayed, strict=True)
            ],
            "live_bytes": Simulator(problem).simulate(recomputed).live_bytes,
        }
    )
    for kind in KINDS:
        resident = sum(s.bytes for s in profile.storage_table if s.alloc == NEVER and s.kind == kind)
        instances = tuple(i for i in problem.instances if _kind(profile, i) == kind)
        part = replace(problem, instances=instances, resident_bytes=resident)
        frame[kind] = Simulator(part).simulate(recomputed).live_bytes
    return frame


def _kind(profile: Profile, instance: Instance) -> str:
    return "Temp" if instance.storage < 0 else profile.storage_table[instance.storage].kind


def describe_position(profile: Profile, built: Built, position: int) -> str:
    """Op, module and phase of a position, in words."""
    op = profile.tape[built.problem.position_op[position]]
    again = built.problem.position_replayed[position]
    phase = "recomputation" if again else "backward" if op.backward else "forward"
    module = profile.module_name(op.module)
    return f"{op.name} in {phase}" + (f" of module {module!r}" if module else "")


def holders_at(
    profile: Profile, built: Built, recomputed: Sequence[bool], position: int
) -> tuple[tuple[str, str, int], ...]:
    """Kind, module and bytes of what is alive at a position, largest first."""
    made_by = {storage: op for op in profile.tape for storage in op.creates}
    held: dict[tuple[str, str], int] = {}

    def add(kind: str, module: str, size: int) -> None:
        if size:
            held[kind, module] = held.get((kind, module), 0) + size

    for storage in profile.storage_table:
        if storage.alloc == NEVER:
            add(storage.kind, "", storage.bytes)
    for index in Simulator(built.problem).alive_at(recomputed, position):
        instance = built.problem.instances[index]
        op = made_by.get(instance.storage)
        name = profile.storage_table[instance.storage].name if instance.storage >= 0 else ""
        module = name.rpartition(".")[0] if name else profile.module_name(op.module) if op else ""
        kind = _kind(profile, instance)
        add(kind, "" if kind == "Gradient" else module, instance.bytes)
    rows = [(kind, module, size) for (kind, module), size in held.items()]
    return tuple(sorted(rows, key=lambda row: (-row[2], row[0], row[1])))


def fixed_bytes_at(built: Built, position: int) -> int:
    """Bytes that are alive at a position whatever is decided."""
    always = (i for i in built.problem.instances if i.exists == ALWAYS and i.start <= position < i.end)
    return built.problem.resident_bytes + sum(instance.bytes for instance in always)


def suggestions(holders: Sequence[tuple[str, str, int]], finer_regions: bool) -> tuple[str, ...]:
    """What would lower the peak, judged by what holds it.

    Args:
        finer_regions: whether smaller regions than those that were tried are worth a try.
    """
    by_kind: dict[str, int] = {}
    for kind, _, size in holders:
        by_kind[kind] = by_kind.get(kind, 0) + size
    total = max(1, sum(by_kind.values()))
    found = []
    if by_kind.get("Activation", 0) + by_kind.get("Temp", 0) > 0.3 * total:
        found.append("a smaller batch or shorter sequences: activations and temporaries shrink with them")
    fixed = by_kind.get("Parameter", 0) + by_kind.get("Gradient", 0) + by_kind.get("Optstate", 0)
    if fixed > 0.5 * total:
        found.append(
            f"parameters, gradients and optimizer state hold {format_bytes(fixed)}, which no checkpointing touches: "
            "shard them (FSDP), train fewer parameters (LoRA), or use a smaller dtype or optimizer state"
        )
    largest = next(((k, m, s) for k, m, s in holders if k in ("Activation", "Temp")), None)
    if largest is not None and largest[2] > 0.25 * total:
        owner = f"module {largest[1]!r}" if largest[1] else "code outside of all modules (the loss, say)"
        found.append(f"{owner} alone holds {format_bytes(largest[2])} there: compute it in chunks")
    if finer_regions:
        found.append("smaller regions: leave regions= out to have all sizes tried")
    return tuple(found)


def explain(plan: Any) -> str:
    """A plan in words: see `PlanRecord`."""
    overhead = plan.predicted_extra_s / plan.predicted_step_s if plan.predicted_step_s else 0.0
    lines = [
        f"Plan for {plan.model} on {plan.device}, engine {plan.engine} ({plan.engine_reason}).",
        f"  budget          {format_bytes(plan.budget_bytes)}"
        + (f", {format_bytes(plan.headroom_bytes)} of it headroom" if plan.headroom_bytes else ""),
        f"  predicted peak  {format_bytes(plan.predicted_peak_bytes)}; with nothing recomputed "
        f"{format_bytes(plan.unplanned_peak_bytes)}; resident before the step {format_bytes(plan.resident_bytes)}",
        f"  extra time      {format_seconds(plan.predicted_extra_s)} of a step of "
        f"{format_seconds(plan.predicted_step_s)}: {overhead:.1%}",
        f"  proved          {plan.status}: no plan is faster by more than {plan.gap:.2%} of the step "
        f"({plan.solver}, {plan.solve_s:.1f} s)",
        f"The peak lies at {plan.peak_where}. {format_bytes(plan.peak_fixed_bytes)} of it are there whatever is "
        "recomputed. Alive there:",
    ]
    lines += [
        f"  {kind:<11} {format_bytes(size):>24}  {module}" for kind, module, size in plan.peak_holders[:12]
    ]
    if len(plan.peak_holders) > 12:
        rest = sum(size for _, _, size in plan.peak_holders[12:])
        lines.append(f"  and {len(plan.peak_holders) - 12} more {format_bytes(rest):>18}")
    frame = plan.decisions
    lines.append("Values:")
    for decision in ("save", "recompute", "skip"):
        part = frame[frame["decision"] == decision]
        time_s = part.drop_duplicates("unit")["time_s"].sum() if decision == "recompute" else 0.0
        cost = f", {format_seconds(time_s)} to run again" if decision == "recompute" else ""
        lines.append(
            f"  {decision:<10} {len(part):>6} values, {format_bytes(int(part['bytes'].sum()))}{cost}"
        )
    untouched = sum(not region.wrapped for region in plan.regions)
    lines.append(
        f"Regions: {len(plan.regions)}, of which {untouched} are left untouched (nothing to recompute)."
    )
    return "\n".join(lines)
