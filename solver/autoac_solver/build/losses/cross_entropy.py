"""The cross entropies of a step: lean ones, and those that can be computed over chunks of rows.

NOTE [ Losses on the tape ]
  1. A cross entropy is four ops: log-softmax (logits to log-probabilities) and the loss in forward; the gradient of the
     log-probabilities and that of the logits in backward. (`cross_entropy_loss_symint` in
     aten/src/ATen/native/LossNLL.cpp; `_log_softmax` and `nll_loss_forward` in tools/autograd/derivatives.yaml.)
  2. If it is *lean*, the last op overwrites its input, and the log-probabilities' gradient takes no memory of its own.
  3. If it is *chunked*, the log-probabilities never exist as a whole: the logits are kept in their place, and backward
     recomputes the log-probabilities for some rows at a time. So they are recomputed like any other value, except for
     their lifetimes. (Liger Kernel, Hsu et al. 2024, computes the loss by rows, too, and its gradient in forward.)
  4. Under autocast, a cast of the logits to float32 precedes those ops, and one of their gradient follows. If the loss
     is chunked, both casts are part of it: the half-precision logits are kept, and none of the float32 tensors exists.
     The cast that the lean loss makes is `CAST`. A cast of the user's own, whose result the user may hold, is not: the
     loss then keeps the float32 logits.
  5. The kernels' results do not depend on the rows beside them, see `execute.cross_entropy.chunked` for the tests of
     that. So both give the same bits as torch's loss.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoac_solver.allocator.caching import BLOCK_BYTES
from autoac_solver.records.devices import is_cuda
from autoac_solver.records.profile import NEVER, ModuleCall, Op, Profile, Saved

LOG_SOFTMAX = "aten._log_softmax.default"
CAST = re.compile(
    r"aten\._to_copy\.default\((b?float16)\[\d+,\d+\], dtype=float32, memory_format=contiguous_format\)"
)
"""The signature of the lean loss's own cast of half-precision logits; `execute.cross_entropy.lean` makes it."""
_CAST_BACK = "aten._to_copy.default"
_TORCHS_BACKWARD = "aten._log_softmax_backward_data.default"
_LEAN_BACKWARD = "aten._log_softmax_backward_data.out"
_NLL_LOSS_BACKWARD = ("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")

_CHUNKS = 16
_LEAST_ELEMENTS = 2**16
"""Least elements of a chunk; smaller chunks spend their time on calling ops."""
_LOGITS = re.compile(r"aten\._log_softmax\.default\((\w+)\[(\d+),(\d+)\], 1, False\)")
_UNWEIGHTED = re.compile(
    r"aten\.nll_loss_forward\.default\(\w+\[\d+,\d+\], int64\[\d+\], None, [012], -?\d+\)"
)
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_INDEX_BYTES = 8


