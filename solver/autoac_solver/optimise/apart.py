"""Integer programs that fall apart, solved part by part.

The micro-batches of a step have no memory row in common, as what one keeps is gone when the next begins. Their
programs are independent but for one decision: whether losses are computed over chunks of rows. Branch and bound closes
the gap of the whole by branching on all parts in turn, whose times multiply. Here the decision that links the parts is
fixed to 0 and to 1, and in both cases each part is solved by itself. The sum of the parts' bounds is a bound of the
case, and the lesser of both cases one of the program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import pulp

from autoac_solver.optimise.backends import INFEASIBLE, Backend, Job, LinearProgram, SolverResult

_LEAST_COLUMNS = 50
"""Smaller parts are solved together."""
_MOST_LINKS = 16
"""Columns that are tried as links."""
_NONE = -1
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class _Row:
    """A row: its columns with their coefficients, its sense and its right-hand side."""

    terms: Mapping[int, float]
    sense: int
    right: float

    def holds(self, values: np.ndarray) -> bool:
        excess = sum(value * values[column] for column, value in self.terms.items()) - self.right
        at_most = self.sense == pulp.LpConstraintGE or excess <= _TOLERANCE
        return at_most and (self.sense == pulp.LpConstraintLE or excess >= -_TOLERANCE)


def run_apart(backend: Backend, job: Job, ignored: AbstractSet[int], links: Sequence[int]) -> SolverResult:
    """Solve an integer program in parts if it falls apart, else as a whole.

    Args:
        ignored: columns that only count others: neither they nor their rows restrict anything.
        links: binary columns without one of which it may fall apart.
    """
    rows = [row for row in _rows(job.program) if ignored.isdisjoint(row.terms)]
    columns = [column for column in range(len(job.program.variables)) if column not in ignored]
    parts = _parts(rows, columns)
    if len(parts) > 1:
        return _solve(backend, job, rows, parts, {})
    without = {link: _parts(rows, [c for c in columns if c != link]) for link in links[:_MOST_LINKS]}
    link = max(without, key=lambda column: len(without[column]), default=_NONE)
    if link == _NONE or len(parts := without[link]) < 2:
        return backend.run(job)
    variable, found = job.program.variables[link], []
    for value in (0.0, 1.0):
        if value in (variable.lowBound, variable.upBound):
            deadline = job.deadline if value else time.monotonic() + job.left_s() / 2
            start = job.start if job.start is not None and round(job.start[link]) == value else None
            case = replace(job, deadline=deadline, start=start)
            found.append(_solve(backend, case, rows, parts, {link: value}))
    return _best(job, found)


def _best(job: Job, cases: list[SolverResult]) -> SolverResult:
    """The result of a program, every solution of which lies in one of these cases."""
    costs, bound = job.program.costs(), min((case.bound for case in cases), default=np.inf)
    values = [case.values for case in cases if case.values is not None]
    if not values:
        return (
            SolverResult("stopped", None, bound) if any(c.status == "stopped" for c in cases) else INFEASIBLE
        )
    best = min(values, key=lambda found: float(costs @ found))
    is_solved = all(case.status != "stopped" for case in cases)
    return SolverResult("solved" if is_solved else "stopped", best, bound)


def _solve(
    backend: Backend, job: Job, rows: list[_Row], parts: list[list[int]], fixed: Mapping[int, float]
) -> SolverResult:
    """Solve all parts, with some columns fixed."""
    costs = job.program.costs()
    weights = [float(np.abs(costs[part]).sum()) for part in parts]
    values, status = np.zeros(len(costs)), "solved"
    for column, value in fixed.items():
        values[column] = value
    if any(row.terms.keys() <= fixed.keys() and not row.holds(values) for row in rows):
        return INFEASIBLE
    bound = float(costs @ values)
    for number, part in enumerate(parts):
        own = replace(
            job,
            program=_program(job.program, rows, part, fixed),
            integer=any(job.program.variables[column].cat == pulp.LpInteger for column in part),
            gap=job.gap * weights[number] / (sum(weights) or 1.0),
            deadline=time.monotonic() + job.left_s() / (len(parts) - number),
            start=None if job.start is None else job.start[part],
        )
        outcome = backend.run(own)
        if outcome.status == "infeasible":
            return INFEASIBLE
        found = outcome.values if outcome.values is not None else own.start
        if found is None:
            return SolverResult("stopped", None, -np.inf)
        values[part] = found
        bound += outcome.bound
        if outcome.status == "stopped":
            status = "stopped"
    return SolverResult("solved" if status == "solved" else "stopped", values, bound)


def _rows(program: LinearProgram) -> list[_Row]:
    index = {variable: column for column, variable in enumerate(program.variables)}
    found = []
    for row in program.model.constraints():
        lower, upper = row.getLb(), row.getUb()
        sense = pulp.LpConstraintGE if upper is None else pulp.LpConstraintLE
        sense = pulp.LpConstraintEQ if lower is not None and upper is not None else sense
        right = lower if upper is None else upper
        assert right is not None
        found.append(_Row({index[variable]: value for variable, value in row.items()}, sense, right))
    return found


def _parts(rows: list[_Row], columns: list[int]) -> list[list[int]]:
    """The columns by what rows connect; small parts are joined."""
    allowed = set(columns)
    root = {column: column for column in columns}

    def find(column: int) -> int:
        while root[column] != column:
            root[column] = root[root[column]]
            column = root[column]
        return column

    for row in rows:
        inside = [column for column in row.terms if column in allowed]
        for column in inside[1:]:
            root[find(column)] = find(inside[0])
    members: dict[int, list[int]] = {}
    for column in columns:
        members.setdefault(find(column), []).append(column)
    large = [part for part in members.values() if len(part) >= _LEAST_COLUMNS]
    small = sorted(column for part in members.values() if len(part) < _LEAST_COLUMNS for column in part)
    return [*large, *([small] if small else [])] if len(large) > 1 else [columns]


def _program(
    program: LinearProgram, rows: list[_Row], part: list[int], fixed: Mapping[int, float]
) -> LinearProgram:
    """The program of a part, in which fixed columns are numbers."""
    model, costs = pulp.LpProblem("part", pulp.LpMinimize), program.costs()
    own = {}
    for column in part:
        variable = program.variables[column]
        own[column] = model.add_variable(variable.name, variable.lowBound, variable.upBound, variable.cat)
    for row in rows:
        terms = [(own[column], value) for column, value in row.terms.items() if column in own]
        if terms:
            right = row.right - sum(value * fixed.get(column, 0.0) for column, value in row.terms.items())
            expression = pulp.LpAffineExpression(terms)
            model.addConstraint(pulp.LpConstraint(expression, row.sense, rhs=right))
    model.setObjective(pulp.LpAffineExpression([(own[column], costs[column]) for column in part]))
    return LinearProgram(model, list(own.values()))
