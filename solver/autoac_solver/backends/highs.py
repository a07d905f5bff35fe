"""HiGHS through PuLP, stopping when it is told to.

What PuLP's own class does differently, and why it is overridden:

- It hands over the model row by row; passing it whole takes a fifth of the time.
- HiGHS overruns its time limit by seconds, ignores Ctrl-C, and refuses to run in a thread that used it with another
  number of threads. So it runs in a fresh thread, is stopped by a callback, and is left behind if it does not hear.
- It reports "Optimal" after a time limit. The status is read from HiGHS itself.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pulp

from autoac_solver.backends.common import GRACE_S, POLL_S, Outcome, Program

try:
    import highspy
except ImportError:  # then CBC does it, see choose_backend
    highspy: Any = None

_THREADS = 1
"""One thread: the same answer on every machine, and the other cores stay free."""


class HighsBackend:
    """HiGHS as a library in this process."""

    def __init__(self) -> None:
        self.name = f"HiGHS {highspy.Highs().version()}"

    def run(
        self, program: Program, *, integer: bool, gap: float, deadline: float, start: np.ndarray | None = None
    ) -> Outcome:
        solver = _Highs(program, integer=integer, gap=gap, deadline=deadline, start=start)
        program.model.solve(solver)
        return solver.outcome


class _Highs(pulp.HiGHS):
    """PuLP's HiGHS with the whole model passed at once, run in a thread that can be stopped, and an honest status."""

    def __init__(
        self, program: Program, *, integer: bool, gap: float, deadline: float, start: np.ndarray | None
    ) -> None:
        self._stop = threading.Event()
        self._deadline = deadline
        self._columns = program.variables
        self._start = start
        self.outcome = Outcome("stopped", None, -np.inf)
        kinds = highspy.cb.HighsCallbackType
        super().__init__(
            mip=integer,
            msg=False,
            gapAbs=gap,
            gapRel=0.0,
            threads=_THREADS,
            timeLimit=max(0.0, deadline - time.monotonic()),
            callbackTuple=(self._interrupt, None),
            callbacksToActivate=[kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt],
        )

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:
        """Pass all columns and rows in one call."""
        index = {variable: i for i, variable in enumerate(self._columns)}
        rows = lp.constraints()
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._columns), len(rows)
        model.col_cost_ = np.array([lp.objective.get(variable, 0.0) for variable in self._columns])
        model.col_lower_ = np.array([_or(variable.lowBound, -np.inf) for variable in self._columns])
        model.col_upper_ = np.array([_or(variable.upBound, np.inf) for variable in self._columns])
        model.row_lower_ = np.array([_or(row.getLb(), -np.inf) for row in rows])
        model.row_upper_ = np.array([_or(row.getUb(), np.inf) for row in rows])
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
        model.a_matrix_.index_ = np.array([index[variable] for row in rows for variable in row], dtype=np.int32)
        model.a_matrix_.value_ = np.array([value for row in rows for value in row.values()], dtype=np.float64)
        if self.mip:
            kinds = {False: highspy.HighsVarType.kContinuous, True: highspy.HighsVarType.kInteger}
            model.integrality_ = [kinds[variable.cat == pulp.LpInteger] for variable in self._columns]
        lp.solverModel.passModel(model)

    def callSolver(self, lp: pulp.LpProblem) -> None:
        """Run in a thread; stop it at the deadline or on Ctrl-C, and leave it behind if it does not stop."""
        thread = threading.Thread(target=self._run, args=(lp.solverModel,), daemon=True)
        thread.start()
        try:
            while thread.is_alive() and time.monotonic() < self._deadline + GRACE_S:
                thread.join(POLL_S)
        finally:
            self._stop.set()
            thread.join(GRACE_S)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        """PuLP's two statuses; the values are in `outcome`."""
        codes = {
            "solved": (pulp.LpStatusOptimal, pulp.LpSolutionOptimal),
            "infeasible": (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible),
            "stopped": (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound),
        }
        return codes[self.outcome.status]

    def _interrupt(self, kind: Any, message: str, data_out: Any, data_in: Any, user_data: Any) -> None:
        """HiGHS asks many times a second whether to go on."""
        if self._stop.is_set() or time.monotonic() > self._deadline:
            data_in.user_interrupt = True

    def _run(self, highs: Any) -> None:
        """What the thread does: solve, and put the result where the caller looks for it."""
        if self._start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = self._start
            highs.setSolution(solution)
        highs.run()
        self.outcome = self._read(highs)
        highspy.Highs.resetGlobalScheduler(False)

    def _read(self, highs: Any) -> Outcome:
        """Status, values and bound; after a stop there may be a solution, with a gap."""
        info, status = highs.getInfo(), highs.getModelStatus()
        known = highspy.HighsModelStatus
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):
            return Outcome("infeasible", None, np.inf)
        values = np.array(highs.getSolution().col_value) if info.primal_solution_status == 2 else None
        if not self.mip:
            solved = status == known.kOptimal
            return Outcome("solved", values, info.objective_function_value) if solved else self.outcome
        return Outcome("solved" if status == known.kOptimal else "stopped", values, info.mip_dual_bound)


def _or(value: float | None, default: float) -> float:
    """`value`, or the default for None."""
    return default if value is None else value
