"""What a solver answers: the decisions, what they cost, and what was proved about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["optimal", "feasible"]
CLOSED = 1e-9
"""Share of the step below which a difference in time is a rounding error."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A decision for each group, recounted by the simulator.

    Args:
        decisions: the option of each group.
        status: "optimal" only if the asked gap was closed; else "feasible", and `gap` says how far it may be off.
        peak_bytes: the simulator's count, resident bytes included.
        extra_s: seconds added to the step.
        hint_s: what the hints that are not followed count, in seconds; 0 where there are no hints.
        bound_s: of no plan within the budget extra_s + hint_s is less.
        gap: (extra_s + hint_s - bound_s) / step_s.
        solver: name and version of what solved it.
        rounds: how many integer programs were solved.
        solve_s: seconds it took, everything included.
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
        """What was minimised: seconds added to the step, and what hints count."""
        return self.extra_s + self.hint_s

    def bounded(self, bound_s: float, gap: float, step_s: float) -> Solution:
        """The same plan, where no plan adds less than `bound_s`, and a gap of `gap * step_s` was asked for."""
        bound_s = min(bound_s, self.objective_s)
        left_s = self.objective_s - bound_s
        status = "optimal" if left_s <= (gap + CLOSED) * step_s else "feasible"
        return replace(self, bound_s=bound_s, gap=left_s / step_s if step_s > 0 else 0.0, status=status)
