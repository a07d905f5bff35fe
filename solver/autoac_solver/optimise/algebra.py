"""Boolean algebra over decisions: the conditions under which a storage is alive, with few and tight literals.

A *literal* is a non-zero int here: variable v, counted from 0, is true in +(v + 1) and false in -(v + 1). A group of
two options has one variable ("takes the second"), a group of more has one per option; the regions' variables ("is
wrapped") follow. An *alternative* is a conjunction of literals, a *term* a disjunction of alternatives.

The linear relaxation of an alternative of m literals is their sum - (m - 1): the fewer literals, the tighter. So
literals that the problem's rules imply are dropped (any recomputed group implies its wrapped region, and the groups
that it requires), and complementary alternatives are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from autoac_solver.problem.problem import RECOMPUTE, SAVE, Condition, DecisionGroup, Literal, Problem

Alternative = frozenset[int]
Term = frozenset[Alternative]

TRUE: Term = frozenset({frozenset()})
FALSE: Term = frozenset()


class Variables:
    """The 0/1 variables of a problem's decisions, and conversions in both directions.

    Args:
        problem: not changed.

    Attributes:
        n_choices: number of group variables; the regions' variables come after them.
        count: number of all variables.
    """

    def __init__(self, problem: Problem) -> None:
        self._groups = problem.groups
        self._region = np.array([group.region for group in problem.groups], dtype=np.int64)
        sizes = [1 if len(group.options) <= 2 else len(group.options) for group in problem.groups]
        first = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._first = first[:-1]
        self.n_choices = int(first[-1])
        self.count = self.n_choices + len(problem.regions)
        self._two = np.array([len(group.options) <= 2 for group in problem.groups], dtype=bool)
        self._several = np.flatnonzero(~self._two).tolist()

    def literal(self, literal: Literal) -> int:
        """The equivalent literal of a variable."""
        first = int(self._first[literal.group]) + 1
        if len(self._groups[literal.group].options) > 2:
            return first + literal.option if literal.positive else -first - literal.option
        return first if (literal.option == RECOMPUTE) is literal.positive else -first

    def wrapped(self, region: int) -> int:
        """The literal "region is wrapped"."""
        return self.n_choices + region + 1

    def several(self) -> Iterator[tuple[int, list[int]]]:
        """The groups of more than two options, and the literals of their options."""
        for group in self._several:
            options = range(len(self._groups[group].options))
            yield group, [self.literal(Literal(group, option)) for option in options]

    def of(self, decisions: np.ndarray) -> np.ndarray:
        """The values of all variables: float, 0 or 1.

        Args:
            decisions: the option of each group.
        """
        values = np.zeros(self.count)
        values[self._first[self._two]] = decisions[self._two]
        for group in self._several:
            values[self._first[group] + decisions[group]] = 1
        values[self.n_choices + self._region[decisions != SAVE]] = 1
        return values

    def not_saved(self, values: np.ndarray) -> np.ndarray:
        """The fraction to which each group is not saved: float per group, from 0 to 1."""
        shares = values[self._first]
        shares[self._several] = 1 - shares[self._several]
        return shares

    def regions(self, values: np.ndarray) -> np.ndarray:
        """The fraction to which each region is wrapped: float per region, from 0 to 1."""
        return values[self.n_choices :]

    def rounded(self, values: np.ndarray, not_saved: np.ndarray) -> np.ndarray:
        """Round to decisions: a group in `not_saved` takes its largest option other than to save.

        Args:
            values: float per variable.
            not_saved: bool per group.
        """
        decisions = not_saved.astype(np.int8)
        for group in self._several:
            if not_saved[group]:
                first = self._first[group] + 1
                others = values[first : first + len(self._groups[group].options) - 1]
                decisions[group] = 1 + int(np.argmax(others))
        return decisions


class Algebra:
    """Implications between literals that hold in every permitted decision, and simplification by them.

    Args:
        problem: its groups' refusals, requires and same_as, and their regions.

    Attributes:
        variables: the problem's.
        twin: for each group variable the first variable that always equals it.
        never: literals that are false in every permitted decision.

    Raises:
        ValueError: no decision is permitted.
    """

    def __init__(self, problem: Problem) -> None:
        self._groups = problem.groups
        self.variables = variables = Variables(problem)
        edges = _implications(problem, variables)
        self._implied = {literal: _reachable(literal, edges) for literal in edges}
        self._own: dict[
            int, frozenset[int]
        ] = {}  # literal of a group of several options -> those of the others
        for _, literals in variables.several():
            self._own |= {literal: frozenset(-other for other in literals) for literal in literals}
        self.twin = [
            min(v for v in self._implied[u + 1] if 0 < v <= variables.n_choices and u + 1 in self._implied[v])
            - 1
            for u in range(variables.n_choices)
        ]
        self.never = self._impossible(problem)

    def _impossible(self, problem: Problem) -> set[int]:
        """Literals that imply a refused one, or leave a group without an option."""
        refused = {
            self.variables.literal(Literal(g, refusal.option))
            for g, group in enumerate(problem.groups)
            for refusal in group.refusals
        }
        # A group of one option has the variable "takes the second", too.
        one = (g for g, group in enumerate(self._groups) if len(group.options) == 1)
        refused |= {-self.variables.literal(Literal(g, SAVE)) for g in one}
        never: set[int] = set()
        while True:
            never = {literal for literal, implied in self._implied.items() if not refused.isdisjoint(implied)}
            before = len(refused)
            refused |= never
            for _, literals in self.variables.several():
                left = [literal for literal in literals if literal not in never]
                refused |= {-left[0]} if len(left) == 1 else set()
            if len(refused) == before:
                break
        possible: set[int] = set()
        for g, group in enumerate(problem.groups):
            others = (self.variables.literal(Literal(g, o)) for o in range(1, len(group.options)))
            if not never.issuperset(others):
                possible |= {group.region, problem.regions[group.region].within}
        never |= {self.variables.wrapped(k) for k in range(len(problem.regions)) if k not in possible}
        stuck = [literal for literal in never if literal > 0 and -literal in never]
        stuck += [literals[0] for _, literals in self.variables.several() if never.issuperset(literals)]
        if stuck:
            raise ValueError(_contradiction(problem, self.variables, min(stuck)))
        return never

    def possible(self, group: int) -> list[int]:
        """The options that some permitted decision takes."""
        options = range(len(self._groups[group].options))
        return [o for o in options if self.literal(Literal(group, o)) not in self.never]

    def literal(self, literal: Literal) -> int:
        """The literal on the first variable among its twins."""
        return self._representative(self.variables.literal(literal))

    def brings(self, variable: int) -> set[int]:
        """Literals that a true group variable implies, except its own and those of the group's other options."""
        literal = variable + 1
        own = {self._representative(other) for other in self._own.get(literal, ())}
        found = {self._representative(other) for other in self._implied[literal]}
        return found - own - {self._representative(literal)}

    def alternative(self, *conditions: Condition) -> Alternative | None:
        """The conjunction of conditions without redundant literals; None if it is unsatisfiable."""
        literals = {self.literal(literal) for condition in conditions for literal in condition.literals}
        literals |= {self.variables.wrapped(c.wrapped) for c in conditions if c.wrapped >= 0}
        return self._without_redundant(literals)

    def term(self, alternatives: Iterable[Alternative | None]) -> Term:
        """The disjunction of alternatives (None: impossible), merged, without those that others cover."""
        found = sorted({a for a in alternatives if a is not None}, key=lambda a: (len(a), sorted(a)))
        changed = True
        while changed:
            found = self._without_covered(found)
            changed = self._merge_one(found)
        return frozenset(found)

    def joined(self, term: Term, alternative: Alternative | None) -> Term:
        """The disjunction of a term and an alternative (None: impossible), both already simplified.

        Same result as `term` of all of them, in linear instead of quadratic time.
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
        """The same literal on the variable's twin."""
        if abs(literal) > self.variables.n_choices:
            return literal
        twin = self.twin[abs(literal) - 1] + 1
        return twin if literal > 0 else -twin

    def _all_implied(self, literals: Collection[int]) -> AbstractSet[int]:
        if len(literals) == 1:  # nearly always
            return self._implied[next(iter(literals))]
        return set().union(*(self._implied[literal] for literal in literals))

    def _without_redundant(self, literals: set[int]) -> Alternative | None:
        """Drop literals that the rest implies; None on a contradiction."""
        implied = self._all_implied(literals)
        if any(-literal in implied or literal in self.never for literal in implied):
            return None
        literals = {literal for literal in literals if -literal not in self.never}
        for literal in sorted(literals):
            if literal in self._all_implied(literals - {literal}):
                literals.discard(literal)
        return frozenset(literals)

    def _without_covered(self, alternatives: list[Alternative]) -> list[Alternative]:
        """Drop each alternative that implies another remaining one."""
        staying = list(alternatives)
        for alternative in reversed(alternatives):
            implied = self._all_implied(alternative)
            if any(other <= implied for other in staying if other is not alternative):
                staying.remove(alternative)
        return staying

    def _merge_one(self, alternatives: list[Alternative]) -> bool:
        """Replace in place one (l and X) by X if (not l and Y) exists and X implies Y; return whether one was found."""
        for index, alternative in enumerate(alternatives):
            for literal in sorted(alternative):
                rest = alternative - {literal}
                implied = self._all_implied(rest)
                if any(-literal in other and other - {-literal} <= implied for other in alternatives):
                    alternatives[index] = rest
                    return True
        return False


