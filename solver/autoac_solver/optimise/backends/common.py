"""Input and output types of the solver backends."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pulp

GRACE_S = 0.4
"""Seconds that a solver may take to stop after its deadline or a request to stop."""


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """A linear program in PuLP's terms.

    Args:
        model: a minimisation.
        variables: its variables. All arrays of values are in this order.
    """

    model: pulp.LpProblem
    variables: list[pulp.LpVariable]

    def costs(self) -> np.ndarray:
        """The objective coefficient of each variable."""
        objective = self.model.objective or {}
        return np.array([objective.get(variable, 0.0) for variable in self.variables])


@dataclass(frozen=True, slots=True)
class Job:
    """A program to solve, with its stopping criteria.

    Args:
        program: not changed.
        integer: False solves the linear relaxation.
        gap: absolute, in units of the objective.
        deadline: when to stop, on the clock of `time.monotonic`.
        start: a feasible starting point, one value per variable.
    """

    program: LinearProgram
    integer: bool
    gap: float
    deadline: float
    start: np.ndarray | None = None

    def left_s(self) -> float:
        """Seconds to the deadline, 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class SolverResult:
    """A solver's result for a program.

    Args:
        status: "solved" to the requested gap, "infeasible", or "stopped" before either was known.
        values: the best solution, one value per variable; None if there is none.
        bound: lower bound of the objective; -inf if unknown.
    """

    status: Literal["solved", "infeasible", "stopped"]
    values: np.ndarray | None
    bound: float


STOPPED = SolverResult("stopped", None, -np.inf)
INFEASIBLE = SolverResult("infeasible", None, np.inf)


class Backend(Protocol):
    """A solver."""

    name: str

    def run(self, job: Job) -> SolverResult:
        """Solve a program, or stop at its deadline."""
        ...
