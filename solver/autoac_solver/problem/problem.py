"""The problem that the integer program solves and the simulator judges: decision groups and lifetimes.

A *decision group* holds the values of a region that common ops write (an op and the in-place ops after it; an op with
several outputs), or the log-probabilities of losses. It takes one of its *options*. The first option always saves: none
of the group's ops run again. Reports call it *save* if the value is needed later and *skip* if it is not; the problem
does not distinguish the two, because whatever needs a value keeps it alive. A region is *wrapped* if any of its groups
takes another option: the engine then runs it. Where regions are compiled, each region is one group, its options are the
points at which it can be compiled, and the first is the fastest.

A *literal* says that a group takes an option, or that it does not; a *condition* is a conjunction of literals. A
*lifetime* is one allocation, alive over [start, end) on the axis of positions if its condition `exists` holds.
*Extensions* prolong it: it lives until the largest end among its own and those of the extensions whose condition
holds. A position is one op of the planned step: forward ops, then backward ops with each region's replay inserted where
the region's backward begins. Live bytes at a position are the resident bytes plus the bytes of every lifetime there; an
op's hidden workspace is a lifetime of length one. Lifetimes in other memory than the device's belong to a *resource*,
which has a limit of its own.

Engines differ only in the groups, lifetimes, extensions and costs that they produce, see `build.engines`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple


class Action(StrEnum):
    """The effect of an option on a group's values."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    COMPILED = "compiled"


SAVE, RECOMPUTE = 0, 1
"""Indices of the options of `save_or_recompute`. `SAVE` is the first option of every group."""


class Literal(NamedTuple):
    """A group takes an option (`positive`), or does not."""

    group: int
    option: int
    positive: bool = True


@dataclass(frozen=True, slots=True)
class Condition:
    """A conjunction of literals; the empty one is always true.

    Args:
        literals: all of them must hold.
        wrapped: index of a region that must be wrapped, -1 for none.
    """

    literals: tuple[Literal, ...] = ()
    wrapped: int = -1

    def __and__(self, other: Condition) -> Condition:
        """The conjunction of both. They must not name different wrapped regions."""
        assert self.wrapped < 0 or other.wrapped in (-1, self.wrapped)
        literals = (*self.literals, *(literal for literal in other.literals if literal not in self.literals))
        return Condition(literals, max(self.wrapped, other.wrapped))


ALWAYS = Condition()


def when_saved(group: int) -> Condition:
    """The condition that none of the group's ops run again."""
    return Condition((Literal(group, SAVE),))


def when_recomputed(group: int) -> Condition:
    """The condition that a group of two options is recomputed."""
    return Condition((Literal(group, RECOMPUTE),))


def when_wrapped(region: int) -> Condition:
    """The condition that the region is wrapped."""
    return Condition(wrapped=region)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a group.

    Args:
        action: its effect.
        time_s: seconds that it adds to the step, the engine's bookkeeping for its ops included.
        hint_s: penalty of a hint in seconds. It is part of the objective, not of the reported time.
        requires: literals of other groups that must hold if it is taken (its ops read their value before the last
            write, or a policy forbids keeping them for it).
    """

    action: Action
    time_s: float = 0.0
    hint_s: float = 0.0
    requires: tuple[Literal, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an option of a group must not be taken."""

    option: int
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionGroup:
    """Values that are decided together.

    Args:
        region: index of its region.
        options: at least one; the first saves (or is a compiled region's fastest), and adds no time.
        refusals: options that must not be taken.
        same_as: index of a group that must be decided alike, -1 for none.
        ops: indices of the profile's ops that run again if it is recomputed.
    """

    region: int
    options: tuple[Option, ...]
    refusals: tuple[Refusal, ...] = ()
    same_as: int = -1
    ops: tuple[int, ...] = ()

    def permits(self, option: int) -> bool:
        """Whether the group does not refuse an option; other groups may still rule it out."""
        return all(refusal.option != option for refusal in self.refusals)

    @property
    def must_save(self) -> bool:
        """Whether every option but the first is refused."""
        refused = {refusal.option for refusal in self.refusals}
        return bool(refused) and refused.issuperset(range(1, len(self.options)))

    @property
    def must_not_save(self) -> bool:
        """Whether the first option is refused."""
        return not self.permits(SAVE)

    @property
    def reason(self) -> str:
        """Why it must be saved; "" if it need not be."""
        return next((r.reason for r in self.refusals if r.option != SAVE), "") if self.must_save else ""

    @property
    def recompute_s(self) -> float:
        """Seconds that recomputing it adds to the step; 0 if no option recomputes it."""
        return next((option.time_s for option in self.options if option.action is Action.RECOMPUTE), 0.0)

    def refusing(self, option: int, reason: str) -> DecisionGroup:
        """A copy of the group with one option refused."""
        return replace(self, refusals=(*self.refusals, Refusal(option, reason)))

    def requiring(self, option: int, literals: Iterable[Literal]) -> DecisionGroup:
        """A copy of the group in which an option requires more literals."""
        options = list(self.options)
        options[option] = replace(options[option], requires=(*options[option].requires, *literals))
        return replace(self, options=tuple(options))

    def hinted(self, hint_s: float) -> DecisionGroup:
        """A copy of the group with a hint.

        Args:
            hint_s: positive: a penalty on every option but the first. Negative: a penalty of -hint_s on the first.
        """
        saving = replace(self.options[SAVE], hint_s=max(0.0, -hint_s))
        others = (replace(option, hint_s=max(0.0, hint_s)) for option in self.options[1:])
        return replace(self, options=(saving, *others))


