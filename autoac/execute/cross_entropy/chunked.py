"""Cross entropy over chunks of rows, which keeps the logits in place of the log-probabilities, equal to the bit.

NOTE [ The chunked loss ]
  1. Torch's cross entropy computes and saves the log-probabilities. They are as large as the logits, which are often
     the largest tensor of the step. Here they are computed for some rows at a time: in forward for the loss, and again
     in backward for the gradient. Only the logits are saved.
  2. The gradient overwrites the logits if nothing else holds their storage; else it gets a buffer of its own. So
     forward and backward each take one buffer of the logits' size less than the lean loss, at the price of one more
     log-softmax. Chunks stay in a processor's cache, so there the price is measured (`autoac.price.chunked_loss`).
  3. Where half-precision logits would be cast to float32 first (autocast does that), the logits are kept as they are
     and cast by the chunk, as is the gradient. So neither the float32 copy nor its gradient exists as a whole.
  4. Torch's kernels (aten/src/ATen/native/SoftMax.cpp) compute each row's log-softmax and gradient independently, so
     chunks of rows give the same bits. The loss is a sum over rows, so it is computed for all rows at once from the one
     log-probability per row that it reads.
  5. A plan decides whether that is worth its time, see `autoac_solver.build.losses.cross_entropy`. Liger Kernel (Hsu et
     al., 2024, arXiv:2410.10989) also chunks rows, with the last linear layer and kernels of its own, not torch's bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from autoac.torch_private import (
    backward_keeps_graph,
    counted_version,
    disable_dispatch_modes,
    has_its_storage_alone,
    in_compiled_autograd,
    is_fake_type,
    is_transformed,
    saved_tensors_hooks_allowed,
    top_saved_tensors_hooks,
)
from autoac_solver.build.losses.cross_entropy import rows_of_a_chunk

_ATEN = torch.ops.aten
_CLASSES = 1  # the dimension of the classes
_MODIFIED = (
    "the {what} of a cross entropy were changed in place after the loss was computed and before its backward, which "
    "needs them. Change a copy (.clone()). (Logits may be changed under a plan for a step that did so when it was "
    "profiled.)"
)
_SPENT = (
    "the backward of a cross entropy failed half way, when its gradient was being written over the logits: run the "
    "forward again."
)


def have_rows(logits: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether logits have chunks of rows, and the loss has no class weights."""
    return weight is None and logits.dim() == 2 and logits.stride() == (logits.shape[_CLASSES], 1)


def can_be_chunked(logits: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether logits that the lean loss supports can be chunked; `chunkable_losses` decides this from a tape.

    Not under other saved-tensor hooks (a region, the user's own checkpoint, `save_on_cpu`).
    """
    return (
        have_rows(logits, weight)
        and not is_fake_type(type(logits))
        and top_saved_tensors_hooks() is None
        and saved_tensors_hooks_allowed()
        and same_by_chunks(logits.device.type, logits.dtype)
    )


def chunked_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute cross entropy over chunks of rows.

    Args:
        logits: (rows, classes), for which `can_be_chunked` holds.
        target: class index of each row, int64.
        reduction: 0 none, 1 mean, 2 sum.
        dtype: the loss is that of the logits cast to this type; theirs if left out.

    Returns:
        The loss: a scalar, or one value per row.

    Raises:
        IndexError, RuntimeError: a class index is out of range.
    """
    # Autograd saves the tensors that the hooks return instead of the originals. So exactly one tensor on the logits'
    # storage is ours; any other belongs to somebody else: the caller's tensor, views and their bases.
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.detach())
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, _same):
        return _ChunkedCrossEntropy.apply(
            logits, target, reduction, ignore_index, dtype or logits.dtype, kept
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        reduction: int,
        ignore_index: int,
        dtype: torch.dtype,
        kept: list[torch.Tensor],
    ) -> torch.Tensor:
        column = _column(logits, target, ignore_index, dtype)
        # Labels for the single column: class 0, or -1 for ignored rows.
        labels = (target == ignore_index).to(torch.int64).neg_()
        loss, total_weight = _ATEN.nll_loss_forward.default(column, labels, None, reduction, -1)
        ctx.save_for_backward(logits, target, total_weight)
        ctx.set_materialize_grads(False)
        ctx.options = reduction, ignore_index, dtype
        ctx.kept = kept
        ctx.versions = counted_version(logits), counted_version(target)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        (gradient,) = gradients
        if gradient is None:
            return None, None, None, None, None, None
        logits, target, total_weight = ctx.saved_tensors  # autograd's error if they are gone
        if in_compiled_autograd():
            result = _differentiable(gradient, logits, target, total_weight, *ctx.options)
            return result, None, None, None, None, None
        if ctx.kept is None:
            raise RuntimeError(_SPENT)
        alias = ctx.kept[0]
        _check_unchanged(ctx)
        keeps_graph = backward_keeps_graph()
        if torch.is_grad_enabled() or is_transformed(gradient):
            result = _differentiable(gradient, logits, target, total_weight, *ctx.options)
        else:
            del logits
            over = not keeps_graph and has_its_storage_alone(alias)
            buffers = _buffers(alias, 2, ctx.options[-1])
            result = alias if over else torch.empty_like(alias)
            if over:
                ctx.kept = None  # from here on the buffer no longer holds the logits
            _into(result, gradient, alias, target, total_weight, *ctx.options, buffers=buffers)
        if not keeps_graph:
            ctx.kept = None  # autograd, too, frees saved tensors once this returns
        return result, None, None, None, None, None


