"""Everything that autoac raises on purpose; the message is the reader's next step."""

from __future__ import annotations

from collections.abc import Sequence

from autoac_solver.records.format import format_bytes


class AutoacError(Exception):
    """The base of all errors below."""


class BudgetFormatError(AutoacError, ValueError):
    """A budget that cannot be read as an amount of memory."""


class ProfileError(AutoacError):
    """A profile or plan file that is damaged, incomplete, or written by a newer version."""


class PlanMismatchError(AutoacError):
    """A plan applied to something else than it was made for."""


class ProfilingError(AutoacError):
    """The step could not be recorded."""


class ParallelError(AutoacError):
    """A rank has failed, or ranks do not fit together; it is raised on all of them.

    Attributes:
        rank: which rank it came from.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PolicyError(AutoacError, ValueError):
    """A policy that makes no sense, or is about nothing in the profiled step."""


class PolicyConflictError(PolicyError):
    """Two MUSTs about the same value that cannot both be followed, or one that is against the value's nature."""


class AllocatorOptionsError(AutoacError, ValueError):
    """Options of CUDA's caching allocator under which what it reserves cannot be predicted."""


class NoPlanInTimeError(AutoacError):
    """The time limit passed before any plan within the budget was found; there may be one."""


class InfeasibleBudgetError(AutoacError):
    """No plan meets the budget; where it is not `proven`, none was found in time.

    Whoever knows the model fills in `where`, `holders` and `suggestions`; the message is composed when it is read.

    Attributes:
        budget_bytes: what was asked.
        minimum_bytes: the least budget that succeeds: the least peak of any plan, and the headroom; where not `proven`,
            the least found.
        proven: whether nothing below `minimum_bytes` is possible.
        decisions: the plan that reaches `minimum_bytes`, the option of each group.
        peak_position: the position of its peak.
        where: op, module and phase of the peak.
        holders: (kind, module, bytes) of what holds the peak, largest first.
        suggestions: what would lower it.
        headroom_bytes: what the plan had to leave of the budget.
        policies: the user's constraints that the plan had to follow, in words.
        minimum_without_policies_bytes: `minimum_bytes` without them, 0 if there are none, or no time was left for it.
        reserved_for_bytes: where the budget is for reserved memory: what the plan that reserves `minimum_bytes`
            allocates at most; 0 where it is for allocated memory.
    """

    def __init__(
        self,
        budget_bytes: int,
        minimum_bytes: int,
        proven: bool = True,
        decisions: tuple[int, ...] = (),
        peak_position: int = -1,
    ) -> None:
        super().__init__(budget_bytes, minimum_bytes, proven, decisions, peak_position)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes
        self.proven = proven
        self.decisions = decisions
        self.peak_position = peak_position
        self.where = ""
        self.holders: Sequence[tuple[str, str, int]] = ()
        self.suggestions: tuple[str, ...] = ()
        self.headroom_bytes = 0
        self.policies: tuple[str, ...] = ()
        self.minimum_without_policies_bytes = 0
        self.reserved_for_bytes = 0

    def leave(self, headroom_bytes: int) -> None:
        """Make it the answer to a budget of which so much had to be left."""
        self.headroom_bytes += headroom_bytes
        self.budget_bytes += headroom_bytes
        self.minimum_bytes += headroom_bytes
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
                f"  {kind:<12} {module or '-'}  {format_bytes(size)}" for kind, module, size in self.holders
            ]
        return lines

    def _suggestion_lines(self) -> list[str]:
        if not self.suggestions:
            return []
        return ["What would lower it:", *(f"  - {suggestion}" for suggestion in self.suggestions)]


def _exactly(n_bytes: int) -> str:
    """Rounded for the eye, and to the byte, since a byte decides here."""
    return f"{n_bytes} bytes ({format_bytes(n_bytes)})"
