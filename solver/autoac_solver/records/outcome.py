"""The predicted outcome of a step under a plan that was made for another one."""

from __future__ import annotations

from dataclasses import dataclass

from autoac_solver.records.disk.limits import Number, Size


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step under a plan.

    Args:
        sample: the model's arguments.
        peak_bytes: peak with the plan, resident bytes included.
        unplanned_peak_bytes: peak with nothing recomputed.
        overhead: extra step time / step time with nothing recomputed; None if not known.
        fits: the peak is within the plan's budget minus its headroom.
    """

    sample: str
    peak_bytes: Size
    unplanned_peak_bytes: Size
    overhead: Number | None
    fits: bool
