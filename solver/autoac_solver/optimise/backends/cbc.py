"""CBC through PuLP, with an enforced time limit.

PuLP's own class waits for the process indefinitely, leaves it running on Ctrl-C, and does not read CBC's bound. This
class supervises the process and parses its log.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pulp
from pulp.apis import coin_api

from autoac_solver.optimise.backends.common import GRACE_S, INFEASIBLE, STOPPED, Job, SolverResult


class CbcBackend:
    """CBC as a subprocess.

    Args:
        path: CBC's executable.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.name = "CBC"

    def run(self, job: Job) -> SolverResult:
        """See `Backend`."""
        solver = _Cbc(self._path, job)
        job.program.model.solve(solver)
        return solver.outcome


@dataclass(frozen=True, slots=True)
class _Files:
    """Files exchanged with the process."""

    model: Path
    start: Path
    solution: Path
    log: Path


class _Cbc(pulp.COIN_CMD):
    """PuLP's CBC with a supervised process and its bound."""

    def __init__(self, path: str, job: Job) -> None:
        super().__init__(path=path, mip=job.integer, msg=False)
        self._job = job
        self.outcome = STOPPED

    def actualSolve(self, lp: pulp.LpProblem, **kwargs: Any) -> int:
        """Write the model, run CBC, read its solution."""
        with tempfile.TemporaryDirectory(prefix="autoac") as folder:
            files = _Files(*(Path(folder, name) for name in ("model.mps", "start", "solution", "log")))
            names = lp.writeMPS(str(files.model), rename=True)[:3]
            if self._call(self._command(lp, files, names), files.log):
                self.outcome = self._read(lp, files, names)
        return pulp.LpStatusOptimal if self.outcome.status == "solved" else pulp.LpStatusNotSolved

    def _command(self, lp: pulp.LpProblem, files: _Files, names: Any) -> list[str]:
        """CBC's command line."""
        command = [self.path, str(files.model)]
        if self._job.start is not None:
            for variable, value in zip(self._job.program.variables, self._job.start, strict=True):
                variable.setInitialValue(float(value), check=False)
            self.writesol(str(files.start), lp, *names)
            command += ["-mips", str(files.start)]
        command += ["-sec", f"{self._job.left_s() + 0.01:.2f}", "-timeMode", "elapsed"]
        command += ["-ratio", "0", "-allow", repr(self._job.gap)]
        command += ["-solve" if self._job.integer else "-initialSolve", "-printingOptions", "all"]
        return [*command, "-solution", str(files.solution)]

    def _call(self, command: list[str], log: Path) -> bool:
        """Run CBC, kill it if it is late, and return whether it succeeded. It never outlives this call."""
        with log.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
            try:
                return process.wait(self._job.left_s() + GRACE_S) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                process.kill()
                process.wait()

    def _read(self, lp: pulp.LpProblem, files: _Files, names: Any) -> SolverResult:
        """Status, values and bound."""
        if not files.solution.exists():
            return STOPPED
        status, values, *_, sol_status = self.readsol_MPS(str(files.solution), lp, *names)
        if status == pulp.LpStatusInfeasible:
            # CBC reports feasible programs as infeasible if it runs out of time in preprocessing.
            return INFEASIBLE if self._job.left_s() else STOPPED
        if sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return STOPPED
        # Variables without a row or a cost are not written to the model; 0 is feasible for them.
        found = np.array([values.get(variable.name, 0.0) for variable in self._job.program.variables])
        solved = sol_status == pulp.LpSolutionOptimal
        return SolverResult("solved" if solved else "stopped", found, self._bound(found, solved, files.log))

    def _bound(self, found: np.ndarray, solved: bool, log: Path) -> float:
        """The bound in CBC's log. A finished CBC prints none; its solution is then within the gap."""
        if printed := re.search(r"^Lower bound:\s*(\S+)", log.read_text(), re.MULTILINE):
            return float(printed[1])
        gap = self._job.gap if self._job.integer else 0.0
        return float(self._job.program.costs() @ found) - gap if solved else -np.inf


def find_cbc() -> str | None:
    """The CBC on the PATH, else the one bundled with PuLP (up to 3.x; from 4 on `pulp[cbc]` installs it), else None."""
    bundled = getattr(coin_api, "pulp_cbc_path", None)
    return shutil.which("cbc") or (shutil.which(bundled) if bundled else None)
