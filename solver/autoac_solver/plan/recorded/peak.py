"""A plan's peak by kind of memory, and without some of its regions."""

from __future__ import annotations

from collections.abc import Collection

from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER

_PARTS = {
    "Gradient": "gradients",
    "Optstate": "optimizer",
    "Input": "inputs",
    "Buffer": "inputs",
    "Activation": "activations",
    "Temp": "other",
}


def peak_parts(record: PlanRecord) -> dict[str, int]:
    """Bytes alive at the predicted peak: parameters, gathered, gradients, optimizer, inputs, activations, other."""
    timeline = step_of(record).timeline
    peak = timeline.iloc[int(timeline["live_bytes"].to_numpy().argmax())]
    resident = [s.bytes for s in record.profile.storage_table if s.kind == "Parameter" and s.alloc == NEVER]
    # The only parameters allocated during the step are gathered ones.
    parts = {"parameters": sum(resident), "gathered": int(peak["Parameter"]) - sum(resident)}
    for kind, part in _PARTS.items():
        parts[part] = parts.get(part, 0) + int(peak[kind])
    return parts


def peaks_if_saved(record: PlanRecord, names: Collection[str]) -> tuple[int, int]:
    """The peak if regions recompute nothing, and the planned peak; zeros if it cannot be predicted.

    Args:
        names: of the regions, or of calls with parts (`CallProgram.name`).
    """
    try:
        step = step_of(record)
    except ProfileError:  # Its programs were changed since, as in-model calibration does.
        return 0, 0
    within = {name for call in record.calls if call.name in names for name in call.regions}
    return step.peak_if_saved({*names, *within}), record.predicted_peak_bytes
