"""The solver side of autoac: problems, plans and their costs. It never imports torch; see the README beside it."""

from autoac_solver.optimise.ilp import minimum_peak, solve
from autoac_solver.optimise.search import Prepared, Progress
from autoac_solver.problem.problem import (
    ALWAYS,
    Action,
    Condition,
    DecisionGroup,
    Extension,
    Lifetime,
    Literal,
    Option,
    Problem,
    Refusal,
    RegionCost,
    Resource,
    save_or_recompute,
)
from autoac_solver.problem.simulator import Simulator, Timeline, alive_at, simulate, violations
from autoac_solver.problem.solution import Solution
from autoac_solver.problem.validate import validate
from autoac_solver.records.errors import (
    AutoacError,
    BudgetFormatError,
    InfeasibleBudgetError,
    NoPlanInTimeError,
    PlanMismatchError,
    ProfileError,
    ProfilingError,
)
from autoac_solver.records.units import format_bytes, format_seconds, parse_bytes

__all__ = [
    "ALWAYS",
    "Action",
    "AutoacError",
    "BudgetFormatError",
    "Condition",
    "DecisionGroup",
    "Extension",
    "InfeasibleBudgetError",
    "Lifetime",
    "Literal",
    "NoPlanInTimeError",
    "Option",
    "PlanMismatchError",
    "Prepared",
    "Problem",
    "ProfileError",
    "ProfilingError",
    "Progress",
    "Refusal",
    "RegionCost",
    "Resource",
    "Simulator",
    "Solution",
    "Timeline",
    "alive_at",
    "format_bytes",
    "format_seconds",
    "minimum_peak",
    "parse_bytes",
    "save_or_recompute",
    "simulate",
    "solve",
    "validate",
    "violations",
]
