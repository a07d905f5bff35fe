"""The integer program, with memory rows added lazily. See docs/integer-program.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pulp

from autoac_solver.optimise.algebra import Algebra
from autoac_solver.optimise.backends import LinearProgram
from autoac_solver.optimise.memory import MemoryModel, MemoryRow
from autoac_solver.problem.problem import RECOMPUTE, SAVE, Literal, Problem

_COST_RANGE = 1e4
"""The objective's scale, the sum of all costs: solvers work to absolute tolerances of about 1e-6."""
_TOLERANCE = 1e-5
"""Violation of a memory row that a solver may leave."""
_SLACK = 1e-7
"""Slack of memory rows, so that rounding errors (CBC reads 13 digits) do not cut off a plan that meets the budget to
the byte. The simulator catches plans that exceed the budget within this slack, and covers forbid them."""
_PEAK = 0
"""The key of the peak's variable; the key of any other variable is its positive literal."""


class Formulation:
    """The integer program of a problem: decisions, rules, costs, and memory rows at some positions.

    Args:
        problem: not changed.
        algebra, memory: the problem's.
        budget_bytes: right-hand side of the memory rows; None minimises the peak instead of the time.
        minimise_time: False accepts any plan within the budget.

    Attributes:
        minimise_time: whether the objective is the time.
        minimise_peak: whether it is the peak.
        program: input of the solver.
        positions: positions that have a memory row.
        is_split: only a subset of the plans is allowed, see `split`.
        impossible: some row, left out of the program, holds under no decisions.
        cost_per_s: units of the objective per second.
        constant_s: constant term of the objective in seconds: the penalty of hints if nothing is recomputed.
        unit_bytes: bytes per unit in the memory rows.
    """

    def __init__(
        self,
        problem: Problem,
        algebra: Algebra,
        memory: MemoryModel,
        budget_bytes: int | None,
        *,
        minimise_time: bool = True,
    ) -> None:
        self._problem, self._algebra, self._memory = problem, algebra, memory
        self._budget_bytes = budget_bytes
        self.minimise_time = budget_bytes is not None and minimise_time
        self.minimise_peak = budget_bytes is None
        self.program = LinearProgram(pulp.LpProblem("autoac", pulp.LpMinimize), [])
        self.positions: set[int] = set()
        self.impossible = False
        self.is_split = False
        everywhere = (problem.lifetimes, *(resource.lifetimes for resource in problem.resources))
        self.unit_bytes = max([1, *(lifetime.bytes for lifetimes in everywhere for lifetime in lifetimes)])
        total_s = sum(option.time_s + option.hint_s for group in problem.groups for option in group.options)
        total_s += sum(region.wrap_s for region in problem.regions)
        self.cost_per_s = _COST_RANGE / total_s if total_s > 0 else 1.0
        two = (group for group in problem.groups if len(group.options) <= 2)
        self.constant_s = sum(group.options[SAVE].hint_s for group in two)
        self._column: dict[int, int] = {}
        self._counts: dict[tuple[int, ...], int] = {}  # literals -> column of how many are true
        self._add_decisions()
        self._add_rules()
        self._add_limits()
        if budget_bytes is None:
            self._add_variable(_PEAK, "peak", None)
            objective = [(self._variable(_PEAK), 1.0)]
        else:
            objective = self._costs() if self.minimise_time else []
        self.program.model.setObjective(pulp.LpAffineExpression(objective))

    def decisions(self, values: np.ndarray) -> np.ndarray:
        """The solver's values of the group and region variables."""
        algebra = self._algebra
        choices = [self._column[twin + 1] for twin in algebra.twin]
        regions = [self._column[algebra.variables.wrapped(k)] for k in range(len(self._problem.regions))]
        return values[choices + regions]

    @property
    def counts(self) -> set[int]:
        """The columns that count regions for `split`; outside of it they restrict nothing."""
        return set(self._counts.values())

    @property
    def lone(self) -> list[int]:
        """The columns of groups that are the only one of their region and have two options, such as that of losses."""
        groups = self._problem.groups
        sizes = Counter(group.region for group in groups)
        alone = (i for i, g in enumerate(groups) if sizes[g.region] == 1 and len(g.options) == 2)
        literals = dict.fromkeys(abs(self._algebra.literal(Literal(index, RECOMPUTE))) for index in alone)
        return [self._column[literal] for literal in literals if literal in self._column]

    def seconds(self, objective: float) -> float:
        """An objective value in seconds."""
        return objective / self.cost_per_s + self.constant_s

    def point(self, decisions: np.ndarray) -> np.ndarray:
        """The solver's values for integer decisions. Only for programs with a budget."""
        truth = self._memory.evaluate(decisions)
        values = np.zeros(len(self.program.variables))
        values[list(self._column.values())] = truth[np.array(list(self._column)) - 1]
        for literals, column in self._counts.items():
            values[column] = truth[np.array(literals) - 1].sum()
        return values

    def allows(self, peak_bytes: int) -> bool:
        """Whether a plan with this peak is feasible."""
        return self._budget_bytes is not None and peak_bytes <= self._budget_bytes

    def limit_bytes(self, values: np.ndarray) -> float:
        """Upper limit of a solution's live bytes: the budget, or the solution's peak plus a tolerance."""
        if self._budget_bytes is not None:
            return self._budget_bytes
        return self._problem.resident_bytes + (values[self._column[_PEAK]] + _TOLERANCE) * self.unit_bytes

    def least_peak_bytes(self, bound: float) -> int:
        """A bound of the objective as bytes, if the peak is minimised: no plan has a lower peak."""
        return self._problem.resident_bytes + math.floor((bound - _TOLERANCE) * self.unit_bytes)

    def add_rows(self, positions: Iterable[int]) -> bool:
        """Add memory rows at positions that have none yet; return whether there were any."""
        new = sorted(set(positions) - self.positions)
        for position in new:
            self._add_memory_row(self._memory.row(position))
        self.positions.update(new)
        return bool(new)

    def add_covers(self, positions: Iterable[int], decisions: np.ndarray) -> None:
        """Forbid decisions that exceed the budget at positions by less than the solver's tolerance.

        Args:
            positions: where the budget is exceeded in spite of a memory row.
            decisions: 0 or 1 per variable of groups and regions.
        """
        assert self._budget_bytes is not None
        for position in positions:
            self._add_cover(self._memory.row(position), self._budget_bytes, decisions)

    def add_covers_of_resources(self, decisions: np.ndarray) -> bool:
        """Forbid decisions that exceed a resource's limit by less than the solver's tolerance; whether there are any.

        Args:
            decisions: 0 or 1 per variable of groups and regions.
        """
        values, exceeded = self._memory.evaluate(decisions), False
        for resource, segments in zip(self._problem.resources, self._memory.resources, strict=True):
            for position in np.flatnonzero(segments.live_bytes(values) > resource.limit_bytes).tolist():
                self._add_cover(segments.row(position), resource.limit_bytes, decisions)
                exceeded = True
        return exceeded

    def _add_cover(self, row: MemoryRow, limit_bytes: int, decisions: np.ndarray) -> None:
        """Forbid decisions whose live bytes in a row exceed a limit.

        The cover at a position is the shortest list of true literals, by decreasing bytes, whose sum exceeds the
        budget. The row extends it by all literals at least as large as its largest, and lets fewer literals be true
        than the cover is long. All coefficients are 1, so no tolerance admits the same decisions again.
        """
        truth = np.append(0.0, self._memory.evaluate(decisions)) > 0.5
        true = np.flatnonzero(truth[np.abs(row.literals)] == (row.literals > 0))
        true = true[np.argsort(-row.bytes[true], kind="stable")]
        left_bytes = _left_bytes(row, limit_bytes)
        size = 1 + int(np.searchsorted(np.cumsum(row.bytes[true]), left_bytes, side="right"))
        in_row = row.bytes >= row.bytes[true[0]]
        in_row[true[:size]] = True
        self._add_row(
            [(literal, 1.0) for literal in row.literals[in_row].tolist()], pulp.LpConstraintLE, size - 1
        )

    @contextmanager
    def split(self, regions: Sequence[int], least: int, most: int) -> Iterator[None]:
        """Context that allows only plans in which `least` to `most` of these regions are wrapped.

        Contexts do not nest. Memory rows added inside one remain: they are valid for all plans.
        """
        assert not self.is_split
        literals = tuple(self._algebra.variables.wrapped(region) for region in regions)
        if literals not in self._counts:
            self._counts[literals] = len(self.program.variables)
            name, count = f"n{len(self._counts)}", float(len(regions))
            variable = self.program.model.add_variable(name, 0.0, count, pulp.LpContinuous)
            self.program.variables.append(variable)
            terms = [(variable, -1.0), *((self._variable(literal), 1.0) for literal in literals)]
            self.program.model.addConstraint(
                pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, rhs=0)
            )
        variable = self.program.variables[self._counts[literals]]
        variable.lowBound, variable.upBound, self.is_split = float(least), float(most), True
        try:
            yield
        finally:
            variable.lowBound, variable.upBound, self.is_split = 0.0, float(len(regions)), False

    def _add_decisions(self) -> None:
        """Add a binary variable per choice, shared by twins, and a continuous one per region, implied by them."""
        variables = self._algebra.variables
        for choice in sorted(set(self._algebra.twin)):
            self._add_variable(choice + 1, f"r{choice}", 1.0, pulp.LpInteger)
        for region in range(len(self._problem.regions)):
            self._add_variable(variables.wrapped(region), f"w{region}", 1.0)
        for literal in self._algebra.never:
            if literal in self._column:
                self._variable(literal).upBound = 0.0
            elif -literal in self._column:
                self._variable(-literal).lowBound = 1.0

    def _add_rules(self) -> None:
        """Add r <= each literal that r requires (groups, its region wrapped), and one-option-per-group rows."""
        for choice in sorted(set(self._algebra.twin)):
            if choice + 1 not in self._algebra.never:
                for brought in sorted(self._algebra.brings(choice)):
                    self._add_row([(choice + 1, 1.0), (brought, -1.0)], pulp.LpConstraintLE, 0)
        for literals in sorted(self._several()):
            self._add_row([(literal, 1.0) for literal in literals], pulp.LpConstraintEQ, 1)

    def _add_limits(self) -> None:
        """Add rows for all resources wherever one of their lifetimes begins."""
        for resource, segments in zip(self._problem.resources, self._memory.resources, strict=True):
            for position in segments.tops:
                self._add_limited_row(segments.row(position), resource.limit_bytes)

    def _several(self) -> set[tuple[int, ...]]:
        """The option literals of each group of more than two options; twins once."""
        twin = self._algebra.twin
        return {
            tuple(twin[literal - 1] + 1 for literal in literals)
            for _, literals in self._algebra.variables.several()
        }

    def _costs(self) -> list[tuple[pulp.LpVariable, float]]:
        """The cost of each decision, hints included, in units of the objective."""
        algebra, costs = self._algebra, dict[int, float]()
        for index, group in enumerate(self._problem.groups):
            saving = group.options[SAVE]
            for number, option in enumerate(group.options):
                literal = algebra.literal(Literal(index, number))
                if len(group.options) > 2:
                    cost_s = option.time_s + option.hint_s
                elif number == SAVE:
                    continue  # Its hint is in `constant_s`, and is subtracted from the other option.
                else:
                    cost_s = option.time_s + (option.hint_s - saving.hint_s)
                costs[literal] = costs.get(literal, 0.0) + cost_s * self.cost_per_s
        for index, region in enumerate(self._problem.regions):
            costs[algebra.variables.wrapped(index)] = region.wrap_s * self.cost_per_s
        return [(self._variable(literal), cost) for literal, cost in costs.items()]

    def _add_memory_row(self, row: MemoryRow) -> None:
        """Add the row: live bytes at a position <= budget, or <= peak."""
        if self._budget_bytes is None:
            left = self._problem.resident_bytes - row.constant_bytes
            self._add_row([*self._terms(row), (_PEAK, -1.0)], pulp.LpConstraintLE, left / self.unit_bytes)
        else:
            self._add_limited_row(row, self._budget_bytes)

    def _add_limited_row(self, row: MemoryRow, limit_bytes: int) -> None:
        """Add the row: bytes <= limit."""
        left_bytes = _left_bytes(row, limit_bytes)
        if left_bytes < 0:
            self.impossible = True
        elif row.bytes.sum() > left_bytes:
            self._add_row(self._terms(row), pulp.LpConstraintLE, left_bytes / self.unit_bytes + _SLACK)

    def _terms(self, row: MemoryRow) -> list[tuple[int, float]]:
        return list(zip(row.literals.tolist(), (row.bytes / self.unit_bytes).tolist(), strict=True))

    def _add_row(self, terms: Iterable[tuple[int, float]], sense: int, right: float) -> None:
        """Add sum(coefficient * literal) <=, = or >= right, where a negative literal is 1 - its variable."""
        linear = []
        for literal, coefficient in terms:
            if literal < 0:
                right -= coefficient
                coefficient = -coefficient
            linear.append((self._variable(abs(literal)), coefficient))
        self.program.model.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(linear), sense, rhs=right))

    def _variable(self, literal: int) -> pulp.LpVariable:
        """The variable of a positive literal; auxiliary variables are added at first use."""
        if literal not in self._column:
            self._add_variable(literal, f"y{literal}", 1.0)
            for alternative in sorted(map(sorted, self._memory.auxiliary_term(literal))):
                terms = [(literal, 1.0), *((other, -1.0) for other in alternative)]
                self._add_row(terms, pulp.LpConstraintGE, 1 - len(alternative))
        return self.program.variables[self._column[literal]]

    def _add_variable(
        self, literal: int, name: str, upper: float | None, kind: str = pulp.LpContinuous
    ) -> None:
        """Add a column with lower bound 0."""
        self._column[literal] = len(self.program.variables)
        self.program.variables.append(self.program.model.add_variable(name, 0.0, upper, kind))


def _left_bytes(row: MemoryRow, limit_bytes: int) -> int:
    """Bytes that a row's true literals may sum to, rounded down to a multiple of the greatest common divisor."""
    step = int(np.gcd.reduce(row.bytes)) if len(row.bytes) else 1
    return (limit_bytes - row.constant_bytes) // step * step
