"""Measures the price of computing a cross entropy over chunks of rows, against the lean form of the whole."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import replace

import torch

from autoac.device import device_for
from autoac.execute.cross_entropy.chunked import can_be_chunked
from autoac.execute.cross_entropy.lean import lean_cross_entropy
from autoac.measure import in_turn
from autoac.step.autocast import autocast_off
from autoac.torch_private import saved_tensors_hooks_allowed, top_saved_tensors_hooks
from autoac_solver.build.losses.chunked import CHUNKED, ELEMENT
from autoac_solver.build.losses.cross_entropy import ChunkableLoss, chunkable_losses
from autoac_solver.records.profile import Profile

_MOST_ELEMENTS = 2**22
"""Most logits to measure with; a few runs take some tenths of a second. Of more, a chunked loss spares more time."""
_ROUNDS = 5


def with_price_of_chunks(profile: Profile, device: torch.device) -> Profile:
    """The profile with the measured price of its chunked losses.

    It is measured on processors only: elsewhere the host's time overlaps, and the price is that of the ops that run
    again.
    """
    losses = chunkable_losses(profile)
    if not losses or not device_for(device).on_hosts_processors:
        return profile
    largest = max(losses, key=lambda loss: loss.rows * loss.classes)
    if not saved_tensors_hooks_allowed() or top_saved_tensors_hooks() is not None:
        return profile  # they would run under hooks as a whole
    price_s = _price_s(device, *_scaled_down(largest), largest.dtype, bool(largest.passing))
    return (
        profile if price_s is None else replace(profile, costs=profile.costs | {CHUNKED: {ELEMENT: price_s}})
    )


def _scaled_down(loss: ChunkableLoss) -> tuple[int, int]:
    """Rows and classes to measure with."""
    return max(1, min(loss.rows, _MOST_ELEMENTS // loss.classes)), loss.classes


@functools.cache
def _price_s(device: torch.device, rows: int, classes: int, dtype: str, is_cast: bool) -> float | None:
    """Seconds that chunks add for each of the logits, measured once per process; None if these cannot be chunked."""
    values = (
        torch.arange(rows * classes, dtype=torch.float32, device=device)
        .remainder_(11)
        .to(getattr(torch, dtype))
    )
    target = torch.arange(rows, device=device) % classes

    def run(chunked: bool) -> float:
        # Logits that no one else holds, so that the gradient may overwrite them.
        logits = values.reshape(rows, classes).clone().requires_grad_().mul(1)
        start = time.perf_counter()
        loss = lean_cross_entropy(logits, target, chunked=chunked, upcast=is_cast)
        del logits
        loss.backward()
        return time.perf_counter() - start

    with autocast_off(), torch.enable_grad():
        if not can_be_chunked(values.reshape(rows, classes), None):
            return None
        found = in_turn({False: lambda: run(False), True: lambda: run(True)}, 1 + _ROUNDS)
    added = [chunked - whole for whole, chunked in zip(found[False][1:], found[True][1:], strict=True)]
    return max(0.0, statistics.median(added)) / (rows * classes)
