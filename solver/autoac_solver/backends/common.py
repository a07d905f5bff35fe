"""What goes into a solver and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import pulp

POLL_S = 0.02
"""How often a running solver is looked at."""
GRACE_S = 0.5
"""How long a solver may take to stop once told."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solver found out about one program.

    Args:
        status: "solved" to the asked gap, "infeasible", or "stopped" before it knew.
        values: a value per variable if there is a solution, in the order of `Program.variables`.
        bound: no solution has an objective below this; -inf if nothing is known.
    """

    status: Literal["solved", "infeasible", "stopped"]
    values: np.ndarray | None
    bound: float


@dataclass(frozen=True, slots=True)
class Program:
    """A linear program in PuLP's terms.

    Args:
        model: minimised.
        variables: its variables; the order is that of `Outcome.values`.
    """

    model: pulp.LpProblem
    variables: list[pulp.LpVariable]


class Backend(Protocol):
    """A solver."""

    name: str

    def run(
        self, program: Program, *, integer: bool, gap: float, deadline: float, start: np.ndarray | None = None
    ) -> Outcome:
        """Solve a program.

        Args:
            program: is not changed.
            integer: False solves the linear relaxation.
            gap: absolute, in units of the objective.
            deadline: when to stop, on the clock of `time.monotonic`.
            start: a feasible point to begin with, a value per variable.
        """
        ...
