"""Programs that fall apart: part by part they have the results that they have as a whole."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pulp
import pytest

from autoac_solver.optimise import apart
from autoac_solver.optimise.apart import run_apart
from autoac_solver.optimise.backends import Backend, Job, LinearProgram, SolverResult, choose_backend

BLOCKS, SIZE = 3, 4
LINK = BLOCKS * SIZE


class Counted:
    """Counts the columns of the programs that it solves."""

    def __init__(self) -> None:
        self.backend: Backend = choose_backend("auto")
        self.name = self.backend.name
        self.sizes: list[int] = []

    def run(self, job: Job) -> SolverResult:
        self.sizes.append(len(job.program.variables))
        return self.backend.run(job)


def blocks(seed: int, linked: bool) -> tuple[Job, np.ndarray, np.ndarray, np.ndarray]:
    """Independent covering rows, joined by one binary column; the job, its costs, and its rows: A x >= b."""
    draw = np.random.default_rng(seed)
    costs = np.append(draw.integers(1, 9, LINK), draw.integers(-3, 4) if linked else 0).astype(float)
    rows = []
    for block in range(BLOCKS):
        for _ in range(2):
            row = np.zeros(LINK + 1)
            row[block * SIZE : (block + 1) * SIZE] = draw.integers(1, 6, SIZE)
            row[LINK] = draw.integers(-4, 5) if linked else 0
            rows.append(row)
    right = draw.integers(3, 14, len(rows)).astype(float)
    if linked and seed % 3 == 0:  # of the link alone
        rows.append(np.append(np.zeros(LINK), 1.0))
        right = np.append(right, 1.0)
    left = np.array(rows)
    model = pulp.LpProblem("blocks", pulp.LpMinimize)
    columns = [model.add_variable(f"x{i}", 0.0, 1.0, pulp.LpInteger) for i in range(LINK + 1)]
    for row, least in zip(left, right, strict=True):
        terms = [(columns[i], float(row[i])) for i in np.flatnonzero(row)]
        model.addConstraint(
            pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, rhs=float(least))
        )
    model.setObjective(pulp.LpAffineExpression(list(zip(columns, costs, strict=True))))
    job = Job(LinearProgram(model, columns), True, 1e-6, time.monotonic() + 60)
    return job, costs, left, right


def brute_force(costs: np.ndarray, left: np.ndarray, right: np.ndarray) -> float:
    points = np.array(list(product((0, 1), repeat=len(costs))))
    fitting = points[(points @ left.T >= right).all(1)]
    return float((fitting @ costs).min(initial=np.inf))


def feasible() -> tuple[Job, np.ndarray, np.ndarray, np.ndarray]:
    found = (blocks(seed, linked=True) for seed in range(99))
    return next(made for made in found if np.isfinite(brute_force(*made[1:])))


@pytest.mark.parametrize("linked", [False, True])
def test_as_brute_force(linked: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(apart, "_LEAST_COLUMNS", 2)
    found = []
    for seed in range(25):
        job, costs, left, right = blocks(seed, linked)
        expected, backend = brute_force(costs, left, right), Counted()
        outcome = run_apart(backend, job, set(), [LINK])
        assert max(backend.sizes) <= LINK
        if np.isinf(expected):
            assert outcome.status == "infeasible"
            continue
        assert outcome.status == "solved"
        assert outcome.values is not None
        assert (left @ outcome.values >= right - 1e-6).all()
        assert costs @ outcome.values == pytest.approx(expected)
        assert outcome.bound == pytest.approx(expected, abs=1e-3)
        found.append(outcome)
    assert 5 < len(found) < 25  # there are infeasible ones, too


def test_the_start_is_kept_where_time_runs_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(apart, "_LEAST_COLUMNS", 2)
    job, costs, left, right = feasible()
    points = np.array(list(product((0.0, 1.0), repeat=len(costs))))
    start = points[(points @ left.T >= right).all(1)][-1]
    outcome = run_apart(Counted(), replace(job, deadline=time.monotonic() - 1, start=start), set(), [LINK])
    assert outcome.status == "stopped"
    assert outcome.values is not None
    assert (left @ outcome.values >= right - 1e-6).all()
    assert outcome.bound <= brute_force(costs, left, right)


def test_a_part_without_integers_has_its_bound(monkeypatch: pytest.MonkeyPatch):
    """Solvers give no bound of an integer program that has none."""
    monkeypatch.setattr(apart, "_LEAST_COLUMNS", 2)
    job, costs, *_ = feasible()
    for column in job.program.variables[:SIZE]:
        column.cat = pulp.LpContinuous
    outcome = run_apart(Counted(), job, set(), [LINK])
    assert outcome.values is not None
    assert outcome.bound == pytest.approx(costs @ outcome.values, abs=1e-3)


def test_what_does_not_fall_apart_is_solved_as_a_whole():
    job, costs, left, right = feasible()
    backend = Counted()
    outcome = run_apart(backend, job, set(), [LINK])  # its parts are small
    assert backend.sizes == [LINK + 1]
    assert outcome.values is not None
    assert costs @ outcome.values == pytest.approx(brute_force(costs, left, right))