def _check_unchanged(ctx: Any) -> None:
    """Check that logits and targets are unmodified; autograd does not check tensors that hooks have packed."""
    logits, target, _ = ctx.kept
    emptied = logits.untyped_storage().nbytes() < logits.numel() * logits.element_size()
    for what, tensor, version in zip(("logits", "targets"), (logits, target), ctx.versions, strict=True):
        if counted_version(tensor) != version or (emptied and tensor is logits):
            raise RuntimeError(_MODIFIED.format(what=what))


def _buffers(
    logits: torch.Tensor, number: int, dtype: torch.dtype, rows: int | None = None
) -> list[torch.Tensor]:
    """`number` buffers of `rows` rows each; None for the rows of one chunk."""
    shape = rows or rows_of_a_chunk(*logits.shape), logits.shape[_CLASSES]
    return [logits.new_empty(shape, dtype=dtype) for _ in range(number)]


def _log_softmax(logits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the log-softmax of logits to `out`, computed in the type of `out`."""
    if logits.dtype != out.dtype:
        logits = out.copy_(logits)
    return _ATEN._log_softmax.out(logits, _CLASSES, False, out=out)


def _column(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    rows: int | None = None,
) -> torch.Tensor:
    """The log-probability of each row's target class, (rows, 1).

    Args:
        dtype: of the log-probabilities.
        rows: as for `_buffers`.
    """
    column = logits.new_empty((len(logits), 1), dtype=dtype)
    (buffer,) = _buffers(logits, 1, dtype, rows)
    rows = len(buffer)
    for start in range(0, len(logits), rows):
        part, classes = logits[start : start + rows], target[start : start + rows]
        log_probabilities = _log_softmax(part, buffer[: len(part)])
        classes = classes.masked_fill(classes == ignore_index, 0).unsqueeze(_CLASSES)
        try:
            torch.gather(log_probabilities, _CLASSES, classes, out=column[start : start + rows])
        except RuntimeError as error:
            if "out of bounds" not in str(error):
                raise
            raise IndexError(f"Target is out of bounds: {error}") from None  # as torch's cross entropy does
    return column


def _into(
    result: torch.Tensor,
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    total_weight: torch.Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
    buffers: list[torch.Tensor],
) -> None:
    """Write the gradient of the logits to `result`, which may be the logits themselves.

    Args:
        gradient: gradient of the loss.
        dtype: of the log-probabilities.
        buffers: two of this type, from `_buffers`.
    """
    rows = len(buffers[0])
    for start in range(0, len(logits), rows):
        here = slice(start, start + rows)
        part = logits[here]
        log_probabilities, of_loss = (buffer[: len(part)] for buffer in buffers)
        _log_softmax(part, log_probabilities)
        _ATEN.nll_loss_backward.grad_input(
            gradient[here] if gradient.dim() else gradient,
            log_probabilities,
            target[here],
            None,
            reduction,
            ignore_index,
            total_weight,
            grad_input=of_loss,
        )
        same = dtype == result.dtype
        of_logits = _ATEN._log_softmax_backward_data.out(
            of_loss, log_probabilities, _CLASSES, dtype, out=result[here] if same else of_loss
        )
        if not same:
            result[here].copy_(of_logits)


def _differentiable(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    total_weight: torch.Tensor,
    reduction: int,
    ignore_index: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of the logits by torch's own ops over all rows, so that it can be differentiated again."""
    log_probabilities = _ATEN._log_softmax.default(logits.to(dtype), _CLASSES, False)
    of_loss = _ATEN.nll_loss_backward.default(
        gradient, log_probabilities, target, None, reduction, ignore_index, total_weight
    )
    of_logits = _ATEN._log_softmax_backward_data.default(of_loss, log_probabilities, _CLASSES, dtype)
    return of_logits.to(logits.dtype)


@functools.cache
def same_by_chunks(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this device's kernels give the same bits for chunks of rows as for all rows; tried once per dtype.

    For half precision, the loss of logits cast to float32 is tried, too.
    """
    # There are different kernels for few and many classes, and for aligned and unaligned rows.
    with disable_dispatch_modes(), torch.no_grad():
        return all(
            _same_for(rows, classes, reduction, torch.device(device_type), dtype, computed)
            for computed in dict.fromkeys((dtype, torch.promote_types(dtype, torch.float32)))
            for rows, classes in ((67, 33), (17, 1031), (17, 2048), (17, 32000))
            for reduction in (0, 1, 2)
        )


def _same_for(
    rows: int,
    classes: int,
    reduction: int,
    device: torch.device,
    dtype: torch.dtype,
    computed: torch.dtype,
) -> bool:
    values = torch.arange(rows * classes, dtype=torch.float32, device="cpu").view(rows, classes)
    logits = values.sin().mul(3).to(device, dtype)
    target = (torch.arange(rows, device="cpu") * 7 % classes).to(device)
    ignore_index = 7
    whole = _ATEN._log_softmax.default(logits.to(computed), _CLASSES, False)
    loss, total_weight = _ATEN.nll_loss_forward.default(whole, target, None, reduction, ignore_index)
    labels = (target == ignore_index).to(torch.int64).neg_()
    ours, weight = _ATEN.nll_loss_forward.default(
        _column(logits, target, ignore_index, computed, rows=16), labels, None, reduction, -1
    )
    if not (torch.equal(ours, loss) and torch.equal(weight, total_weight)):
        return False
    gradient = loss.mul(0.7).add(0.1)
    options = target, total_weight, reduction, ignore_index, computed
    beside = _differentiable(gradient, logits, *options)
    _into(logits, gradient, logits, *options, buffers=_buffers(logits, 2, computed, rows=16))
    return torch.equal(logits, beside)
