"""Aligns the measured memory of a planned step with the predicted one, op by op.

The allocator's events have times, the prediction has positions. Ops link the two: the plan knows which ops run and in
what order, and the measured run lists every op with its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pandas as pd

from autoac.check.any_plan import AnyPlan
from autoac.device import device_for
from autoac.measure import MeasuredTimeline, measure_peak
from autoac.step.failures import noted
from autoac.step.model import check_backwards_may_run, device_of
from autoac.step.step import TrainingStep
from autoac.step.trial import OptimizerStates, trial
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.errors import ProfilingError

_LOOK_AHEAD = 200
"""Search range for an expected op, in ops of the run; some of these (views, composites) are not in the plan."""
_LOOK_AHEAD_CHUNKED = 2000
"""The same with a chunked loss, which is only few ops of the plan."""
_FEW = 3
"""If this many later ops come before an expected op, that op ran under another name."""
_MOST_MISSING = 0.05
"""Share of the expected ops that may run under another name, as BatchNorm does when it is replayed."""


def measured_memory(plan: AnyPlan, step: TrainingStep) -> pd.Series:
    """See `Plan.measure_memory`."""
    model, device = step.model, device_of(step.model)
    if not device_for(device).memory_events:
        raise ValueError(
            f"the model is on {device}: memory over the step is measured on CPU only. verify() measures the peak."
        )
    check_backwards_may_run(model)

    def run() -> MeasuredTimeline:
        with (
            # The optimizers' states are restored after both runs: the second one finds those that the first made.
            trial(
                model, step.inputs, step.written, gradient=plan.gradient_at_start, optimizers=nullcontext()
            ),
            plan.applied(model),
        ):
            timeline = measure_peak(step.run, device).timeline
        assert timeline is not None
        return timeline

    with OptimizerStates(copies=True), noted(step, "in measure_memory", plan.record.profile.sample):
        run()  # warm-up: lazy initialisation, the optimizers' included, is not measured
        timeline = run()
    record = plan.record
    planned = step_of(record)
    runs = planned.built.runs(record.profile, planned.options)
    names = planned.timeline["op"].to_numpy(dtype=object)
    reach = _LOOK_AHEAD_CHUNKED if record.chunked_losses else _LOOK_AHEAD
    starts = _starts([_as_run(name) for name in names[runs]], timeline, reach)
    before, highest = _between(starts, timeline)
    # At positions where nothing runs, such as the replay of saved values, memory is that before the next op.
    next_op = np.minimum(np.cumsum(runs) - runs, len(starts) - 1)
    measured = record.resident_bytes + np.where(runs, highest[next_op], before[next_op])
    return pd.Series(measured, name="measured_bytes")


def _as_run(name: str) -> str:
    """The profiler's name for a tape's op name, such as "aten.mm.default"."""
    return "::".join(name.split(".")[:2])


def _starts(expected: Sequence[str], timeline: MeasuredTimeline, reach: int) -> np.ndarray:
    """Start of each expected op, seconds; a missing op gets the start of the next one.

    Args:
        reach: search range for an expected op, in ops of the run.

    Raises:
        ProfilingError: too many are missing.
    """
    found = np.full(len(expected), np.nan)
    names, next_op, missing = timeline.op_names, 0, 0

    def place_of(index: int, start: int, end: int) -> int:
        # Without a dispatch mode, autograd may run a recorded sum of two gradients in place.
        same = (expected[index], f"{expected[index]}_")
        return next((i for i in range(start, min(end, len(names))) if names[i] in same), -1)

    def follow(index: int, start: int, end: int) -> bool:
        """Whether the next few expected ops come one after another."""
        for later in range(index + 1, min(index + 1 + _FEW, len(expected))):
            place = place_of(later, start, end)
            if place < 0:
                return False
            start = place + 1
        return index + _FEW < len(expected)

    for index in range(len(expected)):
        place = place_of(index, next_op, next_op + reach)
        if place < 0 or follow(index, next_op, place):  # before another one of this name
            # An in-place op's range holds the copy that autograd makes of its target, which the tape sees first.
            inside = next_op >= 2 and place_of(index, next_op - 2, next_op - 1) >= 0
            missing += not inside
            continue
        found[index], next_op = timeline.op_time_s[place], place + 1
    if missing > _MOST_MISSING * len(expected):
        raise ProfilingError(
            f"{missing} of the {len(expected)} ops of the planned step did not run when they were expected: the step "
            "is not the one that was profiled. Plan again for this model and sample."
        )
    return pd.Series(found).bfill().ffill().to_numpy()


def _between(starts: np.ndarray, timeline: MeasuredTimeline) -> tuple[np.ndarray, np.ndarray]:
    """Live bytes above those at the step's start: just before each op, and the most until the next one."""
    time_s, live = timeline.time_s, timeline.live_above_start_bytes
    first = np.searchsorted(time_s, starts, side="left")
    ends = np.append(first[1:], len(time_s))
    before = np.where(first > 0, live[np.maximum(first - 1, 0)], 0)
    highest = [live[a:b].max(initial=-(2**62)) for a, b in zip(first, ends, strict=True)]
    return before, np.maximum(before, highest)
