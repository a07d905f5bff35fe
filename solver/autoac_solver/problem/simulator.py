"""The referee: live bytes and seconds of given decisions, computed directly from the definitions in `problem`.

It shares no code with the ILP, so neither can hide the other's mistakes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoac_solver.problem.problem import SAVE, Condition, Literal, Problem
from autoac_solver.records.clocks import Lanes, run

Decisions = Sequence[int] | np.ndarray
"""The option of each group. If every group has two options: bool per group, true if recomputed."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Memory and time of the planned step under some decisions.

    Args:
        live_bytes: int64 per position, resident bytes included.
        peak_bytes: the largest of them.
        peak_position: the first position that reaches it.
        extra_s: seconds added to the step.
        hint_s: the penalty in seconds for hints that are not followed.
    """

    live_bytes: np.ndarray
    peak_bytes: int
    peak_position: int
    extra_s: float
    hint_s: float = 0.0

    @property
    def objective_s(self) -> float:
        """The objective of a search."""
        return self.extra_s + self.hint_s


class _Facts:
    """Numbered facts about decisions: an option is taken, an option is not taken, a region is wrapped.

    The last fact is always true; it pads conditions with few literals.
    """

    def __init__(self, problem: Problem) -> None:
        counts = [len(group.options) for group in problem.groups]
        self._first = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._n_options = int(self._first[-1])
        self._n_regions = len(problem.regions)
        self._region = np.array([group.region for group in problem.groups], dtype=np.int64)
        inside = [index for index, region in enumerate(problem.regions) if region.within >= 0]
        self._inside = np.array(inside, dtype=np.int64)
        self._within = np.array([problem.regions[index].within for index in inside], dtype=np.int64)
        self.true = 2 * self._n_options + self._n_regions

    def number(self, literal: Literal) -> int:
        """The number of a literal's fact."""
        option = int(self._first[literal.group]) + literal.option
        return option if literal.positive else self._n_options + option

    def wrapped(self, region: int) -> int:
        """The number of the fact that a region is wrapped."""
        return 2 * self._n_options + region

    def of(self, chosen: np.ndarray) -> np.ndarray:
        """Bool per fact: whether it is true.

        Args:
            chosen: the option of each group.
        """
        taken = np.zeros(self._n_options, dtype=bool)
        taken[self._first[:-1] + chosen] = True
        return np.concatenate([taken, ~taken, self.wrapped_regions(chosen), [True]])

    def wrapped_regions(self, chosen: np.ndarray) -> np.ndarray:
        """Bool per region: any of its groups, or of those in regions within it, is not saved."""
        wrapped = np.zeros(self._n_regions, dtype=bool)
        wrapped[self._region[chosen != SAVE]] = True
        wrapped[self._within[wrapped[self._inside]]] = True
        return wrapped


class _Conditions:
    """Conditions as an array of fact numbers: one column per condition, which holds if all facts in it are true."""

    def __init__(self, conditions: Iterable[Condition], facts: _Facts) -> None:
        rows = [
            [
                *(facts.number(literal) for literal in condition.literals),
                *([facts.wrapped(condition.wrapped)] if condition.wrapped >= 0 else ()),
            ]
            for condition in conditions
        ]
        width = max(map(len, rows), default=0)
        filled = [row + [facts.true] * (width - len(row)) for row in rows]
        self._columns = np.array(filled, dtype=np.int64).reshape(len(rows), width).T

    def hold(self, facts: np.ndarray) -> np.ndarray:
        """Bool per condition: it holds."""
        return np.logical_and.reduce(facts[self._columns], axis=0)

    def mention(self, numbers: Sequence[int]) -> np.ndarray:
        """Bool per condition: it names any of these facts."""
        return np.logical_or.reduce(np.isin(self._columns, numbers), axis=0)

    def part(self, chosen: np.ndarray) -> _Conditions:
        """A subset of the conditions."""
        part = copy.copy(self)
        part._columns = self._columns[:, chosen]
        return part


