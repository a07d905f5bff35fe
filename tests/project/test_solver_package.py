import os
import subprocess
import sys
from pathlib import Path

import autoac_solver

ROOT = Path(__file__).resolve().parents[2]


def test_every_public_name_is_there():
    assert [name for name in autoac_solver.__all__ if not hasattr(autoac_solver, name)] == []


def test_solving_does_not_import_torch():
    code = """
import sys
from autoac_solver.problem.problem import when_saved
from autoac_solver import Condition, Lifetime, Problem, RegionCost, save_or_recompute, minimum_peak, solve
problem = Problem(1, 0, 1.0, (save_or_recompute(0, 1.0),), (RegionCost(),), (Lifetime(8, 0, 1, when_saved(0)),))
print(minimum_peak(problem).peak_bytes, solve(problem, 7).extra_s, "torch" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "solver")}
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("0 1.0 False\n", "")
