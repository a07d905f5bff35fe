"""Greedy plans without a solver: save values in order of seconds saved per byte.

The baseline that the integer program has to beat, on the same problem, simulator and regions. It starts with everything
recomputed and tries to save values by decreasing seconds saved per byte. A value stays saved if the peak is then within
the budget (or, while it is still above the budget, does not rise). It repeats until no more values can be saved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoac_solver.optimise.algebra import brought_along
from autoac_solver.problem.problem import RECOMPUTE, SAVE, Problem
from autoac_solver.problem.simulator import Simulator


@dataclass(frozen=True, slots=True)
class _Move:
    """A group with all groups that require it, saved together, and a simulator of the affected lifetimes."""

    groups: np.ndarray
    part: Simulator


class Greedy:
    """Greedy plans of one problem, for several budgets.

    Args:
        simulator: the problem's. Only the first two options of each group are considered.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        problem = simulator.problem
        brings = brought_along(problem.groups)
        saved = [g.must_save or len(g.options) == 1 or not g.permits(RECOMPUTE) for g in problem.groups]
        never = np.array([any(saved[other] for other in brought) for brought in brings], dtype=bool)
        self._everything = np.where(never, SAVE, RECOMPUTE).astype(np.int8)
        needs: list[list[int]] = [[] for _ in problem.groups]
        for group, brought in enumerate(brings):
            for other in brought:
                needs[other].append(group)
        self._moves = [self._move(needs[group]) for group in self._order(problem, needs)]

    def plan(self, budget_bytes: int, start: np.ndarray | None = None) -> np.ndarray | None:
        """The option of each group; None if the peak stays above the budget.

        Args:
            start: permitted decisions to start from; None: everything recomputed.
        """
        decisions = (self._everything if start is None else start).copy()
        live_bytes = self.simulator.live_bytes(decisions)
        kept_more = True
        while kept_more:
            kept_more = False
            for move in self._moves:
                if not decisions[move.groups].any():
                    continue
                after = decisions.copy()
                after[move.groups] = SAVE
                changed = live_bytes + move.part.live_bytes(after) - move.part.live_bytes(decisions)
                if changed.max() <= max(budget_bytes, live_bytes.max()) and self._keeps_limits(after):
                    decisions, live_bytes, kept_more = after, changed, True
        return decisions if live_bytes.max() <= budget_bytes and self._keeps_limits(decisions) else None

    def _keeps_limits(self, decisions: np.ndarray) -> bool:
        """Whether other memory than the device's is within its limits."""
        return not self.simulator.problem.resources or not self.simulator.violations(decisions)

    def _order(self, problem: Problem, needs: list[list[int]]) -> list[int]:
        """Groups that may be recomputed, by decreasing seconds per byte; ties in the order of the step."""
        size = np.zeros(len(problem.groups))
        for lifetime in problem.lifetimes:
            # A value's second lifetime; for a loss's log-probabilities the only one.
            if lifetime.storage >= 0 and lifetime.exists.literals:
                size[max(literal.group for literal in lifetime.exists.literals)] += lifetime.bytes
        time_s = np.array([group.options[-1].time_s for group in problem.groups])
        density = np.array([time_s[groups].sum() / max(size[groups].sum(), 1) for groups in needs])
        fixed = [any(problem.groups[g].must_not_save for g in groups) for groups in needs]
        order = np.argsort(-density, kind="stable")
        return [int(group) for group in order if self._everything[group] and not fixed[group]]

    def _move(self, groups: list[int]) -> _Move:
        depends = np.any([self.simulator.depending_on(group) for group in groups], axis=0)
        return _Move(np.array(groups), self.simulator.part(depends))
