"""A solver's result: the decisions, their cost, and the bound that was proved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["optimal", "feasible"]
CLOSED = 1e-9
"""Time differences below this share of the step are rounding errors."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A decision for each group, with peak and time recounted by the simulator.

    Args:
        decisions: the option of each group.
        status: "optimal" only if the requested gap was closed; else "feasible", and `gap` says how far it may be off.
        peak_bytes: the simulator's count, resident bytes included.
        extra_s: seconds added to the step.
        hint_s: penalty in seconds for hints that are not followed; 0 without hints.
        bound_s: lower bound of extra_s + hint_s over all plans within the budget.
        gap: (extra_s + hint_s - bound_s) / step_s.
        solver: name and version of the solver.
        rounds: number of integer programs solved.
        solve_s: total seconds spent.
    """

    decisions: tuple[int, ...]
    status: Status
    peak_bytes: int
    extra_s: float
    bound_s: float
    gap: float
    solver: str
    rounds: int
    solve_s: float
    hint_s: float = 0.0

    @property
    def objective_s(self) -> float:
        """The minimised objective: seconds added to the step plus the penalty of hints."""
        return self.extra_s + self.hint_s

    def bounded(self, bound_s: float, gap: float, step_s: float) -> Solution:
        """The same plan with another lower bound; "optimal" if it is within `gap * step_s` of that bound."""
        bound_s = min(bound_s, self.objective_s)
        left_s = self.objective_s - bound_s
        status = "optimal" if left_s <= (gap + CLOSED) * step_s else "feasible"
        return replace(self, bound_s=bound_s, gap=left_s / step_s if step_s > 0 else 0.0, status=status)