def rows_of_a_chunk(rows: int, classes: int) -> int:
    """Number of rows per chunk of log-probabilities.

    All rows, or a multiple of 16, so that each chunk starts at an address as well aligned as the whole tensor's: some
    kernels choose their order of additions by alignment.
    """
    wanted = max(-(-rows // _CHUNKS), -(-_LEAST_ELEMENTS // classes))
    return min(rows, 16 * -(-wanted // 16))


@dataclass(frozen=True, slots=True)
class ChunkableLoss:
    """A cross entropy that can be computed over chunks of rows.

    Args:
        forward: indices of the ops that backward repeats by the chunk: the cast of the logits if there is one, then the
            log-softmax.
        loss, backward: indices of two more of its ops; `backward` computes the gradient of the logits.
        logits, log_probabilities, gradient: indices of its storages: what is kept if it is chunked, what is kept if it
            is not, and the gradient of the logits.
        passing: storages that it has for a time if it is not chunked: the float32 logits and their gradient if there is
            a cast.
        dtype: dtype of the logits.
        rows, classes: their numbers.
        alone: no one else holds the logits when backward runs, so the gradient overwrites them.
        forward_bytes, loss_bytes, backward_bytes: workspace of the chunked loss while it computes the log-probabilities
            of some rows, while it computes the loss of them, and in backward.
    """

    forward: tuple[int, ...]
    loss: int
    backward: int
    logits: int
    log_probabilities: int
    gradient: int
    passing: tuple[int, ...]
    dtype: str
    rows: int
    classes: int
    alone: bool
    forward_bytes: int
    loss_bytes: int
    backward_bytes: int

    @property
    def kind(self) -> str:
        """Dtype and shape of the logits, and whether the loss casts them, as text."""
        return f"{self.dtype}[{self.rows},{self.classes}]{' cast' if self.passing else ''}"

    @property
    def item_bytes(self) -> int:
        """Bytes of one of the logits."""
        return _ITEM_BYTES[self.dtype]

    @property
    def log_softmax(self) -> int:
        """Index of the op that makes the log-probabilities."""
        return self.forward[-1]

    @property
    def casts(self) -> tuple[int, ...]:
        """Indices of the ops that cast the logits and their gradient, which a chunked loss does by the chunk."""
        return (self.forward[0], self.backward + 1) if self.passing else ()


def chunkable_losses(profile: Profile) -> tuple[ChunkableLoss, ...]:
    """The cross entropies in the model's modules if all of them can be chunked, else none.

    All or none, because a running model cannot tell them apart. Plans do not cover those outside of modules.
    """
    tape = profile.tape
    made = {
        storage: index
        for index, op in enumerate(tape)
        if op.name == LOG_SOFTMAX and op.module != NEVER
        for storage in op.creates
    }
    lean = [
        _Lean(profile, made[storage], index, storage)
        for index, op in enumerate(tape)
        if op.name == _LEAN_BACKWARD
        for storage in set(op.reads) & made.keys()
    ]
    if not lean:
        return ()
    uses = _Uses(profile, {storage for loss in lean for storage in loss.storages()})
    found = [_chunkable(profile, uses, loss) for loss in lean]
    losses = tuple(loss for loss in found if loss is not None)
    return losses if len(losses) == len(lean) == len({loss.logits for loss in losses}) else ()


class _Lean:
    """A lean loss on the tape: its ops from the logits to the log-probabilities, and back.

    Args:
        log_softmax, backward: indices of ops.
        log_probabilities: index of a storage.

    Attributes:
        half: dtype of the logits before the lean loss's own cast, "" if there is none.
        forward, backward: its ops between the logits and the log-probabilities, and back.
        reads, results: storages of the logits and of their gradient.
        gradients: those of the log-probabilities' gradient.
        passing: as for `ChunkableLoss`.
        is_chain: the casts come right before and after, and nobody else has what they read and make.
    """

    def __init__(self, profile: Profile, log_softmax: int, backward: int, log_probabilities: int):
        tape = profile.tape
        cast = CAST.fullmatch(_signature(profile, tape[log_softmax - 1])) if log_softmax > 0 else None
        is_cast = cast is not None
        self.half = cast[1] if cast else ""
        self.forward = tuple(range(log_softmax - is_cast, log_softmax + 1))
        self.backward = tuple(range(backward, min(backward + 1 + is_cast, len(tape))))
        self.log_probabilities = log_probabilities
        self.reads = tape[self.forward[0]].reads
        self.gradients = tape[backward].writes
        last = tape[self.backward[-1]]
        self.results = last.creates if is_cast else last.writes
        self.passing = (*tape[log_softmax].reads, *self.gradients) if is_cast else ()
        self.is_chain = not is_cast or (
            len(self.backward) == 2
            and last.name == _CAST_BACK
            and last.reads == self.gradients
            and tape[log_softmax - 1].creates == tape[log_softmax].reads
        )

    def storages(self) -> set[int]:
        """The storages whose uses matter."""
        return {*self.reads, self.log_probabilities, *self.gradients, *self.results, *self.passing}


class _Uses:
    """The uses of some storages: ops that read and write them, and saved tensors on them."""

    def __init__(self, profile: Profile, storages: set[int]):
        self.reads: dict[int, list[int]] = {storage: [] for storage in storages}
        self.writes: dict[int, list[int]] = {storage: [] for storage in storages}
        self.saves: dict[int, list[Saved]] = {storage: [] for storage in storages}
        for index, op in enumerate(profile.tape):
            for storage in storages.intersection(op.reads):
                self.reads[storage].append(index)
            for storage in storages.intersection(op.writes):
                self.writes[storage].append(index)
        for saved in profile.saved:
            if saved.storage in storages:
                self.saves[saved.storage].append(saved)


def _chunkable(profile: Profile, uses: _Uses, lean: _Lean) -> ChunkableLoss | None:
    tape, table = profile.tape, profile.storage_table
    op, last = tape[lean.forward[-1]], lean.backward[-1]
    shape = _LOGITS.fullmatch(_signature(profile, op))
    readers = [i for i in uses.reads[lean.log_probabilities] if i != lean.backward[0]]
    saves = uses.saves[lean.log_probabilities]
    if (
        shape is None
        or shape[1] not in _ITEM_BYTES
        or len(lean.reads) != 1
        or len(readers) != 2
        or len(saves) != 1
    ):
        return None
    (logits,), (loss, makes) = lean.reads, (tape[i] for i in readers)
    if (
        not lean.is_chain
        or not _UNWEIGHTED.fullmatch(_signature(profile, loss))
        or makes.name != _NLL_LOSS_BACKWARD[0]
        or len(makes.creates) != 1
        or lean.gradients != makes.creates
        or len(lean.results) != 1
        or table[logits].bytes != table[lean.results[0]].bytes
        or any(op.tick < tape[i].tick < saves[0].released for i in uses.writes[logits])
        or sum(_begins_a_loss(profile, tape[i]) for i in uses.reads[logits]) != 1
        # If autograd adds another gradient to it in place, it must not overwrite the logits.
        or uses.writes[lean.results[0]] not in ([], [lean.backward[0]])
    ):
        return None
    kept_on = last + 1 < len(tape) and tape[last + 1].tick < saves[0].released  # With its graph.
    held = any(saved.released > makes.tick for saved in uses.saves[logits])
    there = table[logits].alloc == NEVER or table[logits].free > makes.tick
    rows, classes, item_bytes = int(shape[2]), int(shape[3]), _ITEM_BYTES[shape[1]]
    chunk = rows_of_a_chunk(rows, classes)

    def size(count: int) -> int:
        """Allocated bytes for `count` requested bytes."""
        block = BLOCK_BYTES if is_cuda(profile.device) else 1
        return -(-count // block) * block

    column, chunk_bytes = size(rows * item_bytes), size(chunk * classes * item_bytes)
    return ChunkableLoss(
        forward=lean.forward,
        loss=readers[0],
        backward=lean.backward[0],
        logits=logits,
        log_probabilities=lean.log_probabilities,
        gradient=lean.results[0],
        passing=lean.passing,
        dtype=lean.half or shape[1],
        rows=rows,
        classes=classes,
        alone=not (kept_on or held or there),
        # Log-probabilities, class indices and their mask of one chunk; then class indices and mask of all rows.
        forward_bytes=column
        + max(chunk_bytes + size(chunk * _INDEX_BYTES) + size(chunk), size(rows * _INDEX_BYTES) + size(rows)),
        loss_bytes=column + size(rows * _INDEX_BYTES),
        backward_bytes=2 * chunk_bytes,
    )


def _begins_a_loss(profile: Profile, op: Op) -> bool:
    return op.name == LOG_SOFTMAX or CAST.fullmatch(_signature(profile, op)) is not None


def _signature(profile: Profile, op: Op) -> str:
    return profile.signatures[op.signature] if op.signature != NEVER else ""


def losses_in_modules(
    tape: Sequence[Op], calls: Sequence[ModuleCall], lean: bool
) -> dict[str, tuple[str | None, ...]]:
    """Modules that compute cross entropies in their own code.

    Args:
        tape, calls: the ops and module calls of a step.
        lean: only those whose gradient overwrites the incoming one.

    Returns:
        Module name -> for its calls, the names of the submodules that ran last before the first such loss, None for
        none.
    """
    made = {
        storage: op for op in tape for storage in op.creates if op.name == LOG_SOFTMAX and op.module != NEVER
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
    """Modules that compute cross entropies whose gradient overwrites the incoming one.

    See `losses_in_modules`.
    """
    return losses_in_modules(profile.tape, profile.calls, lean=True)


def with_torchs_losses(profile: Profile) -> Profile:
    """The step without a plan: torch's cross entropy allocates its result next to the incoming gradient.

    No plan makes a cross entropy outside of all modules lean, so those stay as recorded. One in a module that is lean
    even without a plan cannot be recognised and counts as torch's.
    """
    in_modules = {
        s for op in profile.tape if op.name == LOG_SOFTMAX and op.module != NEVER for s in op.creates
    }
    tape = tuple(
        replace(op, workspace_bytes=op.workspace_bytes + _bytes(profile, op.writes))
        if op.name == _LEAN_BACKWARD and in_modules.intersection(op.reads)
        else op
        for op in profile.tape
    )
    return replace(profile, tape=tape)


def torchs_loss_bytes(profile: Profile) -> int:
    """Bytes that the largest of torch's cross entropies outside of all modules takes beyond a lean one; 0: none."""
    outside = {s for op in profile.tape if op.name == LOG_SOFTMAX and op.module == NEVER for s in op.creates}
    of_classes = {s for op in profile.tape if op.name in _NLL_LOSS_BACKWARD for s in op.reads} & outside
    backward = [
        op for op in profile.tape if op.name == _TORCHS_BACKWARD and of_classes.intersection(op.reads)
    ]
    return max((_bytes(profile, op.creates) for op in backward), default=0)


def _bytes(profile: Profile, storages: Sequence[int]) -> int:
    return sum(profile.storage_table[storage].bytes for storage in storages)
