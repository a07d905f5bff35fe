"""Two clocks: the host launches in order, the device computes in order, and now and then the host waits for it.

    launched_k = launched_(k-1) + host_k                       the host has launched piece k
    done_k     = max(done_(k-1), launched_k) + device_k        the device has computed it
    launched_k = done_k where the host waits there

The step ends when both are done. Unrolled, its end is the longest path that goes along the host to some piece, and from
there along the device, and back to the host only where that waits. So it is convex in the pieces' times: what one more
second of a piece adds is 1 on that path, 0 beside it, and for larger changes never less than the path says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WAITING_OPS = frozenset(
    {
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten._unique2.default",
        "aten.unique_dim.default",
        "aten.unique_consecutive.default",
        "aten.unique_dim_consecutive.default",
    }
)
"""Ops whose results have a size that depends on values: the host waits until the device knows it."""


class Lanes(NamedTuple):
    """What a sequence of pieces amounts to, seconds.

    Args:
        end_s: until both are done.
        host_s: what the host works.
        device_s: what the device works.
    """

    end_s: float
    host_s: float
    device_s: float

    @property
    def idle_share(self) -> float:
        """The share of the time in which the device has nothing to do."""
        return 1 - self.device_s / self.end_s if self.end_s > 0 else 0.0


def run(host_s: np.ndarray, device_s: np.ndarray, waits: np.ndarray) -> Lanes:
    """The end of a sequence of pieces.

    Args:
        host_s, device_s: seconds of each piece, shape (pieces,).
        waits: bool per piece, whether the host waits until it is done.
    """
    launched = done = 0.0
    first = 0
    for last in [*np.flatnonzero(waits).tolist(), len(host_s) - 1]:
        part = slice(first, last + 1)
        if first <= last:
            launches = launched + np.cumsum(host_s[part])
            # From each piece on the device has no more pauses, if that is where it waited last.
            rest = np.cumsum(device_s[part][::-1])[::-1]
            done = max(done + rest[0], float((launches + rest).max()))
            launched = float(launches[-1])
            if waits[last]:
                launched = max(launched, done)
        first = last + 1
    return Lanes(max(launched, done), float(host_s.sum()), float(device_s.sum()))


def longest_path(
    host_s: np.ndarray, device_s: np.ndarray, waits: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of which pieces the host's and the device's seconds lie on a longest path: two bools per piece."""
    launched, done = 0.0, 0.0
    launches, dones = [], []
    for host, device, wait in zip(host_s.tolist(), device_s.tolist(), waits.tolist(), strict=True):
        launched += host
        launches.append(launched)
        done = max(done, launched) + device
        dones.append(done)
        if wait:
            launched = max(launched, done)
    on_host, on_device = np.zeros(len(launches), dtype=bool), np.zeros(len(launches), dtype=bool)
    along_device = done > launched
    for index in range(len(launches) - 1, -1, -1):
        along_device = along_device or bool(waits[index] and dones[index] >= launches[index])
        if along_device:
            on_device[index] = True
            before = dones[index - 1] if index else 0.0
            along_device = before >= launches[index] and index > 0
            on_host[index] = not along_device
        else:
            on_host[index] = True
    return on_host, on_device
