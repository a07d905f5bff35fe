"""The planned step, derived from a plan's programs and profile; the source of all reports about a plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np
import pandas as pd

from autoac_solver.build.built import Built
from autoac_solver.build.stacking import stacked
from autoac_solver.plan.recorded.programs import decisions_in, region_calls
from autoac_solver.plan.recorded.report import (
    decisions_table,
    describe_position,
    fixed_bytes_at,
    holders_at,
    timeline_table,
)
from autoac_solver.plan.reserved import reserved_bytes
from autoac_solver.problem.problem import SAVE
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.clocks import Lanes
from autoac_solver.records.errors import StalePlanError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import NEVER


class PlannedStep:
    """A plan's decisions, and its memory over the step.

    What follows from the programs and the profile is computed again and compared with the record: peaks, reserved
    memory and seconds. The solver's proof is taken from the record as it is (bound_s, gap, status, solver, solve_s):
    only another search could confirm it. So is the budget: a plan may exceed it, see `made.predicted_anew`.

    Args:
        record: the plan.
        built: the problem of its profile, regions and policies.

    Attributes:
        options: the decisions that the plan's programs carry out: the option of each group of `built`.

    Raises:
        ProfileError: the programs do not belong to the profile.
        StalePlanError: they do not give the record's predictions.
    """

    def __init__(self, record: PlanRecord, built: Built) -> None:
        self.built = built
        self.options = decisions_in(record, built)
        self._profile = record.profile
        self._regions = record.regions
        self._simulator = Simulator(built.problem)
        found = self._simulator.simulate(self.options)
        nothing = self._simulator.simulate([SAVE] * len(self.options))
        reserved = reserved_bytes(record.profile, built, self.options, record.allocator)
        step_s = built.problem.step_s
        _compare("peak", record.predicted_peak_bytes, found.peak_bytes)
        _compare("reserved memory", record.predicted_reserved_bytes, reserved)
        _compare("peak with nothing recomputed", record.unplanned_peak_bytes, nothing.peak_bytes)
        _compare_seconds("extra time", record.predicted_extra_s, found.extra_s, step_s)
        _compare_seconds("step without the plan", record.predicted_step_s, step_s, step_s)
        self._peak_position = found.peak_position

    @functools.cached_property
    def decisions(self) -> pd.DataFrame:
        """One row per value, see `report.decisions_table`."""
        return decisions_table(self._profile, self.built, self.options)

    @functools.cached_property
    def timeline(self) -> pd.DataFrame:
        """One row per position of the step, see `report.timeline_table`."""
        return timeline_table(self._profile, self.built, self.options)

    @property
    def lanes(self) -> Lanes | None:
        """Host and device timelines of the planned step; None with one clock."""
        return self._simulator.lanes(self.options) if self.built.problem.work else None

    @property
    def unplanned_live_bytes(self) -> np.ndarray:
        """Live bytes at each position with nothing recomputed."""
        return self._simulator.live_bytes([SAVE] * len(self.options))

    def peak_if_saved(self, regions: Collection[str]) -> int:
        """The peak if these regions, named as in the plan, recomputed nothing."""
        names = [region.name for region in self._regions]
        options = [
            SAVE if 0 <= group.region < len(names) and names[group.region] in regions else option
            for group, option in zip(self.built.problem.groups, self.options, strict=True)
        ]
        return self._simulator.simulate(options).peak_bytes

    def peak_in_forward(self, left_bytes: int) -> int:
        """The peak up to the end of the model's last call, in a step that begins with additional live bytes."""
        end = max((call.end for call in self._profile.calls if call.fqn == ""), default=NEVER)
        problem = self.built.problem
        ticks = np.array([self._profile.tape[op].tick for op in problem.position_op])
        forward = (ticks <= end) & ~np.asarray(problem.position_replayed)
        return left_bytes + int(self._simulator.live_bytes(self.options)[forward].max(initial=0))

    @property
    def peak_where(self) -> str:
        """Op, phase and module of the predicted peak."""
        return describe_position(self._profile, self.built, self._peak_position)

    @property
    def peak_fixed_bytes(self) -> int:
        """Bytes alive at the peak under all decisions."""
        return fixed_bytes_at(self.built, self._peak_position)

    @functools.cached_property
    def peak_holders(self) -> tuple[tuple[str, str, int], ...]:
        """Kind, module and bytes of the live memory at the peak, largest first."""
        return holders_at(self._profile, self.built, self.options, self._peak_position)


def _compare(what: str, recorded_bytes: int | None, bytes_now: int | None) -> None:
    if recorded_bytes != bytes_now:
        raise _stale(what, f"{recorded_bytes} bytes", f"{bytes_now} bytes")


def _compare_seconds(what: str, recorded_s: float, seconds_now: float, step_s: float) -> None:
    # Sums of many floats: other versions of numpy may add in another order.
    if not math.isclose(recorded_s, seconds_now, rel_tol=1e-9, abs_tol=1e-9 * step_s):
        raise _stale(what, f"{recorded_s} seconds", f"{seconds_now} seconds")


def _stale(what: str, recorded: str, now: str) -> StalePlanError:
    return StalePlanError(
        f"the plan's programs do not give its predicted {what}: {recorded} were predicted, and its profile says {now}. "
        "Make it again."
    )


_KEY = "_planned_step"


def step_of(record: PlanRecord) -> PlannedStep:
    """The step of a plan; computed once per record.

    Raises:
        ProfileError, StalePlanError: as for `PlannedStep`.
    """
    found: PlannedStep | None = vars(record).get(_KEY)
    if found is None:
        policies = [applied.policy for applied in record.policies]
        stack = stacked(record.profile, region_calls(record), record.engine, policies, must_match=False)
        found = vars(record)[_KEY] = PlannedStep(record, stack.built)  # Like functools.cached_property.
    return found
