"""A plan without a solver: keep first what saves the most seconds per byte.

What one would write in an afternoon, and what the integer program has to beat. It has the same problem, the same
simulator and the same regions as the solver's plan. It starts with everything recomputed and goes through the values
in order of the seconds that keeping them saves for each of their bytes; a value stays kept if the peak is then within
the budget (or, as long as it is not yet, no higher than before). It goes round until nothing more can be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoac_solver.conditions import brought_along
from autoac_solver.problem import Problem
from autoac_solver.simulator import Simulator


@dataclass(frozen=True, slots=True)
class _Move:
    """Units that are kept together, for one of them is and the others require it; and who tells what that changes."""

    units: np.ndarray
    part: Simulator


class Greedy:
    """Greedy plans of one problem, for several budgets.

    Args:
        simulator: the problem's.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        problem = simulator.problem
        brings = brought_along(problem.units)
        never = [any(problem.units[v].must_save for v in brings[u]) for u in range(len(problem.units))]
        self._everything = ~np.array(never, dtype=bool)
        needs: list[list[int]] = [[] for _ in problem.units]
        for unit, brought in enumerate(brings):
            for other in brought:
                needs[other].append(unit)
        self._moves = [self._move(needs[unit]) for unit in self._order(problem, needs)]

    def plan(self, budget_bytes: int, start: np.ndarray | None = None) -> np.ndarray | None:
        """What is recomputed, a bool per unit; None if it does not come down to the budget.

        Args:
            start: permitted decisions to begin with instead of everything recomputed.
        """
        recomputed = (self._everything if start is None else start).copy()
        live_bytes = self.simulator.live_bytes(recomputed)
        kept_more = True
        while kept_more:
            kept_more = False
            for move in self._moves:
                if not recomputed[move.units].any():
                    continue
                after = recomputed.copy()
                after[move.units] = False
                changed = live_bytes + move.part.live_bytes(after) - move.part.live_bytes(recomputed)
                if changed.max() <= max(budget_bytes, live_bytes.max()):
                    recomputed, live_bytes, kept_more = after, changed, True
        return recomputed if live_bytes.max() <= budget_bytes else None

    def _order(self, problem: Problem, needs: list[list[int]]) -> list[int]:
        """Units that may be recomputed, by seconds per byte, the most first; of equal ones the first in the step."""
        size = np.zeros(len(problem.units))
        for instance in problem.instances:
            # A value's second life, or, of the log-probabilities of a loss, the only one.
            unit = max(instance.exists.recomputed, instance.exists.kept)
            if instance.storage >= 0 and unit >= 0:
                size[unit] += instance.bytes
        time_s = np.array([unit.time_s for unit in problem.units])
        density = np.array([time_s[units].sum() / max(size[units].sum(), 1) for units in needs])
        fixed = [any(problem.units[u].must_recompute for u in units) for units in needs]
        order = np.argsort(-density, kind="stable")
        return [int(unit) for unit in order if self._everything[unit] and not fixed[unit]]

    def _move(self, units: list[int]) -> _Move:
        depends = np.any([self.simulator.depending_on(unit) for unit in units], axis=0)
        return _Move(np.array(units), self.simulator.part(depends))