class Simulator:
    """Simulates one problem for many decisions. The problem is converted to arrays once.

    Args:
        problem: not changed.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._resident_bytes = problem.resident_bytes
        lifetimes, groups = problem.lifetimes, problem.groups
        self._facts = _Facts(problem)
        self._bytes = np.array([i.bytes for i in lifetimes], dtype=np.int64)
        self._start = np.array([i.start for i in lifetimes], dtype=np.int64)
        self._end = np.array([i.end for i in lifetimes], dtype=np.int64)
        self._exists = _Conditions((i.exists for i in lifetimes), self._facts)
        self._extended = np.repeat(np.arange(len(lifetimes)), [len(i.extensions) for i in lifetimes])
        self._extended_to = np.array([e.end for i in lifetimes for e in i.extensions], dtype=np.int64)
        self._extends = _Conditions((e.when for i in lifetimes for e in i.extensions), self._facts)
        self._time_s = _padded([[option.time_s for option in group.options] for group in groups])
        self._hint_s = _padded([[option.hint_s for option in group.options] for group in groups])
        self._wrap_s = np.array([r.wrap_s for r in problem.regions], dtype=np.float64)
        self._host_s = np.array([work.host_s for work in problem.work])
        self._device_s = np.array([work.device_s for work in problem.work])
        self._waits = np.array([work.waits for work in problem.work], dtype=bool)
        self._done = self._facts_of_work()
        self._start_s = self.lanes([SAVE] * len(groups)).end_s if problem.work else 0.0
        self._each = np.arange(len(groups))
        self._n_options = np.array([len(group.options) for group in groups], dtype=np.int64)
        self._refused = self._refused_facts()
        self._requires = _pairs(
            (self._facts.number(Literal(index, number)), self._facts.number(required))
            for index, group in enumerate(groups)
            for number, option in enumerate(group.options)
            for required in option.requires
        )
        self._same = _pairs(
            (index, group.same_as) for index, group in enumerate(groups) if group.same_as >= 0
        )
        self._resources = [
            Simulator(replace(problem, resident_bytes=0, lifetimes=resource.lifetimes, resources=()))
            for resource in problem.resources
        ]

    def _refused_facts(self) -> list[int]:
        refused = (
            Literal(g, r.option) for g, group in enumerate(self.problem.groups) for r in group.refusals
        )
        return [self._facts.number(literal) for literal in refused]

    def _facts_of_work(self) -> np.ndarray:
        """Fact numbers, one column per piece of work: the piece is done if any fact in its column is true."""
        rows = [
            [
                *(self._facts.number(literal) for literal in work.literals),
                *([self._facts.wrapped(work.wrapped)] if work.wrapped >= 0 else ()),
            ]
            or [self._facts.true]
            for work in self.problem.work
        ]
        width = max(map(len, rows), default=0)
        return np.array([row + row[:1] * (width - len(row)) for row in rows], dtype=np.int64).T

    def work_done(self, decisions: Decisions) -> np.ndarray:
        """Bool per piece of `work`: it is done."""
        return np.asarray(self._facts.of(as_options(decisions))[self._done].any(axis=0))

    def lanes(self, decisions: Decisions) -> Lanes:
        """Host and device timelines of the planned step, if the problem has `work`."""
        done = self.work_done(decisions)
        return run(self._host_s[done], self._device_s[done], self._waits[done])

    def simulate(self, decisions: Decisions) -> Timeline:
        """Live bytes at every position, and seconds added to the step.

        Args:
            decisions: the option of each group.
        """
        live_bytes = self.live_bytes(decisions)
        peak = int(np.argmax(live_bytes))
        extra_s, hint_s = self.extra_s(decisions), self.hint_s(decisions)
        return Timeline(live_bytes, int(live_bytes[peak]), peak, extra_s, hint_s)

    def live_bytes(self, decisions: Decisions) -> np.ndarray:
        """Live bytes at every position, int64, resident bytes included."""
        exists, end = self.lives(decisions)
        change = np.zeros(self.problem.n_positions + 1, dtype=np.int64)
        np.add.at(change, self._start[exists], self._bytes[exists])
        np.subtract.at(change, end[exists], self._bytes[exists])
        return self._resident_bytes + np.cumsum(change[:-1])

    def extra_s(self, decisions: Decisions) -> float:
        """Seconds that the options taken and the wrapped regions add to the step.

        If host and device have separate clocks: the seconds by which the step ends later.
        """
        if self.problem.work:
            return max(0.0, self.lanes(decisions).end_s - self._start_s)
        chosen = as_options(decisions)
        taken_s = self._time_s[self._each, chosen][chosen != SAVE]
        return float(taken_s.sum() + self._wrap_s[self._facts.wrapped_regions(chosen)].sum())

    def hint_s(self, decisions: Decisions) -> float:
        """Penalty in seconds for hints that the decisions do not follow."""
        against = self._hint_s[self._each, as_options(decisions)]
        return float(against[against > 0].sum())

    def violations(self, decisions: Decisions) -> list[str]:
        """Rules that decisions break, limits of resources among them. The device's memory is not checked.

        Args:
            decisions: the option of each group.

        Returns:
            One line per broken rule.
        """
        groups = self.problem.groups
        if len(decisions) != len(groups):
            return [f"{len(decisions)} decisions for {len(groups)} groups"]
        chosen = as_options(decisions)
        unknown = np.flatnonzero((chosen < 0) | (chosen >= self._n_options))
        if len(unknown):
            return [f"group {g} has no option {chosen[g]}" for g in unknown]
        if not self._permits(chosen):
            options = chosen.tolist()
            return [
                line for group, option in enumerate(options) for line in self._broken(group, option, options)
            ]
        return list(self._exceeded(chosen))

    def _exceeded(self, chosen: np.ndarray) -> Iterator[str]:
        for resource, simulator in zip(self.problem.resources, self._resources, strict=True):
            peak_bytes = simulator.live_bytes(chosen).max(initial=0)
            if peak_bytes > resource.limit_bytes:
                yield f"{peak_bytes} bytes of {resource.name}, and {resource.limit_bytes} are allowed"

    def _permits(self, chosen: np.ndarray) -> bool:
        """Whether no rule is broken. Vectorized, because searches call it often."""
        facts = self._facts.of(chosen)
        if_taken, required = self._requires
        one, other = self._same
        return not (
            facts[self._refused].any()
            or (facts[if_taken] & ~facts[required]).any()
            or (chosen[one] != chosen[other]).any()
        )

    def _broken(self, index: int, option: int, chosen: list[int]) -> Iterator[str]:
        """Rules that a group breaks."""
        group = self.problem.groups[index]
        for refusal in group.refusals:
            if refusal.option == option:
                yield f"group {index} takes option {option}, which is refused: {refusal.reason}"
        for other, required, positive in group.options[option].requires:
            if (chosen[other] == required) is not positive:
                wants = "" if positive else "not "
                yield f"group {index} takes option {option}, which requires group {other} {wants}to take {required}"
        if group.same_as >= 0 and chosen[group.same_as] != option:
            yield f"groups {index} and {group.same_as} must be decided alike"

    def part(self, chosen: np.ndarray, resident_bytes: int = 0) -> Simulator:
        """A simulator of a subset of the lifetimes.

        Args:
            chosen: bool per lifetime.
            resident_bytes: alive at every position.
        """
        part = copy.copy(self)
        part._resident_bytes = resident_bytes
        part._bytes, part._start, part._end = self._bytes[chosen], self._start[chosen], self._end[chosen]
        part._exists = self._exists.part(chosen)
        extended = chosen[self._extended]
        part._extended = (np.cumsum(chosen) - 1)[self._extended[extended]]
        part._extended_to = self._extended_to[extended]
        part._extends = self._extends.part(extended)
        return part

    def depending_on(self, group: int) -> np.ndarray:
        """Bool per lifetime: it depends on the group's decision."""
        options, facts = range(len(self.problem.groups[group].options)), self._facts
        numbers = [
            facts.number(Literal(group, option, positive)) for option in options for positive in (True, False)
        ]
        region = self.problem.groups[group].region
        numbers.append(facts.wrapped(region))
        if (outer := self.problem.regions[region].within) >= 0:
            numbers.append(facts.wrapped(outer))
        depends = self._exists.mention(numbers)
        depends[self._extended[self._extends.mention(numbers)]] = True
        return depends

    def alive_at(self, decisions: Decisions, position: int) -> np.ndarray:
        """Indices of the lifetimes alive at a position."""
        exists, end = self.lives(decisions)
        return np.flatnonzero(exists & (self._start <= position) & (position < end))

    def lives(self, decisions: Decisions) -> tuple[np.ndarray, np.ndarray]:
        """Per lifetime: whether it exists, and its exclusive end position.

        Args:
            decisions: the option of each group.
        """
        facts = self._facts.of(as_options(decisions))
        extends = self._extends.hold(facts)
        end = self._end.copy()
        np.maximum.at(end, self._extended[extends], self._extended_to[extends])
        return self._exists.hold(facts), end


def as_options(decisions: Decisions) -> np.ndarray:
    """Decisions as an int8 array, one per group."""
    return np.asarray(decisions, dtype=np.int8)


def simulate(problem: Problem, decisions: Decisions) -> Timeline:
    """`Simulator.simulate` for a single use."""
    return Simulator(problem).simulate(decisions)


def alive_at(problem: Problem, decisions: Decisions, position: int) -> np.ndarray:
    """`Simulator.alive_at` for a single use."""
    return Simulator(problem).alive_at(decisions, position)


def violations(problem: Problem, decisions: Decisions) -> list[str]:
    """`Simulator.violations` for a single use."""
    return Simulator(problem).violations(decisions)


def _padded(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Rows of different lengths as a matrix, padded with zeros."""
    matrix = np.zeros((len(rows), max(map(len, rows), default=0)))
    for index, row in enumerate(rows):
        matrix[index, : len(row)] = row
    return matrix


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Pairs as an array of shape (2, pairs)."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T
