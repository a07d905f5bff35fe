"""Plot of the memory of a planned step."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoac_solver.draw.pictures import draw_memory, new_axes
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.plan import PlanRecord


def plot_memory(record: PlanRecord, axes: Any = None, measured: Any = None) -> Any:
    """Draw live bytes over the step: by kind, with nothing recomputed, the budget, and as measured.

    Args:
        axes: axes to draw on; None makes a new figure.
        measured: live bytes at each position of the timeline, from `Plan.measure_memory`; None for none.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed (`pip install autoac[plot]`).
        ValueError: `measured` and the timeline have different lengths.
        ProfileError: the plan does not belong to its profile.
    """
    step = step_of(record)
    measured_bytes = None if measured is None else np.asarray(measured, dtype=float)
    if measured_bytes is not None and measured_bytes.shape != (len(step.timeline),):
        raise ValueError(
            f"measured has shape {measured_bytes.shape}; it must have one entry for each of the {len(step.timeline)} "
            "rows of memory_timeline(), as what measure_memory() returns has."
        )
    axes = new_axes() if axes is None else axes
    title = f"{record.model} on {record.device}, engine {record.engine}"
    nothing = step.unplanned_live_bytes
    draw_memory(axes, step.timeline, record.budget_bytes, nothing, measured_bytes, title)
    return axes
