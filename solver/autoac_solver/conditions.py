"""Boolean algebra over decisions: what "alive" means for a storage, in as few and as tight literals as possible.

A *literal* is a non-zero int: variable v, counted from 0, is true in +(v + 1) and false in -(v + 1). The variables are
the units ("is recomputed"), then the regions ("is wrapped"). An *alternative* is a set of literals that must all hold,
a *term* a set of alternatives of which one must hold.

The fewer literals an alternative has, the tighter its linear relaxation, which for m literals is their sum - (m - 1).
So what the rows of the problem imply is used to drop literals (a wrapped region follows from any of its units, a unit
brings those that it requires), and complementary alternatives are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet

from autoac_solver.problem import Condition, Problem, Unit

Alternative = frozenset[int]
Term = frozenset[Alternative]

TRUE: Term = frozenset({frozenset()})
FALSE: Term = frozenset()


class Algebra:
    """What follows from what in every permitted decision of a problem, and the simplification that it allows.

    Args:
        problem: its units' must_save, must_recompute, requires and same_as, and their regions.

    Attributes:
        n_variables: units and regions.
        twin: for each unit the first of those that are always decided like it.
        never: the literals that no permitted decision makes true.

    Raises:
        ValueError: no decision is permitted.
    """

    def __init__(self, problem: Problem) -> None:
        units = problem.units
        self._n_units = len(units)
        self.n_variables = len(units) + len(problem.regions)
        brings = brought_along(units)
        self.twin = [min(v for v in brings[u] if u in brings[v]) for u in range(len(units))]
        possible = [u for u in range(len(units)) if not any(units[v].must_save for v in brings[u])]
        self.never = {literal + 1 for literal in range(self.n_variables)}
        self.never -= {u + 1 for u in possible} | {self.wrapped(units[u].region) for u in possible}
        for u in (u for u, unit in enumerate(units) if unit.must_recompute):
            for v in brings[u]:
                if units[v].must_save:
                    raise ValueError(
                        f"unit {u} must be recomputed, and with it unit {v}, which must be saved"
                    )
                self.never |= {-(v + 1), -self.wrapped(units[v].region)}
        self._implied = {self.wrapped(k): {self.wrapped(k)} for k in range(len(problem.regions))}
        self._implied |= {-(u + 1): {-(u + 1)} for u in range(len(units))}
        for u in range(len(units)):
            self._implied[u + 1] = {v + 1 for v in brings[u]} | {
                self.wrapped(units[v].region) for v in brings[u]
            }
            for v in brings[u]:
                self._implied[-(v + 1)].add(-(u + 1))

    def wrapped(self, region: int) -> int:
        """The literal of a wrapped region."""
        return self._n_units + region + 1

    def recomputed(self, unit: int) -> int:
        """The literal of a recomputed unit."""
        return self.twin[unit] + 1

    def brings(self, unit: int) -> set[int]:
        """The literals that follow from a unit being recomputed, its own left out."""
        return {self._representative(literal) for literal in self._implied[unit + 1]} - {
            self.recomputed(unit)
        }

    def alternative(self, *conditions: Condition) -> Alternative | None:
        """All of the conditions, without redundant literals; None if they cannot hold together."""
        literals = set()
        for condition in conditions:
            if condition.recomputed >= 0:
                literals.add(self.recomputed(condition.recomputed))
            if condition.kept >= 0:
                literals.add(-self.recomputed(condition.kept))
            if condition.wrapped >= 0:
                literals.add(self.wrapped(condition.wrapped))
        return self._without_redundant(literals)

    def term(self, alternatives: Iterable[Alternative | None]) -> Term:
        """One of the alternatives (None: impossible), merged and without those that others cover."""
        found = sorted({a for a in alternatives if a is not None}, key=lambda a: (len(a), sorted(a)))
        changed = True
        while changed:
            found = self._without_covered(found)
            changed = self._merge_one(found)
        return frozenset(found)

    def joined(self, term: Term, alternative: Alternative | None) -> Term:
        """The term, or this alternative (None: impossible); both already without what is redundant in them.

        The same as `term` of them all, but it takes one look at each of them, not at each pair.
        """
        if alternative is None:
            return term
        implied = self._all_implied(alternative)
        if any(other <= implied for other in term):
            return term
        opposite = {-literal for literal in alternative}
        for other in term:
            if not opposite.isdisjoint(other) or alternative <= self._all_implied(other):
                return self.term((*term, alternative))
        return term | {alternative}

    def _representative(self, literal: int) -> int:
        """The literal of the twin."""
        if abs(literal) > self._n_units:
            return literal
        twin = self.recomputed(abs(literal) - 1)
        return twin if literal > 0 else -twin

    def _all_implied(self, literals: Collection[int]) -> AbstractSet[int]:
        if len(literals) == 1:  # nearly always
            return self._implied[next(iter(literals))]
        return set().union(*(self._implied[literal] for literal in literals))

    def _without_redundant(self, literals: set[int]) -> Alternative | None:
        """Drop what follows from the rest; None if there is a contradiction."""
        implied = self._all_implied(literals)
        if any(-literal in implied or literal in self.never for literal in implied):
            return None
        literals = {literal for literal in literals if -literal not in self.never}
        for literal in sorted(literals):
            if literal in self._all_implied(literals - {literal}):
                literals.discard(literal)
        return frozenset(literals)

    def _without_covered(self, alternatives: list[Alternative]) -> list[Alternative]:
        """Drop each alternative from which another one, that stays, follows."""
        staying = list(alternatives)
        for alternative in reversed(alternatives):
            implied = self._all_implied(alternative)
            if any(other <= implied for other in staying if other is not alternative):
                staying.remove(alternative)
        return staying

    def _merge_one(self, alternatives: list[Alternative]) -> bool:
        """Replace, in place, (l and X) by X where there is (not l and Y) and Y follows from X."""
        for index, alternative in enumerate(alternatives):
            for literal in sorted(alternative):
                rest = alternative - {literal}
                implied = self._all_implied(rest)
                if any(-literal in other and other - {-literal} <= implied for other in alternatives):
                    alternatives[index] = rest
                    return True
        return False


def brought_along(units: Sequence[Unit]) -> list[set[int]]:
    """For each unit those that must be recomputed if it is, itself included."""
    edges: list[set[int]] = [set(unit.requires) for unit in units]
    for index, unit in enumerate(units):
        if unit.same_as >= 0:
            edges[index].add(unit.same_as)
            edges[unit.same_as].add(index)
    return [_reachable(index, edges) for index in range(len(edges))]


def _reachable(start: int, edges: list[set[int]]) -> set[int]:
    """All that can be reached along the edges, the start included."""
    seen, frontier = {start}, [start]
    while frontier:
        fresh = edges[frontier.pop()] - seen
        seen |= fresh
        frontier += fresh
    return seen
