"""Tables about decisions: the decision for each value, live bytes over the step, and the holders of the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from autoac_solver.build.built import Built
from autoac_solver.build.engines import engine_model
from autoac_solver.build.losses.cross_entropy import torchs_loss_bytes
from autoac_solver.problem.problem import ALWAYS, Lifetime
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.compiled import in_words
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import KINDS, NEVER, OPTIMIZER_STEP, OWN_LOOP, Op, Profile

_MANY_LAYERS = 8

_COLUMNS = [
    "region",
    "module",
    "op",
    "bytes",
    "decision",
    "time_s",
    "must_save",
    "reason",
    "group",
    "storage",
]


def decisions_table(profile: Profile, built: Built, decisions: Sequence[int]) -> pd.DataFrame:
    """One row per value: its region, the op that makes it, bytes, and decision.

    `decision` is "recompute"; "save" if it is kept because backward needs it; "skip" if it is not needed. `time_s`: the
    seconds that recomputing its decision group adds to the step. `must_save`, `reason`: whether it cannot be
    recomputed, and why. `group`: index of that group. A compiled region has one row for everything it keeps; `op` names
    its point, and `decision` is "compiled" or "save".
    """
    made_by = {storage: op for op in profile.tape for storage in op.creates}
    needed = _needed_storages(profile, built, decisions)
    rows = _of_compiled(profile, built, decisions)
    for index, (group, storages) in enumerate(zip(built.problem.groups, built.group_storages, strict=True)):
        region = built.problem.regions[group.region].name
        again = built.is_recomputed(decisions, index)
        for storage in storages:
            op = made_by.get(storage)
            kept = "save" if storage in needed else "skip"
            rows.append(
                {
                    "region": region,
                    "module": profile.module_name(op.module) if op else "",
                    "op": op.name if op else "",
                    "bytes": profile.storage_table[storage].bytes,
                    "decision": "recompute" if again else kept,
                    "time_s": group.recompute_s,
                    "must_save": group.must_save,
                    "reason": group.reason,
                    "group": index,
                    "storage": storage,
                }
            )
    return pd.DataFrame(rows, columns=_COLUMNS)


def _of_compiled(profile: Profile, built: Built, decisions: Sequence[int]) -> list[dict[str, Any]]:
    """One row per compiled region."""
    rows = []
    for region, tape in enumerate(built.regions):
        if not built.is_compiled(region):
            continue
        group, name = tape.group_of[0], profile.module_name(tape.call)
        option = built.problem.groups[group].options[decisions[group]]
        measured = profile.compiled and profile.compiled.of_call(tape.call)
        assert measured is not None  # Otherwise it would be no region.
        point = next(p for p in measured.points if p.name == built.point(region, decisions))
        words, action = in_words(point.name, measured.heavy), option.action.value
        values = (name, name, words, point.kept_bytes, action, option.time_s, False, "", group, NEVER)
        rows.append(dict(zip(_COLUMNS, values, strict=True)))
    return rows


def _needed_storages(profile: Profile, built: Built, decisions: Sequence[int]) -> set[int]:
    """Storages that autograd saved, or that a rerun op reads."""
    needed = {saved.storage for saved in profile.saved}
    for index, group in enumerate(built.problem.groups):
        if built.is_recomputed(decisions, index):
            for op in group.ops:
                needed.update(profile.tape[op].reads)
    return needed


def timeline_table(profile: Profile, built: Built, decisions: Sequence[int]) -> pd.DataFrame:
    """One row per position of the planned step: op, module, phase, live bytes, and live bytes by kind of memory."""
    problem = built.problem
    simulator = Simulator(problem)
    frame = pd.DataFrame(
        {
            "op": [profile.tape[op].name for op in problem.position_op],
            "module": [profile.module_name(profile.tape[op].module) for op in problem.position_op],
            "phase": [
                "recompute" if again else _phase(profile.tape[op])
                for op, again in zip(problem.position_op, problem.position_replayed, strict=True)
            ],
            "live_bytes": simulator.live_bytes(decisions),
        }
    )
    kinds = np.array([_kind(profile, lifetime) for lifetime in problem.lifetimes])
    for kind in KINDS:
        resident = sum(s.bytes for s in profile.storage_table if s.alloc == NEVER and s.kind == kind)
        frame[kind] = simulator.part(kinds == kind, resident).live_bytes(decisions)
    return frame


def _phase(op: Op) -> str:
    return op.name if op.name == OPTIMIZER_STEP else "backward" if op.backward else "forward"


def _kind(profile: Profile, lifetime: Lifetime) -> str:
    if lifetime.call >= 0:
        return "Activation"
    return "Temp" if lifetime.storage < 0 else profile.storage_table[lifetime.storage].kind


def describe_position(profile: Profile, built: Built, position: int) -> str:
    """Op, module and phase of a position, as text."""
    op = profile.tape[built.problem.position_op[position]]
    if op.name == OPTIMIZER_STEP:
        return f"{op.name}, after backward"
    again = built.problem.position_replayed[position]
    phase = "recomputation" if again else _phase(op)
    module = profile.module_name(op.module)
    return f"{op.name} in {phase}" + (f" of module {module!r}" if module else "")


def holders_at(
    profile: Profile, built: Built, decisions: Sequence[int], position: int
) -> tuple[tuple[str, str, int], ...]:
    """Kind, module and bytes of the live memory at a position, largest first."""
    made_by = {storage: op for op in profile.tape for storage in op.creates}
    held: dict[tuple[str, str], int] = {}

    def add(kind: str, module: str, size: int) -> None:
        if size:
            held[kind, module] = held.get((kind, module), 0) + size

    for storage in profile.storage_table:
        if storage.alloc == NEVER:
            add("Workspace" if storage.is_workspace else storage.kind, "", storage.bytes)
    for index in Simulator(built.problem).alive_at(decisions, position):
        lifetime = built.problem.lifetimes[index]
        op = made_by.get(lifetime.storage)
        name = profile.storage_table[lifetime.storage].name if lifetime.storage >= 0 else ""
        module = name.rpartition(".")[0] if name else profile.module_name(op.module) if op else ""
        if lifetime.call >= 0:
            module = profile.module_name(lifetime.call)
        kind = _kind(profile, lifetime)
        add(kind, "" if kind == "Gradient" else module, lifetime.bytes)
    rows = [(kind, module, size) for (kind, module), size in held.items()]
    return tuple(sorted(rows, key=lambda row: (-row[2], row[0], row[1])))


def fixed_bytes_at(built: Built, position: int) -> int:
    """Bytes alive at a position under all decisions."""
    always = (i for i in built.problem.lifetimes if i.exists == ALWAYS and i.start <= position < i.end)
    return built.problem.resident_bytes + sum(lifetime.bytes for lifetime in always)


def about_caches(profile: Profile, engine: str) -> str:
    """Advice for an engine if modules change objects among their arguments; "" if none do."""
    names = list(dict.fromkeys(call.fqn for call in profile.calls if call.grad and call.changes_arguments))
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    if not outermost:
        return ""
    who = repr(outermost[0]) + (f" and {len(outermost) - 1} more" if len(outermost) > 1 else "")
    change = f"{who} change an object that they are given (a cache of keys and values, say)"
    if engine_model(engine).runs_code_twice:
        return (
            f"{change}, so their code cannot run twice and engine {engine} leaves them as they are: turn that off "
            "(use_cache=False), or use engine='replay'"
        )
    if engine_model(engine).compiles:
        return (
            f"{change}, so they are not compiled as wholes, and it holds what it got to the end of the step: turn that "
            "off (use_cache=False)"
        )
    return f"{change}, which holds what it got to the end of the step: turn that off (use_cache=False)"


def about_flat_containers(profile: Profile) -> str:
    """Advice where many layers lie side by side in one `Sequential`; "" if they do not."""
    parents = {call.parent for call in profile.calls}
    layers = Counter(call.parent for index, call in enumerate(profile.calls) if index not in parents)
    for parent, count in layers.most_common():
        if count >= _MANY_LAYERS and parent != NEVER and profile.calls[parent].class_name == "Sequential":
            name = repr(profile.calls[parent].fqn) if profile.calls[parent].fqn else "the model"
            return (
                f"{name} is a Sequential of {count} layers side by side, each recomputed from its own input, "
                "so that all these inputs are saved: group neighbours in an nn.Sequential of their own, and only the "
                "groups' inputs are"
            )
    return ""


def about_torchs_loss(profile: Profile, where: str) -> str:
    """Advice for a peak at the backward of a cross entropy that no plan covers; "" if the peak is elsewhere.

    Args:
        where: position of the peak, from `describe_position`.
    """
    less = torchs_loss_bytes(profile)
    if not less or not where.startswith("aten._log_softmax_backward_data.default"):
        return ""
    return (
        "the peak is the backward of a loss that is computed outside of the model's forward: if it is torch's "
        f"cross_entropy, autoac.cross_entropy in its place takes {format_bytes(less)} less there, with the same bits"
    )


def left_bytes(profile: Profile) -> int:
    """Bytes that a loop which holds the step's results, such as the model's output, has at the start of the next step.

    0 if the loop's own step was recorded: the profile has what it held. A tensor that the model itself holds from
    step to step is there before the step, too.
    """
    if OWN_LOOP in profile.facts:
        return 0
    within = [s for s in profile.storage_table if s.kind in ("Activation", "Temp", "Input")]
    survive = sum(s.bytes for s in within if s.alloc > 0 and s.free >= profile.end)
    replaced = sum(s.bytes for s in within if s.alloc <= 0 and s.free < profile.end)
    return max(0, survive - replaced)


def about_old_gradients(profile: Profile, built: Built, position: int) -> str:
    """The suggestion to clear gradients before forward, if those of the step before are there at the peak; else ""."""
    tick = profile.tape[built.problem.position_op[position]].tick
    held = [s for s in profile.storage_table if s.kind == "Gradient" and s.alloc == 0 and s.free > tick]
    if not held:
        return ""
    size = format_bytes(sum(storage.bytes for storage in held))
    return f"the gradients of the step before ({size}) are there until the loop clears them: do so before forward"


def suggestions(
    holders: Sequence[tuple[str, str, int]], finer_regions: bool, where: str = "", is_compiled: bool = False
) -> tuple[str, ...]:
    """Suggestions to lower the peak, from its holders.

    Args:
        where: the peak's place, from `describe_position`.
        finer_regions: whether to suggest smaller regions than those tried.
        is_compiled: whether regions are compiled.
    """
    by_kind: dict[str, int] = {}
    for kind, _, size in holders:
        by_kind[kind] = by_kind.get(kind, 0) + size
    total = max(1, sum(by_kind.values()))
    found = []
    steps = where.startswith(OPTIMIZER_STEP)
    if steps and by_kind.get("Temp", 0) > 0.1 * total:
        found.append(
            f"the optimizer's step holds {format_bytes(by_kind['Temp'])} of temporaries: fused=True, or foreach=False, "
            "makes it work on little at a time, if it has these options"
        )
    elif by_kind.get("Activation", 0) + by_kind.get("Temp", 0) > 0.3 * total:
        found.append("a smaller batch or shorter sequences: activations and temporaries shrink with them")
    fixed = by_kind.get("Parameter", 0) + by_kind.get("Gradient", 0) + by_kind.get("Optstate", 0)
    if fixed > 0.5 * total:
        found.append(
            f"parameters, gradients and optimizer state hold {format_bytes(fixed)}, which no checkpointing touches: "
            "shard them over more ranks or into host memory (FSDP), train fewer parameters (LoRA), or use a smaller "
            "dtype or optimizer state"
        )
    largest = next(((k, m, s) for k, m, s in holders if k in ("Activation", "Temp")), None)
    if largest is not None and largest[2] > 0.25 * total and not steps:
        outside = "code outside of the model's parts (its own forward, or the loss)"
        is_workspace = largest[0] == "Temp"  # has no module
        if is_workspace:
            outside = f"the op's own workspace, or {outside},"
        owner = f"module {largest[1]!r}" if largest[1] else outside
        if is_workspace and is_compiled:
            found.append(
                "what compiled code takes while it runs, or an op's own workspace, alone holds "
                f"{format_bytes(largest[2])} there: engine='replay' recomputes op by op, and may need less"
            )
        else:
            found.append(f"{owner} alone holds {format_bytes(largest[2])} there: compute it in chunks")
    if finer_regions:
        found.append("smaller regions: leave regions= out to have all sizes tried")
    return tuple(found)
