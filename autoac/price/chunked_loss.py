"""Measures the price of computing a cross entropy over chunks of rows, against the lean form of the whole."""

from __future__ import annotations

import functools
import math
import statistics
import time
from dataclasses import replace

import torch

from autoac.device import device_for
from autoac.execute.cross_entropy.chunked import can_be_chunked
from autoac.execute.cross_entropy.lean import lean_cross_entropy
from autoac.measure import in_turn
from autoac.step.autocast import autocast_off
from autoac.torch_private import (
    disable_dispatch_modes,
    disable_torch_functions,
    saved_tensors_hooks_allowed,
    top_saved_tensors_hooks,
)
from autoac_solver.build.losses.chunked import CHUNKED
from autoac_solver.build.losses.cross_entropy import ChunkableLoss, chunkable_losses
from autoac_solver.records.profile import Profile

_LEAST_BYTES = 40 * 2**20
"""Log-probabilities of a large loss are measured with at least so many bytes.

The C library maps new pages for every tensor above 32 MiB (glibc's DEFAULT_MMAP_THRESHOLD_MAX), and reuses those of
smaller ones, with which the time that chunks spare there would not show.
"""
_ROUNDS = 3


def with_price_of_chunks(profile: Profile, device: torch.device) -> Profile:
    """The profile with the measured prices of its chunked losses.

    They are measured on processors only: elsewhere the host's time overlaps, and the price is that of the ops that run
    again. Nor under hooks on saved tensors, where no loss is chunked.
    """
    losses = chunkable_losses(profile)
    hooked = not saved_tensors_hooks_allowed() or top_saved_tensors_hooks() is not None
    if not losses or hooked or not device_for(device).on_hosts_processors:
        return profile
    prices = {loss.kind: _price_s(loss, device) for loss in losses}
    measured = {kind: price_s for kind, price_s in prices.items() if price_s is not None}
    return replace(profile, costs=profile.costs | {CHUNKED: measured}) if measured else profile


def _price_s(loss: ChunkableLoss, device: torch.device) -> float | None:
    is_cast = bool(loss.passing)
    rows = _rows_measured(loss, 4 if is_cast else loss.item_bytes)
    price_s = _measured_s(device, rows, loss.classes, loss.dtype, is_cast)
    return None if price_s is None else price_s * loss.rows / rows


def _rows_measured(loss: ChunkableLoss, item_bytes: int) -> int:
    """Rows to measure with: a power of two, so that batches of similar size share a measurement."""
    enough = max(1, _LEAST_BYTES // (loss.classes * item_bytes))
    return 2 ** min(math.floor(math.log2(loss.rows)), math.ceil(math.log2(enough)))


@functools.cache
def _measured_s(device: torch.device, rows: int, classes: int, dtype: str, is_cast: bool) -> float | None:
    """Seconds that chunks add to a loss, measured once per process; None if these logits cannot be chunked."""

    def run(logits: torch.Tensor, chunked: bool) -> float:
        # Logits that no one else holds, so that the gradient may overwrite them.
        logits = logits.clone().requires_grad_().mul(1)
        start = time.perf_counter()
        loss = lean_cross_entropy(logits, target, chunked=chunked, upcast=is_cast)
        del logits
        loss.backward()
        return time.perf_counter() - start

    # The user's modes must neither see this nor slow it down.
    with autocast_off(), torch.enable_grad(), disable_dispatch_modes(), disable_torch_functions():
        values = torch.arange(rows * classes, dtype=torch.float32, device=device).remainder_(11)
        values = values.to(getattr(torch, dtype)).view(rows, classes)
        target = torch.arange(rows, device=device).remainder_(classes)
        if not can_be_chunked(values, None):
            return None
        found = in_turn(
            {chunked: functools.partial(run, values, chunked) for chunked in (False, True)}, 1 + _ROUNDS
        )
    added = [chunked - whole for whole, chunked in zip(found[False][1:], found[True][1:], strict=True)]
    return max(0.0, statistics.median(added))