def _implications(problem: Problem, variables: Variables) -> dict[int, set[int]]:
    """Direct implications of each literal, with their contrapositives (a -> b, and not b -> not a)."""
    edges: dict[int, set[int]] = {}
    for variable in range(1, variables.count + 1):
        edges[variable], edges[-variable] = set(), set()

    def implies(one: int, other: int) -> None:
        edges[one].add(other)
        edges[-other].add(-one)

    for index, group in enumerate(problem.groups):
        for number, option in enumerate(group.options):
            taken = variables.literal(Literal(index, number))
            for required in option.requires:
                implies(taken, variables.literal(required))
            if group.same_as >= 0:
                twin = variables.literal(Literal(group.same_as, number))
                implies(taken, twin)
                implies(twin, taken)
            if number != SAVE:
                implies(taken, variables.wrapped(group.region))
    for index, region in enumerate(problem.regions):
        if region.within >= 0:
            implies(variables.wrapped(index), variables.wrapped(region.within))
    for _, literals in variables.several():
        for literal in literals:
            for other in literals:
                if other != literal:
                    edges[literal].add(-other)
    return edges


def _contradiction(problem: Problem, variables: Variables, literal: int) -> str:
    """Message for a group or region that no decision satisfies."""
    for index, group in enumerate(problem.groups):
        numbers = {abs(variables.literal(Literal(index, option))) for option in range(len(group.options))}
        if literal in numbers:
            reasons = "; ".join(refusal.reason for refusal in group.refusals)
            return f"group {index} has no option left" + (
                f": {reasons}" if reasons else " by what it requires"
            )
    return f"region {literal - variables.n_choices - 1} must be wrapped and cannot be"


def brought_along(groups: Iterable[DecisionGroup]) -> list[set[int]]:
    """For each group the groups that must be recomputed with it, itself included. Only for groups of two options."""
    groups = list(groups)
    edges: dict[int, set[int]] = {index: set() for index in range(len(groups))}
    for index, group in enumerate(groups):
        again = group.options[RECOMPUTE].requires if len(group.options) > RECOMPUTE else ()
        edges[index] |= {literal.group for literal in again if literal.positive}
        if group.same_as >= 0:
            edges[index].add(group.same_as)
            edges[group.same_as].add(index)
    return [_reachable(index, edges) for index in range(len(groups))]


def _reachable(start: int, edges: dict[int, set[int]]) -> set[int]:
    """All nodes reachable along the edges, the start included."""
    seen, frontier = {start}, [start]
    while frontier:
        fresh = edges[frontier.pop()] - seen
        seen |= fresh
        frontier += fresh
    return seen
