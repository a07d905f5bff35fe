"""The trade-off curve: predicted overhead against the budget, as a table and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from autoac_solver.format import format_bytes

COLUMNS = ["budget_bytes", "peak_bytes", "extra_s", "overhead", "bound", "status", "regions"]


@dataclass(frozen=True)
class Tradeoff:
    """Plans over a range of budgets.

    Args:
        model, engine: what was planned.
        resident_bytes: alive before the step.
        step_s: seconds of the step with nothing recomputed.
        frame: one row a budget, ascending: budget_bytes; peak_bytes and overhead (extra time / step time) of its plan;
            extra_s; bound (no plan within the budget has a lower overhead); status; number of regions.
        plans: the plan of each row.

    A larger budget never has a slower plan: the plan of a smaller one fits it too.
    """

    model: str
    engine: str
    resident_bytes: int
    step_s: float
    frame: pd.DataFrame
    plans: tuple[Any, ...] = field(repr=False, default=())

    def plot(self, axes: Any = None) -> Any:
        """Draw overhead against budget; needs matplotlib (`pip install autoac[plot]`). Returns the axes."""
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(6, 3.5))[1]
        megabytes = self.frame["budget_bytes"] / 1e6
        axes.step(megabytes, 100 * self.frame["overhead"], where="post", marker="o", label="plan")
        axes.step(
            megabytes, 100 * self.frame["bound"], where="post", linestyle=":", color="grey", label="bound"
        )
        axes.set(
            xlabel="budget, MB", ylabel="extra step time, %", title=f"{self.model}, engine {self.engine}"
        )
        axes.legend()
        return axes

    def __str__(self) -> str:
        lines = [f"{'budget':>24}  {'predicted peak':>24}  overhead  bound"]
        columns = (self.frame[name] for name in ("budget_bytes", "peak_bytes", "overhead", "bound"))
        for budget, peak, overhead, bound in zip(*columns, strict=True):
            lines.append(
                f"{format_bytes(int(budget)):>24}  {format_bytes(int(peak)):>24}  {overhead:>7.1%}  {bound:>5.1%}"
            )
        return "\n".join(lines)
