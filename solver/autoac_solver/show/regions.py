"""A plan's regions as a sequence that also says why the other modules are none."""

from __future__ import annotations

import functools
from typing import Any

import pandas as pd

from autoac_solver.draw.html import shown, table
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.compiled import EAGER
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.names import module_in_words
from autoac_solver.records.plan import PlanRecord, RegionPlan
from autoac_solver.show.refusals import modules_that_are_refused, why_no_region

_MOST_ROWS = 40
"""Most rows of a table that `repr` prints."""


class Regions(tuple[RegionPlan, ...]):
    """A plan's regions, in the order of the step.

    As text and in Jupyter they are a table, with the modules that can be none and the reasons why values must be saved.

    Args:
        record: the plan.
    """

    _record: PlanRecord

    def __new__(cls, record: PlanRecord) -> Regions:
        found = super().__new__(cls, record.regions)
        found._record = record
        return found

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self._record,)

    @functools.cached_property
    def refused(self) -> dict[str, str]:
        """Why modules can be no regions at any budget, by the name of the outermost module, see `Plan.refused`."""
        return dict(modules_that_are_refused(self._record))

    @functools.cached_property
    def others(self) -> dict[str, str]:
        """For every module that the step calls and that is no region: its name, and why, as in `Plan.why`.

        Raises:
            ProfileError: the plan's programs do not belong to its profile.
        """
        return why_no_region(self._record)

    @functools.cached_property
    def must_save(self) -> pd.DataFrame:
        """One row per value of a region that must be saved: region, module, op, bytes, reason.

        Raises:
            ProfileError: the plan's programs do not belong to its profile.
        """
        values = step_of(self._record).decisions
        columns = ["region", "module", "op", "bytes", "reason"]
        return values.loc[values["must_save"], columns].reset_index(drop=True)

    @property
    def table(self) -> pd.DataFrame:
        """One row per region: region, ops, recomputed (number of ops that run again), decision."""
        rows = [(region.name, len(region.steps), *_decision(region)) for region in self]
        return pd.DataFrame(rows, columns=["region", "ops", "recomputed", "decision"])

    def __repr__(self) -> str:
        lines = [f"regions: {len(self)}, wrapped: {sum(region.wrapped for region in self)}"]
        if self:
            names = [region.name or module_in_words("") for region in self]
            frame = self.table.assign(region=[name.ljust(max(map(len, names))) for name in names])
            lines.append(frame.to_string(index=False, max_rows=_MOST_ROWS, justify="left"))
        if self.refused:
            lines.append("No region at any budget:")
            lines += [f"{module_in_words(name)}: {reason}" for name, reason in self.refused.items()]
        if reasons := dict(self._shown_values()["reason"].value_counts()):
            lines += ["Must be saved:", *(f"{values} values: {reason}" for reason, values in reasons.items())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        refused = pd.DataFrame(self.refused.items(), columns=["module", "why it is no region"])
        return shown("Regions", table(self.table), table(refused), table(self._shown_values()))

    def _shown_values(self) -> pd.DataFrame:
        """The values that must be saved, as far as known: not if the programs were changed."""
        try:
            return self.must_save
        except ProfileError:
            return pd.DataFrame(columns=["region", "module", "op", "bytes", "reason"])


def _decision(region: RegionPlan) -> tuple[int, str]:
    again = sum(recomputed for _, recomputed in region.steps)
    if not region.wrapped:
        return again, "left untouched"
    if region.point != EAGER:
        return again, f"compiled: {region.point}"
    return again, "recomputed" if again == len(region.steps) else "recomputed in part"
