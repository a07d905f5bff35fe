"""HiGHS through PuLP, with an enforced time limit.

Problems of PuLP's own class and of HiGHS, and the workarounds here:

- PuLP passes the model row by row; passing it whole takes a fifth of the time.
- HiGHS overruns its time limit by seconds, ignores Ctrl-C, and refuses to run in a thread that used it with another
  number of threads. So it runs in a fresh thread and is stopped by a callback. The thread is abandoned if it does not
  respond: the relaxations inside an integer program obey the time limit, but call no callback.
- PuLP reports "Optimal" after a time limit. The status is read from HiGHS itself.
- PuLP silences HiGHS last, and releases from 1.16 print a banner to stdout if they get a callback before that.
- HiGHS 1.16.0 sometimes proves a plan optimal and returns its starting point instead. If the returned values do not
  have the reported objective, HiGHS runs again without a start.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pulp

from autoac_solver.optimise.backends.common import GRACE_S, INFEASIBLE, STOPPED, Job, SolverResult

try:
    import highspy
except ImportError:  # CBC is used instead, see choose_backend
    highspy: Any = None
else:

    class _Silent(highspy.Highs):
        """HiGHS that prints nothing, not even in its constructor."""

        def __init__(self) -> None:
            super().__init__()
            self._silence()

        def enableCallbacks(self) -> None:
            """Called at the end of the constructor in releases that have callbacks."""
            self._silence()
            super().enableCallbacks()

        def _silence(self) -> None:
            self.setOptionValue("output_flag", False)


_THREADS = 1
"""One thread: the same result on every machine, and the other cores stay free."""
_END_S = 10.0
"""Seconds that process exit waits for abandoned runs."""
_ends: weakref.WeakSet[threading.Event] = weakref.WeakSet()
"""One event per run, set when the run has ended."""


@atexit.register
def _wait_for_left_behind() -> None:
    """Wait for stopping runs: a callback into a finalized interpreter aborts the process."""
    end = time.monotonic() + _END_S
    for ended in list(_ends):
        ended.wait(max(0.0, end - time.monotonic()))


class HighsBackend:
    """HiGHS as a library in this process."""

    def __init__(self) -> None:
        self.name = f"HiGHS {_Silent().version()}"

    def run(self, job: Job) -> SolverResult:
        """See `Backend`."""
        solver = _Highs(job)
        try:
            job.program.model.solve(solver)
        finally:
            # HiGHS holds the callback and through it this object: a cycle through C++, invisible to Python's GC.
            job.program.model.solverModel = None
        return solver.outcome


class _Highs(pulp.HiGHS):
    """PuLP's HiGHS with the model passed whole and a supervised run."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._stop, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.outcome = STOPPED
        super().__init__(mip=job.integer, msg=False)

    def createAndConfigureSolver(self, lp: Any) -> None:
        """Create a silent HiGHS with our limits and the callback that stops it."""
        kinds = highspy.cb.HighsCallbackType
        lp.solverModel = highs = _Silent()
        highs.setCallback(self._interrupt, None)
        for kind in (kinds.kCallbackMipInterrupt, kinds.kCallbackSimplexInterrupt):
            highs.startCallback(kind)
        options = {
            "mip_abs_gap": self._job.gap,
            "mip_rel_gap": 0.0,
            "threads": _THREADS,
            "time_limit": self._job.left_s(),
        }
        for name, value in options.items():
            highs.setOptionValue(name, value)

    def buildSolverModel(self, lp: Any) -> None:
        """Pass all columns and rows in one call."""
        columns, rows = self._job.program.variables, lp.constraints()
        index = {variable: number for number, variable in enumerate(columns)}
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(columns), len(rows)
        model.col_cost_ = self._job.program.costs()
        model.col_lower_ = np.array([_or(variable.lowBound, -np.inf) for variable in columns])
        model.col_upper_ = np.array([_or(variable.upBound, np.inf) for variable in columns])
        model.row_lower_ = np.array([_or(row.getLb(), -np.inf) for row in rows])
        model.row_upper_ = np.array([_or(row.getUb(), np.inf) for row in rows])
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int32)
        matrix.index_ = np.array([index[variable] for row in rows for variable in row], dtype=np.int32)
        matrix.value_ = np.array([value for row in rows for value in row.values()], dtype=np.float64)
        if self._job.integer:
            kinds = {False: highspy.HighsVarType.kContinuous, True: highspy.HighsVarType.kInteger}
            model.integrality_ = [kinds[variable.cat == pulp.LpInteger] for variable in columns]
        lp.solverModel.passModel(model)

    def callSolver(self, lp: Any) -> None:
        """Run in a thread; stop it at the deadline or on Ctrl-C, and abandon it if it does not stop."""
        _ends.add(self._ended)
        threading.Thread(target=self._run, args=(lp.solverModel,), daemon=True).start()
        try:
            # Not Thread.join: if Ctrl-C interrupts it, it takes the thread for ended (bpo-45274).
            self._ended.wait(self._job.left_s() + GRACE_S)
        finally:
            self._stop.set()
            self._ended.wait(GRACE_S)
        if self._error is not None:
            raise self._error

    def findSolutionValues(self, lp: Any) -> tuple[int, int]:
        """The status codes that PuLP expects; our result is in `outcome`."""
        if self.outcome.status == "solved":
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound

    def _interrupt(self, kind: Any, message: str, data_out: Any, data_in: Any, user_data: Any) -> None:
        """Callback that HiGHS calls many times a second to ask whether to continue."""
        if self._stop.is_set() or time.monotonic() > self._job.deadline:
            data_in.user_interrupt = True

    def _run(self, highs: Any) -> None:
        """Thread body: solve and store the result or the exception."""
        try:
            if self._job.start is not None:
                solution = highspy.HighsSolution()
                solution.col_value = self._job.start
                highs.setSolution(solution)
            highs.run()
            self.outcome = self._read(highs)
            if self._returns_another(highs):
                self.outcome = replace(self.outcome, status="stopped")  # The start, with a valid bound.
                highs.clearSolver()
                highs.run()
                if (again := self._read(highs)).status == "solved":
                    self.outcome = again
            highspy.Highs.resetGlobalScheduler(False)
        except BaseException as error:  # The caller's thread raises it.
            self._error = error
        finally:
            self._ended.set()

    def _returns_another(self, highs: Any) -> bool:
        """Whether the returned values do not have the reported optimal objective."""
        if self._job.start is None or highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return False
        found = self._job.program.costs() @ np.array(highs.getSolution().col_value)
        reported = highs.getInfo().objective_function_value
        return not math.isclose(found, reported, rel_tol=1e-6, abs_tol=1e-6)

    def _read(self, highs: Any) -> SolverResult:
        """Status, values and bound. A stopped integer program may have a solution with a gap."""
        info, status = highs.getInfo(), highs.getModelStatus()
        known = highspy.HighsModelStatus
        if status in (known.kInfeasible, known.kUnboundedOrInfeasible):
            return INFEASIBLE
        solved = status == known.kOptimal
        values = np.array(highs.getSolution().col_value) if info.primal_solution_status == 2 else None
        if self._job.integer:
            return SolverResult("solved" if solved else "stopped", values, info.mip_dual_bound)
        return SolverResult("solved", values, info.objective_function_value) if solved else STOPPED


def _or(value: float | None, default: float) -> float:
    """`value`, or the default for None."""
    return default if value is None else value
