"""Range checks for all indices, sizes and times of a problem."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autoac_solver.problem.problem import Action, DecisionGroup, Lifetime, Literal, Problem


def validate(problem: Problem) -> None:
    """Reject a problem with an index, size or time out of range, which other code would silently misread.

    Raises:
        ValueError: names the first fault.
    """
    for fault in _faults(problem):
        raise ValueError(fault)


def _faults(problem: Problem) -> Iterator[str]:
    if problem.n_positions < 1 or problem.resident_bytes < 0 or not _is_duration(problem.step_s):
        yield "n_positions must be positive, resident_bytes and step_s must not be negative"
    for index, region in enumerate(problem.regions):
        if not _is_duration(region.wrap_s):
            yield f"region {index}: wrap_s={region.wrap_s} is no duration"
        if not -1 <= region.within < len(problem.regions) or problem.regions[region.within].within >= 0:
            yield f"region {index}: it cannot be within {region.within}"
    for index, work in enumerate(problem.work):
        known = all(_is_known(problem, literal) for literal in work.literals)
        if not (_is_duration(work.host_s) and _is_duration(work.device_s) and known):
            yield f"work {index}: {work} is out of range"
        if not -1 <= work.wrapped < len(problem.regions):
            yield f"work {index}: there is no region {work.wrapped}"
    for index, group in enumerate(problem.groups):
        yield from (f"group {index}: {fault}" for fault in _group_faults(problem, group))
    for index, lifetime in enumerate(problem.lifetimes):
        yield from (f"lifetime {index}: {fault}" for fault in _lifetime_faults(problem, lifetime))
    for resource in problem.resources:
        if resource.limit_bytes < 0:
            yield f"resource {resource.name}: limit_bytes={resource.limit_bytes} is negative"
        for index, lifetime in enumerate(resource.lifetimes):
            for fault in _lifetime_faults(problem, lifetime):
                yield f"resource {resource.name}, lifetime {index}: {fault}"


def _group_faults(problem: Problem, group: DecisionGroup) -> Iterator[str]:
    first = group.options[0] if group.options else None
    if first is None or first.action is Action.RECOMPUTE or first.time_s:
        yield "the first option must be to save, and add no time"
    for option in group.options:
        if not _is_duration(option.time_s):
            yield f"time_s={option.time_s} is no duration"
        if not _is_duration(option.hint_s):
            yield f"hint_s={option.hint_s} is no duration"
        if not all(_is_known(problem, literal) for literal in option.requires):
            yield f"requires={option.requires} names no option of a group"
    if not 0 <= group.region < len(problem.regions):
        yield f"there is no region {group.region}"
    if not -1 <= group.same_as < len(problem.groups):
        yield f"same_as={group.same_as} names no group"
    elif group.same_as >= 0 and len(problem.groups[group.same_as].options) != len(group.options):
        yield f"same_as={group.same_as} names a group with other options"
    if not all(0 <= refusal.option < len(group.options) for refusal in group.refusals):
        yield f"refusals={group.refusals} names an option that is not there"


def _lifetime_faults(problem: Problem, lifetime: Lifetime) -> Iterator[str]:
    if lifetime.bytes < 0 or not 0 <= lifetime.start <= lifetime.end <= problem.n_positions:
        yield f"{lifetime.bytes} bytes over [{lifetime.start}, {lifetime.end})"
    for condition in (lifetime.exists, *(extension.when for extension in lifetime.extensions)):
        known = all(_is_known(problem, literal) for literal in condition.literals)
        if not known or not -1 <= condition.wrapped < len(problem.regions):
            yield f"{condition} names no option of a group, or no region"
    if any(extension.end > problem.n_positions for extension in lifetime.extensions):
        yield "an extension ends after the last position"


def _is_known(problem: Problem, literal: Literal) -> bool:
    groups = problem.groups
    return 0 <= literal.group < len(groups) and 0 <= literal.option < len(groups[literal.group].options)


def _is_duration(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
