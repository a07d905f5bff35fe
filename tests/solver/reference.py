"""The definitions of `problem` word for word, slow and without numpy, and exhaustive search over all decisions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autoac_solver.problem.problem import SAVE, Condition, DecisionGroup, Lifetime, Literal, Problem


def is_true(literal: Literal, decisions: Sequence[int]) -> bool:
    """Whether the group takes the option, or does not if that is what the literal says."""
    return (decisions[literal.group] == literal.option) == literal.positive


def holds(problem: Problem, condition: Condition, decisions: Sequence[int]) -> bool:
    """Whether each literal that the condition has is true."""
    if not all(is_true(literal, decisions) for literal in condition.literals):
        return False
    return condition.wrapped == -1 or is_wrapped(problem, condition.wrapped, decisions)


def is_wrapped(problem: Problem, region: int, decisions: Sequence[int]) -> bool:
    """Whether any group of the region is not saved."""
    pairs = zip(problem.groups, decisions, strict=True)
    return any(option != SAVE for group, option in pairs if group.region == region)


def is_alive(problem: Problem, lifetime: Lifetime, decisions: Sequence[int], position: int) -> bool:
    """Whether a lifetime covers a position."""
    ends = [e.end for e in lifetime.extensions if holds(problem, e.when, decisions)]
    lives = lifetime.start <= position < max([lifetime.end, *ends])
    return lives and holds(problem, lifetime.exists, decisions)


def live_bytes(problem: Problem, decisions: Sequence[int]) -> list[int]:
    """Bytes at each position."""
    alive = _alive_bytes(problem, problem.lifetimes, decisions)
    return [problem.resident_bytes + n_bytes for n_bytes in alive]


def _alive_bytes(problem: Problem, lifetimes: Sequence[Lifetime], decisions: Sequence[int]) -> list[int]:
    return [
        sum(i.bytes for i in lifetimes if is_alive(problem, i, decisions, position))
        for position in range(problem.n_positions)
    ]


def extra_s(problem: Problem, decisions: Sequence[int]) -> float:
    """Seconds added to the step."""
    pairs = zip(problem.groups, decisions, strict=True)
    options_s = sum(group.options[option].time_s for group, option in pairs)
    wraps_s = (r.wrap_s for k, r in enumerate(problem.regions) if is_wrapped(problem, k, decisions))
    return options_s + sum(wraps_s)


def hint_s(problem: Problem, decisions: Sequence[int]) -> float:
    """What the hints count that are not followed."""
    pairs = zip(problem.groups, decisions, strict=True)
    return sum(group.options[option].hint_s for group, option in pairs)


def permitted(problem: Problem, decisions: Sequence[int]) -> bool:
    """Whether no rule is broken."""
    for group, option in zip(problem.groups, decisions, strict=True):
        if any(refusal.option == option for refusal in group.refusals):
            return False
        if not all(is_true(literal, decisions) for literal in group.options[option].requires):
            return False
        if group.same_as != -1 and decisions[group.same_as] != option:
            return False
    return all(
        max(_alive_bytes(problem, resource.lifetimes, decisions)) <= resource.limit_bytes
        for resource in problem.resources
    )


@dataclass(frozen=True)
class Choice:
    """One row of the exhaustive table."""

    decisions: tuple[int, ...]
    peak_bytes: int
    extra_s: float
    objective_s: float


def _options(group: DecisionGroup) -> list[int]:
    refused = {refusal.option for refusal in group.refusals}
    return [option for option in range(len(group.options)) if option not in refused]


def all_choices(problem: Problem, peak_bytes) -> list[Choice]:
    """Every permitted decision; `peak_bytes` counts its peak."""
    decisions = itertools.product(*map(_options, problem.groups))
    return [
        Choice(d, peak_bytes(d), extra_s(problem, d), extra_s(problem, d) + hint_s(problem, d))
        for d in decisions
        if permitted(problem, d)
    ]
