"""The exceptions that autoac raises deliberately; each message says what to do next."""

from __future__ import annotations

from collections.abc import Sequence

from autoac_solver.records.format import format_bytes
from autoac_solver.records.names import holder_in_words


class AutoacError(Exception):
    """Base class of all errors of autoac."""


class BudgetFormatError(AutoacError, ValueError):
    """A budget that cannot be read as an amount of memory."""


class ProfileError(AutoacError):
    """A profile or plan file that is damaged, incomplete, or written by another version."""


class OtherFileError(ProfileError):
    """A file is not what was expected.

    Attributes:
        found: the schema in it, the command whose `--json` output it is, or "" if it is none of autoac's files.
        expected: the schema that was expected.
    """

    def __init__(self, message: str, found: str, expected: str) -> None:
        super().__init__(message, found, expected)  # as pickle and copy need it
        self.found, self.expected = found, expected

    def __str__(self) -> str:
        return self.args[0]


class NotCompiledError(ProfileError):
    """A profile has no measured points of compiled regions, which the engine chooses from."""


class StalePlanError(ProfileError):
    """A plan's programs do not give its predictions: the file was changed, or another version counts otherwise."""


class PlanMismatchError(AutoacError):
    """A plan was applied to a model or step that it was not made for."""


class ProfilingError(AutoacError):
    """The step could not be recorded."""


class ParallelError(AutoacError):
    """A rank failed, or ranks are inconsistent; raised on all ranks.

    Attributes:
        rank: the rank that it came from.
        minimum_bytes: the least budget that works, as of `InfeasibleBudgetError`, if no plan fits there; else 0.
    """

    def __init__(self, message: str, rank: int = -1, minimum_bytes: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.minimum_bytes = minimum_bytes


class PolicyError(AutoacError, ValueError):
    """A policy that is invalid, or matches nothing in the profiled step."""


class PolicyConflictError(PolicyError):
    """Two MUST policies on the same value that cannot both be followed, or one that the value itself rules out."""


class AllocatorOptionsError(AutoacError, ValueError):
    """Options of CUDA's caching allocator under which reserved memory cannot be predicted."""


class NoPlanInTimeError(AutoacError):
    """The time limit passed before a plan within the budget was found; one may exist."""


class InfeasibleBudgetError(AutoacError):
    """No plan is within the budget; if neither `proven` nor ruled out by `bound_bytes`, none was found in time.

    Code that knows the model fills in `where`, `holders` and `suggestions`; the message is composed on access.

    Attributes:
        budget_bytes: the requested budget.
        minimum_bytes: the least budget that succeeds: the least peak of any plan plus the headroom; if not `proven`,
            the least found.
        proven: nothing below `minimum_bytes` is possible.
        bound_bytes: nothing below this is possible, headroom included; 0 if nothing is known.
        decisions: the plan that reaches `minimum_bytes`, the option of each group.
        peak_position: the position of its peak.
        where: op, module and phase of the peak.
        holders: (kind, module, bytes) of the live memory at the peak, largest first.
        suggestions: ways to lower the peak.
        headroom_bytes: the part of the budget that must stay free.
        policies: the user's constraints that the plan had to follow, as text.
        minimum_without_policies_bytes: `minimum_bytes` without them; 0 if there are none, or no time was left for it.
        reserved_for_bytes: for a budget of reserved memory, the allocated peak of the plan that reserves
            `minimum_bytes`; 0 for a budget of allocated memory.
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int,
        proven: bool = True,
        decisions: tuple[int, ...] = (),
        peak_position: int = -1,
        bound_bytes: int = 0,
    ) -> None:
        super().__init__(budget_bytes, minimum_bytes, proven, decisions, peak_position, bound_bytes)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.proven = proven
        self.decisions = decisions
        self.peak_position = peak_position
        self.bound_bytes = minimum_bytes if proven else bound_bytes
        self.where = ""
        self.holders: Sequence[tuple[str, str, int]] = ()
        self.suggestions: tuple[str, ...] = ()
        self.headroom_bytes = 0
        self.policies: tuple[str, ...] = ()
        self.minimum_without_policies_bytes = 0
        self.reserved_for_bytes = 0

    def leave(self, headroom_bytes: int) -> None:
        """Add headroom to the error's budget and minimum."""
        self.headroom_bytes += headroom_bytes
        self.budget_bytes += headroom_bytes
        self.minimum_bytes += headroom_bytes
        self.bound_bytes += headroom_bytes if self.bound_bytes else 0
        if self.minimum_without_policies_bytes:
            self.minimum_without_policies_bytes += headroom_bytes

    def __str__(self) -> str:
        return "\n".join(
            [self._headline(), *self._policy_lines(), *self._peak_lines(), *self._suggestion_lines()]
        )

    def _headline(self) -> str:
        asked, least = _exactly(self.budget_bytes), _exactly(self.minimum_bytes - self.headroom_bytes)
        if self.headroom_bytes:
            asked += f" with {_exactly(self.headroom_bytes)} of headroom"
        if self.reserved_for_bytes:
            return (
                f"No plan was found that reserves no more than a budget of {asked}: the least found reserves {least} "
                f"for {_exactly(self.reserved_for_bytes)} allocated, as CUDA's caching allocator is simulated. "
                f"Ask for budget={self.minimum_bytes} or more."
            )
        if self.proven:
            return (
                f"No plan fits a budget of {asked}: the least possible peak is {least}. "
                f"Ask for budget={self.minimum_bytes} or more."
            )
        if self.bound_bytes > self.budget_bytes:
            bound = _exactly(self.bound_bytes - self.headroom_bytes)
            return (
                f"No plan fits a budget of {asked}: every plan's peak is {bound} or more. The least peak found is "
                f"{least}. Ask for budget={self.minimum_bytes} or more, or give more time (time_limit_s) to look for "
                "less."
            )
        return (
            f"No plan for a budget of {asked} was found in the time given; the least peak found is {least}, and a "
            f"lower one was not ruled out. Ask for budget={self.minimum_bytes} or more, or give more time "
            "(time_limit_s)."
        )

    def _policy_lines(self) -> list[str]:
        if not self.policies:
            return []
        line = f"That is with the policies {', '.join(self.policies)}"
        if self.minimum_without_policies_bytes:
            line += f"; without them the least is {_exactly(self.minimum_without_policies_bytes)}"
        return [line + "."]

    def _peak_lines(self) -> list[str]:
        lines = [f"The peak of that plan lies at {self.where}."] if self.where else []
        if self.holders:
            lines.append("It is held by:")
            lines += [
                f"  {kind:<12} {holder_in_words(kind, module)}  {format_bytes(size)}"
                for kind, module, size in self.holders
            ]
        return lines

    def _suggestion_lines(self) -> list[str]:
        if not self.suggestions:
            return []
        return ["What would lower it:", *(f"  - {suggestion}" for suggestion in self.suggestions)]


def _exactly(n_bytes: int) -> str:
    """Exact bytes plus a rounded amount, because a single byte matters here."""
    return f"{n_bytes} bytes ({format_bytes(n_bytes)})"
