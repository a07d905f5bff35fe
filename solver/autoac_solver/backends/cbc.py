"""CBC through PuLP, stopping when it is told to.

PuLP's own class waits for the process without end and leaves it running on Ctrl-C, and it does not read CBC's bound.
So the process is watched here, and its log read.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pulp
from pulp.apis import coin_api

from autoac_solver.backends.common import GRACE_S, Outcome, Program


class CbcBackend:
    """The CBC that comes with PuLP, or one on the path, as a process.

    Args:
        path: its executable.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.name = "CBC"

    def run(
        self, program: Program, *, integer: bool, gap: float, deadline: float, start: np.ndarray | None = None
    ) -> Outcome:
        solver = _Cbc(self._path, program, integer=integer, gap=gap, deadline=deadline, start=start)
        program.model.solve(solver)
        return solver.outcome


class _Cbc(pulp.COIN_CMD):
    """PuLP's CBC with a process that can be stopped, and its bound read from the log."""

    def __init__(
        self, path: str, program: Program, *, integer: bool, gap: float, deadline: float, start: np.ndarray | None
    ) -> None:
        super().__init__(path=path, mip=integer, msg=False)
        self._variables = program.variables
        self._gap = gap
        self._deadline = deadline
        self._start = start
        self.outcome = Outcome("stopped", None, -np.inf)

    def actualSolve(self, lp: pulp.LpProblem, **kwargs: Any) -> int:
        """Write the model, run CBC on it, read what it wrote."""
        with tempfile.TemporaryDirectory(prefix="autoac") as folder:
            files = {name: str(Path(folder, name)) for name in ("model.mps", "start.mst", "solution.txt", "log.txt")}
            names = lp.writeMPS(files["model.mps"], rename=True)
            self._call(self._command(lp, files, names), files["log.txt"])
            self.outcome = self._read(lp, files, names)
        lp.assignStatus(*((1, 1) if self.outcome.status == "solved" else (0, 0)))
        return lp.status

    def _command(self, lp: pulp.LpProblem, files: dict[str, str], names: Any) -> list[str]:
        """CBC's command line."""
        command = [self.path, files["model.mps"]]
        if self._start is not None:
            for variable, value in zip(self._variables, self._start, strict=True):
                variable.setInitialValue(float(value), check=False)
            self.writesol(files["start.mst"], lp, *names[:3])
            command += ["-mips", files["start.mst"]]
        left_s = max(0.01, self._deadline - time.monotonic())
        command += ["-sec", f"{left_s:.3f}", "-timeMode", "elapsed", "-ratio", "0", "-allow", repr(self._gap)]
        command += ["-solve" if self.mip else "-initialSolve", "-printingOptions", "all"]
        return [*command, "-solution", files["solution.txt"]]

    def _call(self, command: list[str], log: str) -> None:
        """Run CBC until it ends or the deadline has passed; it never outlives this call."""
        with open(log, "w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL)
            try:
                process.wait(max(0.0, self._deadline - time.monotonic()) + GRACE_S)
            except subprocess.TimeoutExpired:
                pass  # it is killed below, and no solution file is the answer
            finally:
                process.kill()
                process.wait()

    def _read(self, lp: pulp.LpProblem, files: dict[str, str], names: Any) -> Outcome:
        """Status, values and bound."""
        if not Path(files["solution.txt"]).exists():
            return self.outcome
        status, values, *_, sol_status = self.readsol_MPS(files["solution.txt"], lp, *names[:3])
        if status == pulp.LpStatusInfeasible:
            return Outcome("infeasible", None, np.inf)
        has_solution = sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        # A variable without a row or a cost is not written to the model, and 0 suits it.
        found = np.array([values.get(variable.name, 0.0) for variable in self._variables]) if has_solution else None
        solved = sol_status == pulp.LpSolutionOptimal
        return Outcome("solved" if solved else "stopped", found, self._bound(lp, found, solved, files["log.txt"]))

    def _bound(self, lp: pulp.LpProblem, found: np.ndarray | None, solved: bool, log: str) -> float:
        """The bound that CBC printed; it prints none when it is sure, and then the gap is what it may be off."""
        if printed := re.search(r"^Lower bound:\s*(\S+)", Path(log).read_text(), re.MULTILINE):
            return float(printed[1])
        if not solved or found is None:
            return -np.inf
        costs = np.array([lp.objective.get(variable, 0.0) for variable in self._variables])
        return float(costs @ found) - (self._gap if self.mip else 0.0)


def find_cbc() -> str | None:
    """The CBC on the path if there is one, else the one inside PuLP (up to 3.x; from 4 on `pulp[cbc]` brings it)."""
    bundled = getattr(coin_api, "pulp_cbc_path", None)
    return shutil.which("cbc") or (shutil.which(bundled) if bundled else None)
