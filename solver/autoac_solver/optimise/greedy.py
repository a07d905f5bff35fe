"""Greedy plans without a solver: save values in order of seconds saved per byte.

The baseline that the integer program has to beat, on the same problem, simulator and regions. It starts with the last
permitted option of each group (everything recomputed) and tries faster options by decreasing seconds saved per byte.
One is kept if the peak is then within the budget (or, while it is still above the budget, does not rise). It repeats
until nothing is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoac_solver.optimise.algebra import brought_along
from autoac_solver.problem.problem import RECOMPUTE, SAVE, Action, DecisionGroup, Literal
from autoac_solver.problem.simulator import Simulator


@dataclass(frozen=True, slots=True)
class _Move:
    """Groups that take an option together, its seconds saved per byte, and a simulator of the affected lifetimes."""

    groups: np.ndarray
    option: int
    density: float
    part: Simulator


class Greedy:
    """Greedy plans of one problem, for several budgets.

    Groups that are saved or recomputed are saved together with all groups that require them. A group of more options,
    or a compiled one, is moved alone, and only where that breaks no requirement.

    Args:
        simulator: the problem's.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        problem = self._problem = simulator.problem
        brings = brought_along(problem.groups)
        saved = [g.must_save or len(g.options) == 1 or not g.permits(RECOMPUTE) for g in problem.groups]
        never = [any(saved[other] for other in brought) for brought in brings]
        last = [SAVE if keep else _last(group) for keep, group in zip(never, problem.groups, strict=True)]
        self._everything = np.array(last, dtype=np.int8)
        self._several = {index for index, group in enumerate(problem.groups) if _moves_alone(group)}
        needs: list[list[int]] = [[] for _ in problem.groups]
        for group, brought in enumerate(brings):
            for other in brought:
                needs[other].append(group)
        moves = [*self._saving(needs), *self._of_several()]
        self._moves = sorted(moves, key=lambda move: -move.density)  # Ties in the order of the step.

    def plan(self, budget_bytes: int, start: np.ndarray | None = None) -> np.ndarray | None:
        """The option of each group; None if the peak stays above the budget.

        Args:
            start: permitted decisions to start from; None: everything recomputed.
        """
        decisions = (self._everything if start is None else start).copy()
        live_bytes = self.simulator.live_bytes(decisions)
        faster = True
        while faster:
            faster = False
            for move in self._moves:
                if not self._gains(move, decisions):
                    continue
                after = decisions.copy()
                after[move.groups] = move.option
                changed = live_bytes + move.part.live_bytes(after) - move.part.live_bytes(decisions)
                if changed.max() <= max(budget_bytes, live_bytes.max()) and self._is_permitted(after):
                    decisions, live_bytes, faster = after, changed, True
        return decisions if live_bytes.max() <= budget_bytes and self._is_permitted(decisions) else None

    def _gains(self, move: _Move, decisions: np.ndarray) -> bool:
        if move.option == SAVE:
            return bool(decisions[move.groups].any())
        (group,) = move.groups
        options = self._problem.groups[group].options
        return options[move.option].time_s < options[decisions[group]].time_s

    def _is_permitted(self, decisions: np.ndarray) -> bool:
        """Whether requirements of groups of several options hold, and limits of other memory than the device's."""
        return not (self._several or self._problem.resources) or not self.simulator.violations(decisions)

    def _saving(self, needs: list[list[int]]) -> Iterator[_Move]:
        """Moves that save groups that may be recomputed."""
        groups = self._problem.groups
        size = self._bytes()
        for group, together in enumerate(needs):
            fixed = any(groups[g].must_not_save for g in together)
            if group not in self._several and self._everything[group] and not fixed:
                time_s = sum(groups[g].options[RECOMPUTE].time_s for g in together if g not in self._several)
                yield self._move(together, SAVE, time_s, sum(int(size[g]) for g in together))

    def _of_several(self) -> Iterator[_Move]:
        """Moves of groups that move alone: to each option that is faster than the last."""
        size: dict[Literal, int] = {}
        for lifetime in self._problem.lifetimes if self._several else ():
            for literal in lifetime.exists.literals:
                size[literal] = size.get(literal, 0) + lifetime.bytes
        for index in sorted(self._several):
            group, last = self._problem.groups[index], int(self._everything[index])
            for option in range(len(group.options)):
                gain_s = group.options[last].time_s - group.options[option].time_s
                if gain_s > 0 and group.permits(option):
                    more = size.get(Literal(index, option), 0) - size.get(Literal(index, last), 0)
                    yield self._move([index], option, gain_s, more)

    def _bytes(self) -> np.ndarray:
        """Per group the bytes of its second lifetimes; for a loss's log-probabilities these are the only ones."""
        size = np.zeros(len(self._problem.groups), dtype=np.int64)
        for lifetime in self._problem.lifetimes:
            if lifetime.storage >= 0 and lifetime.exists.literals:
                size[max(literal.group for literal in lifetime.exists.literals)] += lifetime.bytes
        return size

    def _move(self, groups: list[int], option: int, time_s: float, more_bytes: int) -> _Move:
        depends = np.any([self.simulator.depending_on(group) for group in groups], axis=0)
        return _Move(np.array(groups), option, time_s / max(more_bytes, 1), self.simulator.part(depends))


def _moves_alone(group: DecisionGroup) -> bool:
    return len(group.options) > 2 or any(option.action is Action.COMPILED for option in group.options)


def _last(group: DecisionGroup) -> int:
    return max((option for option in range(len(group.options)) if group.permits(option)), default=SAVE)
