"""Converts a tape to the tables of a `Profile`."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from autoac.ops.private_results import PRIVATE_RESULTS
from autoac.ops.signatures import Signature
from autoac.price.meters import OpTime
from autoac.record.tape.storages import allocated_bytes
from autoac.record.tape.tape import Tape
from autoac.step.inputs import elements_in
from autoac_solver.records.collectives import WAIT, may_repeat
from autoac_solver.records.profile import GATHERED, NEVER, ModuleCall, Op, Saved, Storage

Rows = list[dict[str, Any]]


def finish(
    tape: Tape,
    names: Mapping[int, tuple[str, str]],
    workspace: Mapping[Signature, int],
    times: Mapping[Signature, OpTime],
) -> dict[str, Any]:
    """End the tape of a finished step; returns the tables of a `Profile`.

    Args:
        names: kind and name of the storages that are known, by storage key.
        workspace: bytes by signature.
        times: by signature.
    """
    if tape.calls.with_compiled_code():
        tape.storages.first_seen.were_made_then(tape.storages.rows)
    end = _close(tape)
    gathered = tape.storages.gathered
    kept = [index for index, row in enumerate(tape.saved.rows) if row["storage"] not in gathered]
    known = {index: names[key] for key, index in tape.storages.by_key() if key in names}
    known |= dict.fromkeys(gathered, ("Parameter", GATHERED))
    # Memory that torch's allocator does not know, and that is gone after the step: made for it, as by `from_numpy`.
    for index in tape.storages.borrowed - known.keys():
        if tape.storages.rows[index]["free"] < end:
            tape.storages.rows[index]["bytes"] = 0
    return {
        "end": end,
        "views_s": len(tape.view_times) * statistics.median(tape.view_times or [0.0]),
        "tape": timed(tape.ops, times, workspace),
        "signatures": tuple(map(str, _signatures(tape.ops))),
        "storage_table": tuple(
            _storage(row, *known.get(index, _kind(row))) for index, row in enumerate(tape.storages.rows)
        ),
        "saved": tuple(Saved(**tape.saved.rows[index]) for index in kept),
        "unpacks": tape.saved.unpacks.table(kept, [row["released"] for row in tape.saved.rows]),
        "calls": tuple(ModuleCall(**row) for row in tape.calls.rows),
        "op_fingerprint": _fingerprint(row["name"] for row in tape.ops),
        "sample": tape.sample,
        "call_elements": tuple(map(elements_in, tape.root_calls)),
        "sources": dict(sorted(tape.calls.sources.items())),
    }


def _close(tape: Tape) -> int:
    """End all open rows with the step; returns the tick of its end."""
    tape.storages.poll()
    if not tape.saved.all_released():  # the graph is still alive
        tape.formulas.keep_scalars()
    end = tape.clock.next()
    rows = ((tape.storages.rows, "free"), (tape.saved.rows, "released"), (tape.calls.rows, "end"))
    for table, field in rows:
        for row in table:
            if row[field] == NEVER:
                row[field] = end
    for row in tape.saved.rows:
        if row["dropped"] == NEVER:
            row["dropped"] = row["released"]
    return end


def timed(
    ops: Rows,
    times: Mapping[Signature, OpTime],
    workspace: Mapping[Signature, int],
    with_others: bool = True,
) -> tuple[Op, ...]:
    """The ops with their times and workspace.

    Args:
        with_others: whether collectives ran with other ranks: then the time to repeat one is known.
    """
    signatures = _signatures(ops)
    return _repeats_timed([_op(row, times, workspace, signatures) for row in ops], with_others)


def _repeats_timed(ops: Sequence[Op], with_others: bool) -> tuple[Op, ...]:
    """The ops; to repeat a collective takes its own time and that of the wait for its result, 0 if not known."""
    waits: dict[int, float] = {}
    found = list(ops)
    for index in range(len(found) - 1, -1, -1):
        op = found[index]
        if op.name == WAIT:
            waits |= dict.fromkeys(op.reads, op.time_s)
        elif may_repeat(op.name):
            again_s = op.time_s + max((waits.get(storage, 0.0) for storage in op.creates), default=0.0)
            found[index] = dataclasses.replace(op, rerun_s=again_s if with_others else 0.0)
    return tuple(found)


def resized(
    ops: Rows,
    table: tuple[Storage, ...],
    sizes: Mapping[Signature, list[int]],
    device: torch.device,
    in_host_memory: AbstractSet[int],
) -> tuple[Storage, ...]:
    """The storage table with the sizes of the kernels' actual results.

    Args:
        sizes: bytes of the storages that an op makes, in order.
        in_host_memory: indices of storages that are not on the device, whose size stays zero.
    """
    found = list(table)
    for row in ops:
        made = sizes.get(row["signature"], [])
        if row["name"] in PRIVATE_RESULTS:  # their sizes are known already, and differ without gradients
            continue
        if len(made) == len(row["creates"]):
            for storage, n_bytes in zip(row["creates"], made, strict=True):
                if storage in in_host_memory:
                    continue
                found[storage] = dataclasses.replace(found[storage], bytes=allocated_bytes(n_bytes, device))
    return tuple(found)


def _signatures(ops: Rows) -> dict[Signature, int]:
    """The distinct signatures in order, with their numbers."""
    return {signature: i for i, signature in enumerate(dict.fromkeys(row["signature"] for row in ops))}


def _op(
    row: dict[str, Any],
    times: Mapping[Signature, OpTime],
    workspace: Mapping[Signature, int],
    signatures: Mapping[Signature, int],
) -> Op:
    row = dict(row)
    signature, beside_bytes, inside = row["signature"], row.pop("beside_bytes"), row.pop("inside")
    row["signature"] = signatures[signature]
    time = times.get(signature, OpTime(0.0, 0.0, 0.0))
    own_bytes = workspace.get(signature, 0) + beside_bytes
    workspace_bytes = max(own_bytes, *(workspace.get(op, 0) for op in inside), 0)
    return Op(**row, **dataclasses.asdict(time), workspace_bytes=workspace_bytes)


def _storage(row: dict[str, Any], kind: str, name: str) -> Storage:
    return Storage(bytes=row["bytes"], alloc=row["alloc"], free=row["free"], kind=kind, name=name)


def _kind(row: dict[str, Any]) -> tuple[str, str]:
    if row["alloc"] == NEVER:
        return "Input", ""
    return ("Temp" if row["backward"] else "Activation"), ""


def _fingerprint(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
