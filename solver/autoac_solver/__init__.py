"""The solver side of autoac: problems, plans and what they cost. It does not know torch; see the README beside it."""

from autoac_solver.errors import (
    AutoacError,
    BudgetFormatError,
    InfeasibleBudgetError,
    NoPlanInTimeError,
    PlanMismatchError,
    ProfileError,
    ProfilingError,
)
from autoac_solver.ilp import minimum_peak, solve
from autoac_solver.problem import (
    ALWAYS,
    Condition,
    Holder,
    Instance,
    Problem,
    RegionCost,
    SharedCost,
    Unit,
    validate,
)
from autoac_solver.search import Prepared, Progress
from autoac_solver.simulator import Simulator, Timeline, alive_at, simulate, violations
from autoac_solver.solution import Solution
from autoac_solver.units import format_bytes, format_seconds, parse_bytes

__all__ = [
    "ALWAYS",
    "AutoacError",
    "BudgetFormatError",
    "Condition",
    "Holder",
    "InfeasibleBudgetError",
    "Instance",
    "NoPlanInTimeError",
    "PlanMismatchError",
    "Prepared",
    "Problem",
    "ProfileError",
    "ProfilingError",
    "Progress",
    "RegionCost",
    "SharedCost",
    "Simulator",
    "Solution",
    "Timeline",
    "Unit",
    "alive_at",
    "format_bytes",
    "format_seconds",
    "minimum_peak",
    "parse_bytes",
    "simulate",
    "solve",
    "validate",
    "violations",
]
