"""Bandwidth between host and device."""

from __future__ import annotations

import torch

from autoac.device import device_for

_RUNS = 5


def copies(device: torch.device, size_bytes: int) -> dict[str, float]:
    """Bytes a second of copies between host and device, the fastest of five: to and from, pageable and pinned."""
    known = device_for(device)
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    found = {}
    for pinned in (False, True):
        if pinned and not known.asynchronous:
            continue  # pinned memory is for copies that a GPU makes
        here = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        kind = "pinned" if pinned else "pageable"
        for name, source, target in (("to", here, there), ("from", there, here)):
            seconds = []
            for _ in range(_RUNS):
                start = known.now()
                target.copy_(source, non_blocking=pinned)
                seconds.append(known.now() - start)
            found[f"{name} the device, {kind}"] = size_bytes / max(min(seconds), 1e-9)
    return found
