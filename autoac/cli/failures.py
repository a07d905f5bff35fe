"""Errors as shown to users: one line, details, a hint, and an exit code."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

from autoac.cli.users_code import TargetError, where_in
from autoac_solver.records.errors import (
    AutoacError,
    BudgetFormatError,
    InfeasibleBudgetError,
    NoPlanInTimeError,
    NotCompiledError,
    OtherFileError,
    PlanMismatchError,
)
from autoac_solver.records.format import format_bytes
from autoac_solver.records.names import holder_in_words
from autoac_solver.records.plan import SCHEMA as PLAN_SCHEMA
from autoac_solver.records.profile.profile import SCHEMA as PROFILE_SCHEMA

_WRITERS = {
    "profile": ("-o profile.json", "profile"),
    "plan": ("-o plan.json", "plan"),
    "tradeoff": ("-o curve.json", "curve"),
}
_CHECKS = (
    "autoac.api.checks",
    "autoac_solver.plan.planning",
    "autoac_solver.plan.reserved",
    "autoac_solver.records.arguments",
)
"""Modules whose ValueErrors are about arguments."""
ERROR, USAGE, INFEASIBLE, NO_PLAN_IN_TIME = 1, 2, 3, 4


@dataclass(frozen=True)
class Failure:
    """An error, as it is shown.

    Args:
        kind: for programs: "infeasible_budget", "no_plan_in_time", "usage" or "error".
        line: what went wrong.
        hint: what to do, "" if unknown.
        details: more lines.
        is_unexpected: it was not raised on purpose, so a traceback may help.
        data: further fields for programs.
    """

    exit_code: int
    kind: str
    line: str
    hint: str = ""
    details: tuple[str, ...] = ()
    is_unexpected: bool = False
    data: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain data; kind, message, hint and exit_code are always there."""
        return {
            "kind": self.kind,
            "message": self.line,
            "hint": self.hint,
            "exit_code": self.exit_code,
            **self.data,
        }


def understand(error: Exception) -> Failure:
    """Translate an exception for the user of a command."""
    if hasattr(error, "format_message"):
        return _usage(error)
    if isinstance(error, InfeasibleBudgetError):
        return _infeasible(error)
    if isinstance(error, NoPlanInTimeError):
        hint = "Give the solver more seconds (`autoac plan` has --time-limit), or a larger --budget."
        return Failure(NO_PLAN_IN_TIME, "no_plan_in_time", _first_sentences(error), hint)
    if isinstance(error, BudgetFormatError):
        return Failure(USAGE, "usage", str(error))
    if isinstance(error, TargetError):
        return Failure(ERROR, "error", error.line, error.hint, is_unexpected=error.__cause__ is not None)
    if isinstance(error, AutoacError):
        return Failure(ERROR, "error", str(error), _hint_for(error))
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _missing(error.name)
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return Failure(ERROR, "error", f"{where}{error.strerror}")
    if type(error) is ValueError and _is_about_arguments(error):
        return Failure(USAGE, "usage", str(error))
    line = f"{type(error).__name__}{where_in(error)}: {str(error).strip() or 'no message'}".split("\n")[0]
    return Failure(ERROR, "error", line, _own_note(error), is_unexpected=True)


def _is_about_arguments(error: Exception) -> bool:
    """Whether one of our checks of arguments has raised it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__") in _CHECKS


def _own_note(error: Exception) -> str:
    """Our note on a model's own error, added while its step was recorded."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("autoac: ")]
    return notes[0].removeprefix("autoac: ") if notes else ""


def _infeasible(error: InfeasibleBudgetError) -> Failure:
    asked, least = format_bytes(error.budget_bytes), format_bytes(error.minimum_bytes - error.headroom_bytes)
    if error.headroom_bytes:
        asked += f" with {format_bytes(error.headroom_bytes)} of headroom"
    if error.reserved_for_bytes:
        said = (
            f"No plan was found that reserves no more than a budget of {asked}: the least found reserves {least} for "
            f"{format_bytes(error.reserved_for_bytes)} allocated."
        )
    elif error.proven:
        said = f"No plan fits a budget of {asked}: the least possible peak is {least}."
    elif error.bound_bytes > error.budget_bytes:
        bound = format_bytes(error.bound_bytes - error.headroom_bytes)
        said = f"No plan fits a budget of {asked}: every plan's peak is {bound} or more. The least found is {least}."
    else:
        said = (
            f"No plan for a budget of {asked} was found in the time given; the least peak found is {least}."
        )
    details = []
    if error.where:
        details.append(f"That peak lies at {error.where}. It is held by:")
        details += [
            f"  {kind:<11} {format_bytes(size):>24}  {holder_in_words(kind, module)}"
            for kind, module, size in error.holders
        ]
    if error.suggestions:
        details += ["What would lower it:", *(f"  - {suggestion}" for suggestion in error.suggestions)]
    if error.policies:
        least = error.minimum_without_policies_bytes
        without = f"; without them the least is {format_bytes(least)}" if least else ""
        details += [
            f"Policies that have to be followed{without}:",
            *(f"  - {text}" for text in error.policies),
        ]
    return Failure(
        INFEASIBLE,
        "infeasible_budget",
        said,
        f"--budget {error.minimum_bytes} or more works.",
        tuple(details),
        data={
            "budget_bytes": error.budget_bytes,
            "minimum_bytes": error.minimum_bytes,
            "headroom_bytes": error.headroom_bytes,
            "proven": error.proven,
            "bound_bytes": error.bound_bytes,
            "where": error.where,
            "holders": [dict(zip(("kind", "module", "bytes"), row, strict=True)) for row in error.holders],
            "suggestions": list(error.suggestions),
            "policies": list(error.policies),
            "minimum_without_policies_bytes": error.minimum_without_policies_bytes or None,
        },
    )


def _hint_for(error: AutoacError) -> str:
    if isinstance(error, PlanMismatchError):
        return "`autoac plan MODEL --budget ... -o plan.json` makes a plan for the model as it is."
    if isinstance(error, NotCompiledError):
        return "`autoac profile MODEL --engine compile -o profile.json` records one."
    if isinstance(error, OtherFileError):
        return _hint_for_file(error)
    return ""


def _hint_for_file(error: OtherFileError) -> str:
    if (error.found, error.expected) == (PROFILE_SCHEMA, PLAN_SCHEMA):
        return "This is a profile: `autoac plan FILE --budget ... -o plan.json` makes a plan of it."
    if error.found in _WRITERS:
        option, made = _WRITERS[error.found]
        return f"--json prints results only: `autoac {error.found} ... {option}` writes the {made} that is read here."
    return "`autoac profile` and `autoac plan` write the files that are read here."


def _usage(error: Any) -> Failure:
    """Typer's message about the command line."""
    line = " ".join(str(error.format_message()).split())
    command = error.ctx.command_path if getattr(error, "ctx", None) else "autoac"
    return Failure(error.exit_code, "usage", line, f"`{command} --help` says what is possible.")


def _missing(name: str) -> Failure:
    hints = {
        "torch": "A model needs torch. plan, tradeoff and report also take files that `autoac profile` and "
        "`autoac plan` wrote, and then do without.",
        "matplotlib": "Pictures need it: pip install 'autoac[plot]'.",
    }
    library = name.partition(".")[0]
    line = f"{library if library in hints else name} is not installed here."
    return Failure(ERROR, "error", line, hints.get(library, ""), is_unexpected=library not in hints)


def _first_sentences(error: Exception) -> str:
    """The message without its advice, which is in terms of Python's arguments."""
    return str(error).partition(" Give more time")[0]
