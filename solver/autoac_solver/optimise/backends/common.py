"""What goes into a solver and what comes out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pulp

GRACE_S = 0.4
"""How long a solver may take to stop once told."""


@dataclass(frozen=True, slots=True)
class Program:
    """A linear program in PuLP's terms.

    Args:
        model: minimised.
        variables: its variables; wherever values are listed, they are in this order.
    """

    model: pulp.LpProblem
    variables: list[pulp.LpVariable]

    def costs(self) -> np.ndarray:
        """The objective's coefficient of each variable."""
        objective = self.model.objective or {}
        return np.array([objective.get(variable, 0.0) for variable in self.variables])


@dataclass(frozen=True, slots=True)
class Job:
    """A program to solve, and how far.

    Args:
        program: is not changed.
        integer: False solves the linear relaxation.
        gap: absolute, in units of the objective.
        deadline: when to stop, on the clock of `time.monotonic`.
        start: a feasible point to begin with, a value per variable.
    """

    program: Program
    integer: bool
    gap: float
    deadline: float
    start: np.ndarray | None = None

    def left_s(self) -> float:
        """Seconds to the deadline, 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solver found out about a program.

    Args:
        status: "solved" to the asked gap, "infeasible", or "stopped" before it knew.
        values: of the best solution, one per variable; None if there is none.
        bound: no solution has an objective below this; -inf if nothing is known.
    """

    status: Literal["solved", "infeasible", "stopped"]
    values: np.ndarray | None
    bound: float


STOPPED = Outcome("stopped", None, -np.inf)
INFEASIBLE = Outcome("infeasible", None, np.inf)


class Backend(Protocol):
    """A solver."""

    name: str

    def run(self, job: Job) -> Outcome:
        """Solve a program, or stop at its deadline."""
        ...
