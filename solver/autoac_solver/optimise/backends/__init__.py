"""The supported integer programming solvers."""

from __future__ import annotations

from autoac_solver.optimise.backends.cbc import CbcBackend, find_cbc
from autoac_solver.optimise.backends.common import (
    INFEASIBLE,
    STOPPED,
    Backend,
    Job,
    LinearProgram,
    SolverResult,
)
from autoac_solver.optimise.backends.highs import HighsBackend, highspy
from autoac_solver.records.errors import AutoacError

__all__ = ["INFEASIBLE", "STOPPED", "Backend", "Job", "SolverResult", "LinearProgram", "choose_backend"]


def choose_backend(solver: str) -> Backend:
    """The backend of a name: "highs", "cbc", or "auto" for HiGHS if it is installed, else CBC.

    Raises:
        ValueError: unknown name.
        AutoacError: the solver is not installed.
    """
    if solver not in ("auto", "highs", "cbc"):
        raise ValueError(f'solver={solver!r}: choose "auto", "highs" or "cbc"')
    if solver != "cbc" and highspy is not None:
        return HighsBackend()
    if solver != "highs" and (path := find_cbc()) is not None:
        return CbcBackend(path)
    wanted = "neither HiGHS nor CBC is" if solver == "auto" else f"{solver} is not"
    raise AutoacError(f"{wanted} installed: pip install highspy")