_SAVED = Option(Action.SAVE)


def save_or_recompute(
    region: int,
    time_s: float,
    *,
    requires: Iterable[int] = (),
    must_save: str = "",
    must_recompute: str = "",
    same_as: int = -1,
    ops: tuple[int, ...] = (),
) -> DecisionGroup:
    """A group of two options.

    Args:
        region, same_as, ops: of the group.
        time_s: seconds that recomputing it adds to the step.
        requires: groups that must be recomputed if this one is.
        must_save, must_recompute: why the other option is refused; "" if it is not.
    """
    again = Option(Action.RECOMPUTE, time_s, requires=tuple(Literal(other, RECOMPUTE) for other in requires))
    refusals = ((RECOMPUTE, must_save), (SAVE, must_recompute))
    refused = tuple(Refusal(option, reason) for option, reason in refusals if reason)
    return DecisionGroup(region, (_SAVED, again), refused, same_as, ops)


@dataclass(frozen=True, slots=True)
class Extension:
    """Keeps an allocation alive up to `end` (exclusive position) if `when` holds."""

    end: int
    when: Condition = ALWAYS


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One allocation.

    Args:
        bytes: its size.
        start, end: alive at positions start <= p < end if it exists.
        exists: the condition under which it is allocated.
        extensions: may prolong it beyond `end`.
        storage: index of the profile's storage, -1 for workspace and random-number states.
        call: index of the profile's module call whose compiled code keeps it for backward, -1 for all else.
    """

    bytes: int
    start: int
    end: int
    exists: Condition = ALWAYS
    extensions: tuple[Extension, ...] = ()
    storage: int = -1
    call: int = -1


@dataclass(frozen=True, slots=True)
class Resource:
    """Memory other than the device's, with a limit of its own: the host's, for values that are moved there.

    Args:
        name: for messages.
        limit_bytes: most bytes alive at any position.
        lifetimes: allocations in it.
    """

    name: str
    limit_bytes: int
    lifetimes: tuple[Lifetime, ...]


@dataclass(frozen=True, slots=True)
class RegionCost:
    """A region, and the seconds that wrapping it adds to the step (paid once if any of its groups is not saved).

    Args:
        within: index of a region that is wrapped if this one is, -1 for none.
    """

    wrap_s: float = 0.0
    name: str = ""
    within: int = -1


@dataclass(frozen=True, slots=True)
class Work:
    """Host and device time of one piece of the step, see `records.clocks`.

    Args:
        host_s, device_s: seconds.
        waits: the host waits for the device to finish it.
        literals: it is done if any of these holds, or the region of `wrapped` is wrapped. Without literals and with
            `wrapped` -1 it is always done.
        wrapped: index of a region, -1 for none.
    """

    host_s: float
    device_s: float
    waits: bool = False
    literals: tuple[Literal, ...] = ()
    wrapped: int = -1


@dataclass(frozen=True)
class Problem:
    """Decision groups, and the lifetimes and costs that depend on them.

    Args:
        n_positions: length of the axis.
        resident_bytes: alive at every position under all decisions.
        step_s: seconds of the step with nothing recomputed.
        groups, regions: see their classes.
        lifetimes: allocations on the device, whose memory the budget limits.
        position_op: per position the profile's op that runs there (for reports); may be empty in tests.
        position_replayed: per position whether it is a replay of that op; may be empty in tests.
        work: the pieces of the step in order, if host and device have separate clocks. Decisions then add as many
            seconds as they delay the step's end. The seconds of options and regions are prices for the integer program,
            which must not exceed that delay, see NOTE [ Prices of one path ].
        resources: other memory with limits of its own, constraints like the budget.
    """

    n_positions: int
    resident_bytes: int
    step_s: float
    groups: tuple[DecisionGroup, ...]
    regions: tuple[RegionCost, ...]
    lifetimes: tuple[Lifetime, ...]
    position_op: tuple[int, ...] = field(default=(), repr=False)
    position_replayed: tuple[bool, ...] = field(default=(), repr=False)
    work: tuple[Work, ...] = field(default=(), repr=False)
    resources: tuple[Resource, ...] = field(default=(), repr=False)
