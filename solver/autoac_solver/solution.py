"""What a solver answers: the decisions, what they cost, and what was proved about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class Solution:
    """A decision for each unit, recounted by the simulator.

    Args:
        recomputed: a bool per unit.
        status: "optimal" only if the asked gap was closed; else "feasible", and `gap` says how far it may be off.
        peak_bytes: the simulator's count, resident bytes included.
        extra_s: seconds added to the step.
        bound_s: no plan within the budget adds less than these seconds.
        gap: (extra_s - bound_s) / step_s.
        solver: name and version of what solved it.
        rounds: how many integer programs were solved.
        solve_s: seconds it took, everything included.
    """

    recomputed: tuple[bool, ...]
    status: Status
    peak_bytes: int
    extra_s: float
    bound_s: float
    gap: float
    solver: str
    rounds: int
    solve_s: float
