"""Two clocks: the host launches in order, the device computes in order, and at some pieces the host waits for it.

    launched_k = launched_(k-1) + host_k                       the host has launched piece k
    done_k     = max(done_(k-1), launched_k) + device_k        the device has computed it
    launched_k = done_k at pieces where the host waits

The step ends when both are done. Unrolled, its end is the longest path that runs along the host to some piece, then
along the device, and back to the host only where the host waits. So the end is convex in the pieces' times: its
derivative is 1 for pieces on that path and 0 for others, and larger changes never add less than that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Lanes(NamedTuple):
    """Totals of a sequence of pieces, in seconds.

    Args:
        end_s: time until both are done.
        host_s: busy time of the host.
        device_s: busy time of the device.
    """

    end_s: float
    host_s: float
    device_s: float

    @property
    def idle_share(self) -> float:
        """The share of the time in which the device is idle."""
        return 1 - self.device_s / self.end_s if self.end_s > 0 else 0.0


def run(host_s: np.ndarray, device_s: np.ndarray, waits: np.ndarray) -> Lanes:
    """The end of a sequence of pieces.

    Args:
        host_s, device_s: seconds of each piece, shape (pieces,).
        waits: bool per piece: the host waits until it is done.
    """
    launched = done = 0.0
    first = 0
    for last in [*np.flatnonzero(waits).tolist(), len(host_s) - 1]:
        part = slice(first, last + 1)
        if first <= last:
            launches = launched + np.cumsum(host_s[part])
            # If the device idled last before some piece, it is busy from that piece on.
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
    """Whether each piece's host seconds and device seconds lie on a longest path: two bool arrays, (pieces,)."""
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
