"""Live bytes as a linear function of the decisions at each position, for the ILP's memory rows.

The ends of its extensions cut a lifetime into segments; in each segment it is alive under one term. A term of one
literal is linear. Any other term gets one auxiliary variable y in [0, 1], shared by all its occurrences, with a row
y >= sum(literals) - (m - 1) for each alternative of m literals. Less memory is never worse, so at integer decisions y
takes the term's truth value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoac_solver.optimise.algebra import FALSE, TRUE, Algebra, Alternative, Term
from autoac_solver.problem.problem import Condition, Lifetime, Problem

_ALWAYS_ALIVE = 0


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """Live bytes at one position: `constant_bytes` plus the bytes of all literals that are true.

    Args:
        constant_bytes: alive under all decisions.
        literals: int64 array, see `optimise.algebra`; each variable occurs at most once.
        bytes: int64 array, positive, one for each literal.
    """

    constant_bytes: int
    literals: np.ndarray
    bytes: np.ndarray


class Segments:
    """Pieces of lifetimes in one kind of memory, each alive if its literal is true.

    Args:
        start, end: alive at positions start <= p < end.
        sizes: bytes.
        literal: see `optimise.algebra`; 0 if it is always alive.
        n_positions: length of the axis.
        resident_bytes: alive at every position.
    """

    def __init__(
        self,
        start: np.ndarray,
        end: np.ndarray,
        sizes: np.ndarray,
        literal: np.ndarray,
        n_positions: int,
        resident_bytes: int,
    ) -> None:
        self.start, self.end, self.bytes, self.literal = start, end, sizes, literal
        self._n_positions = n_positions
        self._constant = resident_bytes + self._live(np.where(literal == _ALWAYS_ALIVE, sizes, 0))

    @property
    def tops(self) -> list[int]:
        """Positions at which anything begins: live bytes are highest at one of them, under any decisions."""
        return np.unique(self.start).tolist()

    def row(self, position: int) -> MemoryRow:
        """Live bytes at a position, exact to the byte; opposite literals of a variable are netted."""
        alive = (self.start <= position) & (position < self.end) & (self.literal != _ALWAYS_ALIVE)
        variables, where = np.unique(np.abs(self.literal[alive]), return_inverse=True)
        if_true, if_false = np.zeros((2, len(variables)), dtype=np.int64)
        positive = self.literal[alive] > 0
        np.add.at(if_true, where[positive], self.bytes[alive][positive])
        np.add.at(if_false, where[~positive], self.bytes[alive][~positive])
        difference = if_true - if_false
        constant_bytes = int(self._constant[position] + np.minimum(if_true, if_false).sum())
        counts = difference != 0
        return MemoryRow(
            constant_bytes, (variables * np.sign(difference))[counts], np.abs(difference)[counts]
        )

    @cached_property
    def floor_bytes(self) -> int:
        """The most bytes that are alive at one position under all decisions."""
        decided = self.literal != _ALWAYS_ALIVE
        literal, n_bytes = self.literal[decided], self.bytes[decided]
        variable = np.tile(np.abs(literal), 2)
        position = np.concatenate([self.start[decided], self.end[decided]])
        change = np.concatenate([n_bytes, -n_bytes])
        order = np.lexsort((position, variable))
        # What a variable adds has ended before the next variable begins, so one running sum serves all.
        is_positive = np.tile(literal > 0, 2)[order]
        if_true = np.cumsum(np.where(is_positive, change[order], 0))
        if_false = np.cumsum(np.where(is_positive, 0, change[order]))
        certain = np.diff(np.minimum(if_true, if_false), prepend=0)
        steps = np.zeros(self._n_positions + 1, dtype=np.int64)
        np.add.at(steps, position[order], certain)
        return int((self._constant + np.cumsum(steps[:-1])).max(initial=0))

    def live_bytes(self, values: np.ndarray) -> np.ndarray:
        """Live bytes at given values of all variables: float per position."""
        value = np.append(1.0, values)[np.abs(self.literal)]
        share = np.where(self.literal < 0, 1 - value, value)
        share[self.literal == _ALWAYS_ALIVE] = 0
        return self._constant + self._live(self.bytes * share)

    def _live(self, piece_bytes: np.ndarray) -> np.ndarray:
        """Sum over the pieces alive at each position."""
        change = np.zeros(self._n_positions + 1, dtype=piece_bytes.dtype)
        np.add.at(change, self.start, piece_bytes)
        np.subtract.at(change, self.end, piece_bytes)
        return np.cumsum(change[:-1])


class MemoryModel:
    """The segments of all lifetimes of a problem.

    Args:
        problem: not changed.
        algebra: the problem's.

    Attributes:
        resources: the problem's other memory.

    Auxiliary variables are numbered after the decisions.
    """

    def __init__(self, problem: Problem, algebra: Algebra) -> None:
        self._auxiliary: list[Term] = []
        self._algebra = algebra
        self._literal_of_term: dict[Term, int] = {}
        self._alternatives: dict[tuple[Condition, ...], Alternative | None] = {}
        self._n_positions = problem.n_positions
        self._device = self._segments(problem.lifetimes, problem.resident_bytes)
        self.resources = tuple(self._segments(resource.lifetimes, 0) for resource in problem.resources)
        self._index_alternatives()

    def _segments(self, lifetimes: Iterable[Lifetime], resident_bytes: int) -> Segments:
        pieces = [piece for lifetime in lifetimes for piece in self._pieces(lifetime)]
        start, end, sizes, literal = np.array(pieces, dtype=np.int64).reshape(-1, 4).T
        return Segments(start, end, sizes, literal, self._n_positions, resident_bytes)

    def row(self, position: int) -> MemoryRow:
        """Live bytes on the device at a position."""
        return self._device.row(position)

    @property
    def floor_bytes(self) -> int:
        """A lower bound of every plan's peak: the most bytes that are alive at one position under all decisions.

        It equals the largest `constant_bytes` of all rows: of two copies of a value, one of which is alive whatever is
        decided, the smaller one counts.
        """
        return self._device.floor_bytes

    def evaluate(self, decisions: np.ndarray) -> np.ndarray:
        """The least values of all variables, auxiliary ones included, at decisions that may be fractions.

        Args:
            decisions: float per variable of groups and regions, from 0 to 1.
        """
        slack = np.where(
            self._entry_positive, decisions[self._entry_variable] - 1, -decisions[self._entry_variable]
        )
        alternative = 1 + np.bincount(self._entry_alternative, slack, minlength=len(self._alternative_owner))
        auxiliary = np.zeros(len(self._auxiliary))
        np.maximum.at(auxiliary, self._alternative_owner, alternative)
        return np.concatenate([decisions, auxiliary])

    def live_bytes(self, values: np.ndarray) -> np.ndarray:
        """Live bytes at given values of all variables: float per position."""
        return self._device.live_bytes(values)

    def auxiliary_term(self, literal: int) -> Term:
        """The term of an auxiliary variable, given as a positive literal."""
        return self._auxiliary[literal - 1 - self._algebra.variables.count]

    def _pieces(self, lifetime: Lifetime) -> Iterator[tuple[int, int, int, int]]:
        """(start, end, bytes, literal) of a lifetime's segments."""
        if not lifetime.bytes:
            return
        # Before its own end a lifetime needs no extension; after it, any extension that ends later.
        lasting = sorted((e for e in lifetime.extensions if e.end > lifetime.end), key=lambda e: -e.end)
        segments = []
        term = FALSE
        for extension, start in zip(lasting, [*(e.end for e in lasting[1:]), lifetime.end], strict=False):
            term = self._algebra.joined(term, self._alternative(lifetime.exists, extension.when))
            if start < extension.end:
                segments.append((start, extension.end, term))
        exists = self._alternative(lifetime.exists)
        if exists is not None and lifetime.start < lifetime.end:
            segments.append((lifetime.start, lifetime.end, frozenset({exists})))
        for start, end, term in reversed(segments):
            literal = self._literal_of(term)
            if literal is not None and max(start, lifetime.start) < end:
                yield max(start, lifetime.start), end, lifetime.bytes, literal

    def _alternative(self, *conditions: Condition) -> Alternative | None:
        if conditions not in self._alternatives:
            self._alternatives[conditions] = self._algebra.alternative(*conditions)
        return self._alternatives[conditions]

    def _literal_of(self, term: Term) -> int | None:
        """A term as one literal, of a new auxiliary variable if necessary; None if the term is false."""
        if term in (TRUE, FALSE):
            return _ALWAYS_ALIVE if term == TRUE else None
        if len(term) == 1 and len(next(iter(term))) == 1:
            return next(iter(next(iter(term))))
        if term not in self._literal_of_term:
            self._auxiliary.append(term)
            self._literal_of_term[term] = self._algebra.variables.count + len(self._auxiliary)
        return self._literal_of_term[term]

    def _index_alternatives(self) -> None:
        """Arrays for `evaluate`: one entry for each literal of each alternative of each auxiliary variable."""
        alternatives = [
            (owner, sorted(a))
            for owner, term in enumerate(self._auxiliary)
            for a in sorted(map(sorted, term))
        ]
        self._alternative_owner = np.array([owner for owner, _ in alternatives], dtype=np.int64)
        self._entry_alternative = np.repeat(np.arange(len(alternatives)), [len(a) for _, a in alternatives])
        literals = np.array([literal for _, a in alternatives for literal in a], dtype=np.int64)
        self._entry_variable = np.abs(literals) - 1
        self._entry_positive = literals > 0
