"""The cross entropies of a step: which are lean, and which can be computed over chunks of rows.

A cross entropy on the tape is four ops: log-softmax makes the log-probabilities of the logits, one op makes the loss of
them; in backward, one op makes the gradient of the log-probabilities, and one that of the logits. Where it is *lean*,
the last one writes over its input. Where it is *chunked*, the log-probabilities are never there as a whole: the logits
are kept in their place, and what backward needs of the log-probabilities is made again for some rows at a time. So it
is a value that is recomputed in backward like any other, but for what then lives when.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoac_solver.profile import NEVER, ModuleCall, Op, Profile

_LOG_SOFTMAX = "aten._log_softmax.default"
_TORCHS_BACKWARD = "aten._log_softmax_backward_data.default"
_LEAN_BACKWARD = "aten._log_softmax_backward_data.out"
_NLL_LOSS_BACKWARD = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")

_CHUNKS = 16
_LOGITS = re.compile(r"aten\._log_softmax\.default\((\w+)\[(\d+),(\d+)\], 1, False\)")
_UNWEIGHTED = re.compile(
    r"aten\.nll_loss_forward\.default\(\w+\[\d+,\d+\], int64\[\d+\], None, [012], -?\d+\)"
)
_INDEX_BYTES = 8


def rows_of_a_chunk(rows: int) -> int:
    """Of how many rows the log-probabilities are made at a time.

    A multiple of 16 rows, so that each chunk begins at an address as well aligned as the whole's: some kernels choose
    their order of additions by that.
    """
    return 16 * max(1, -(-rows // (16 * _CHUNKS)))


@dataclass(frozen=True, slots=True)
class ChunkableLoss:
    """A cross entropy that can be computed over chunks of rows.

    Args:
        log_softmax, loss, backward: its ops, by index: the last one makes the gradient of the logits.
        logits, log_probabilities, gradient: its storages; the gradient is that of either, one over the other.
        alone: neither Python nor autograd has the logits any more when it goes backward, so that the gradient is
            written over them.
        forward_bytes, loss_bytes, backward_bytes: what a chunked loss holds besides, while it makes the
            log-probabilities of some rows, while it makes the loss of them, and in backward.
    """

    log_softmax: int
    loss: int
    backward: int
    logits: int
    log_probabilities: int
    gradient: int
    alone: bool
    forward_bytes: int
    loss_bytes: int
    backward_bytes: int


def chunkable_losses(profile: Profile) -> tuple[ChunkableLoss, ...]:
    """The cross entropies of the model's modules if all of them can be chunked, else none.

    All, as a running model cannot tell one from another. Those outside of modules are not a plan's concern.
    """
    tape = profile.tape
    made = {s: i for i, op in enumerate(tape) if op.name == _LOG_SOFTMAX for s in op.creates}
    found = []
    for index, op in enumerate(tape):
        if op.name != _LEAN_BACKWARD:
            continue
        for log_probabilities in made.keys() & set(op.reads):
            forward = made[log_probabilities]
            if tape[forward].module == NEVER:
                continue
            loss = _chunkable(profile, forward, index, log_probabilities)
            if loss is None:
                return ()
            found.append(loss)
    logits = [loss.logits for loss in found]
    return tuple(found) if len(set(logits)) == len(logits) else ()


def _chunkable(profile: Profile, forward: int, backward: int, log_probabilities: int) -> ChunkableLoss | None:
    tape, table = profile.tape, profile.storage_table
    op = tape[forward]
    shape = _LOGITS.fullmatch(_signature(profile, op))
    readers = [i for i in range(forward + 1, backward) if log_probabilities in tape[i].reads]
    if shape is None or len(op.reads) != 1 or len(readers) != 2:
        return None
    (logits,), (loss, makes) = op.reads, (tape[i] for i in readers)
    saves = [saved for saved in profile.saved if saved.storage == log_probabilities]
    if (
        not _UNWEIGHTED.fullmatch(_signature(profile, loss))
        or table[logits].bytes != table[log_probabilities].bytes
        or makes.name != _NLL_LOSS_BACKWARD[0]
        or len(makes.creates) != 1
        or tape[backward].writes != makes.creates
        or len(saves) != 1
        or any(logits in o.writes and op.tick < o.tick < saves[0].released for o in tape[forward:])
        or sum(logits in o.reads and o.name == _LOG_SOFTMAX for o in tape) != 1
    ):
        return None
    rows, classes = int(shape[2]), int(shape[3])
    item_bytes = table[log_probabilities].bytes // (rows * classes)
    chunk = rows_of_a_chunk(rows)
    column_bytes = rows * item_bytes
    return ChunkableLoss(
        log_softmax=forward,
        loss=readers[0],
        backward=backward,
        logits=logits,
        log_probabilities=log_probabilities,
        gradient=makes.creates[0],
        alone=_alone(profile, logits, makes),
        forward_bytes=column_bytes + chunk * classes * item_bytes + min(chunk, rows) * (_INDEX_BYTES + 1),
        loss_bytes=column_bytes + rows * _INDEX_BYTES,
        backward_bytes=2 * chunk * classes * item_bytes,
    )


def _alone(profile: Profile, logits: int, makes: Op) -> bool:
    """Whether neither Python nor autograd has the logits any more when the loss goes backward."""
    record = profile.storage_table[logits]
    saved = any(saved.storage == logits for saved in profile.saved)
    return record.alloc != NEVER and record.free <= makes.tick and not saved


def _signature(profile: Profile, op: Op) -> str:
    return profile.signatures[op.signature] if op.signature != NEVER else ""


def losses_in_modules(
    tape: Sequence[Op], calls: Sequence[ModuleCall], lean: bool
) -> dict[str, tuple[str | None, ...]]:
    """Where modules compute cross entropies in code of their own.

    Args:
        tape, calls: of a step.
        lean: only those whose gradient is written over the one that comes in.

    Returns:
        Names of the modules, and of the submodules that run last before the first such loss of each of their calls,
        None for none.
    """
    made = {
        storage: op for op in tape for storage in op.creates if op.name == _LOG_SOFTMAX and op.module != NEVER
    }
    backward = (_LEAN_BACKWARD,) if lean else (_LEAN_BACKWARD, _TORCHS_BACKWARD)
    computed = {made[s].tick: made[s] for op in tape if op.name in backward for s in op.reads if s in made}
    first: dict[int, Op] = {}
    for tick in sorted(computed):
        first.setdefault(computed[tick].module, computed[tick])
    found: dict[str, dict[str | None, None]] = {}
    for index, op in first.items():
        before = [call.fqn for call in calls if call.parent == index and call.end < op.tick]
        found.setdefault(calls[index].fqn, {})[before[-1] if before else None] = None
    return {fqn: tuple(names) for fqn, names in found.items()}


def lean_losses(profile: Profile) -> dict[str, tuple[str | None, ...]]:
    """Where modules compute cross entropies whose gradient is written over the one that comes in.

    See `losses_in_modules`.
    """
    return losses_in_modules(profile.tape, profile.calls, lean=True)


def with_torchs_losses(profile: Profile) -> Profile:
    """The step as it is without a plan: torch's cross entropy has its result beside the gradient that comes in.

    Outside of all modules no plan makes it lean, and so it is as it was recorded. In a module one that was lean
    without a plan, too, cannot be told, and counts as torch's.
    """
    in_modules = {
        s for op in profile.tape if op.name == _LOG_SOFTMAX and op.module != NEVER for s in op.creates
    }
    tape = tuple(
        replace(op, workspace_bytes=op.workspace_bytes + _bytes(profile, op.writes))
        if op.name == _LEAN_BACKWARD and in_modules.intersection(op.reads)
        else op
        for op in profile.tape
    )
    return replace(profile, tape=tape)


def torchs_loss_bytes(profile: Profile) -> int:
    """What the largest of torch's cross entropies outside of all modules takes more than the lean one; 0: none."""
    outside = {s for op in profile.tape if op.name == _LOG_SOFTMAX and op.module == NEVER for s in op.creates}
    of_classes = {s for op in profile.tape if op.name in _NLL_LOSS_BACKWARD for s in op.reads} & outside
    backward = [
        op for op in profile.tape if op.name == _TORCHS_BACKWARD and of_classes.intersection(op.reads)
    ]
    return max((_bytes(profile, op.creates) for op in backward), default=0)


def _bytes(profile: Profile, storages: Sequence[int]) -> int:
    return sum(profile.storage_table[storage].bytes for storage in storages)
