"""The referee: counts live bytes and seconds of given decisions, straight from the definition in `problem`.

It shares no code with the ILP, so that neither can hide the other's mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoac_solver.problem import Condition, Problem

Decisions = Sequence[bool] | np.ndarray


@dataclass(frozen=True, slots=True)
class Timeline:
    """What decisions amount to.

    Args:
        live_bytes: int64 per position, resident bytes included.
        peak_bytes: the largest of them.
        peak_position: the first position that reaches it.
        extra_s: seconds added to the step.
        hint_s: what the hints that are not followed count, in seconds.
    """

    live_bytes: np.ndarray
    peak_bytes: int
    peak_position: int
    extra_s: float
    hint_s: float = 0.0

    @property
    def objective_s(self) -> float:
        """What a search minimises."""
        return self.extra_s + self.hint_s


class _Conditions:
    """Many conditions at once: three arrays of indices, -1 for none."""

    def __init__(self, conditions: Iterable[Condition]) -> None:
        literals = [(c.recomputed, c.kept, c.wrapped) for c in conditions]
        self._columns = np.array(literals, dtype=np.int64).reshape(-1, 3).T

    def hold(self, recomputed: np.ndarray, wrapped: np.ndarray) -> np.ndarray:
        """Which of the conditions hold. The appended entry is what index -1 reads: no condition, always true."""
        is_recomputed, is_kept, is_wrapped = (
            np.append(facts, True) for facts in (recomputed, ~recomputed, wrapped)
        )
        r, k, w = self._columns
        return is_recomputed[r] & is_kept[k] & is_wrapped[w]

    def mentions(self, unit: int, region: int) -> np.ndarray:
        """Which of the conditions depend on a unit, or on its region being wrapped."""
        r, k, w = self._columns
        return (r == unit) | (k == unit) | (w == region)

    def part(self, chosen: np.ndarray) -> _Conditions:
        """Some of the conditions."""
        part = copy.copy(self)
        part._columns = self._columns[:, chosen]
        return part


class Simulator:
    """Simulates one problem for many decisions; reads the problem into arrays once.

    Args:
        problem: not changed.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._resident_bytes = problem.resident_bytes
        instances = problem.instances
        self._bytes = np.array([i.bytes for i in instances], dtype=np.int64)
        self._start = np.array([i.start for i in instances], dtype=np.int64)
        self._end = np.array([i.end for i in instances], dtype=np.int64)
        self._exists = _Conditions(i.exists for i in instances)
        self._holder_instance = np.repeat(np.arange(len(instances)), [len(i.holders) for i in instances])
        self._holder_end = np.array([h.end for i in instances for h in i.holders], dtype=np.int64)
        self._holds = _Conditions(h.when for i in instances for h in i.holders)
        self._unit_region = np.array([u.region for u in problem.units], dtype=np.int64)
        self._time_s = np.array([u.time_s for u in problem.units], dtype=np.float64)
        self._hint_s = np.array([u.hint_s for u in problem.units], dtype=np.float64)
        self._wrap_s = np.array([r.wrap_s for r in problem.regions], dtype=np.float64)
        self._shared = [(np.array(s.units, dtype=np.int64), s.time_s) for s in problem.shared]
        units = list(enumerate(problem.units))
        self._must_save = np.array([u.must_save for u in problem.units], dtype=bool)
        self._must_recompute = np.array([u.must_recompute for u in problem.units], dtype=bool)
        self._requires = _pairs((index, other) for index, u in units for other in u.requires)
        self._same = _pairs((index, u.same_as) for index, u in units if u.same_as >= 0)

    def simulate(self, recomputed: Decisions) -> Timeline:
        """Live bytes at every position, and the seconds added.

        Args:
            recomputed: bool per unit.
        """
        live_bytes = self.live_bytes(recomputed)
        peak = int(np.argmax(live_bytes))
        extra_s, hint_s = self.extra_s(recomputed), self.hint_s(recomputed)
        return Timeline(live_bytes, int(live_bytes[peak]), peak, extra_s, hint_s)

    def live_bytes(self, recomputed: Decisions) -> np.ndarray:
        """Live bytes at every position, int64, resident bytes included."""
        exists, end = self.lives(recomputed)
        change = np.zeros(self.problem.n_positions + 1, dtype=np.int64)
        np.add.at(change, self._start[exists], self._bytes[exists])
        np.subtract.at(change, end[exists], self._bytes[exists])
        return self._resident_bytes + np.cumsum(change[:-1])

    def extra_s(self, recomputed: Decisions) -> float:
        """Seconds that the recomputed units, the wrapped regions and what units share add to the step."""
        chosen = np.asarray(recomputed, dtype=bool)
        shared_s = sum(time_s for units, time_s in self._shared if chosen[units].any())
        return float(self._time_s[chosen].sum() + self._wrap_s[self._wrapped(chosen)].sum() + shared_s)

    def hint_s(self, recomputed: Decisions) -> float:
        """What the hints count against these decisions."""
        against = np.where(np.asarray(recomputed, dtype=bool), self._hint_s, -self._hint_s)
        return float(against[against > 0].sum())

    def violations(self, recomputed: Decisions) -> list[str]:
        """What decisions do that they may not; memory is not looked at.

        Args:
            recomputed: bool per unit.

        Returns:
            A line for each broken rule; empty if there is none.
        """
        if len(recomputed) != len(self.problem.units):
            return [f"{len(recomputed)} decisions for {len(self.problem.units)} units"]
        chosen = np.asarray(recomputed, dtype=bool)
        lines = [
            f"unit {unit} is recomputed but must be saved"
            for unit in np.flatnonzero(chosen & self._must_save)
        ]
        lines += [
            f"unit {unit} is not recomputed but must be"
            for unit in np.flatnonzero(~chosen & self._must_recompute)
        ]
        unit, other = self._requires
        lines += [
            f"unit {u} is recomputed but unit {v}, which that requires, is not"
            for u, v in self._requires[:, chosen[unit] & ~chosen[other]].T
        ]
        unit, other = self._same
        lines += [
            f"units {u} and {v} must be decided alike"
            for u, v in self._same[:, chosen[unit] != chosen[other]].T
        ]
        return lines

    def part(self, chosen: np.ndarray, resident_bytes: int = 0) -> Simulator:
        """A simulator of some of the instances only.

        Args:
            chosen: bool per instance.
            resident_bytes: alive at every position.
        """
        part = copy.copy(self)
        part._resident_bytes = resident_bytes
        part._bytes, part._start, part._end = self._bytes[chosen], self._start[chosen], self._end[chosen]
        part._exists = self._exists.part(chosen)
        held = chosen[self._holder_instance]
        part._holder_instance = (np.cumsum(chosen) - 1)[self._holder_instance[held]]
        part._holder_end = self._holder_end[held]
        part._holds = self._holds.part(held)
        return part

    def depending_on(self, unit: int) -> np.ndarray:
        """Which instances' lives depend on a decision: bool per instance."""
        region = self.problem.units[unit].region
        depends = self._exists.mentions(unit, region)
        depends[self._holder_instance[self._holds.mentions(unit, region)]] = True
        return depends

    def alive_at(self, recomputed: Decisions, position: int) -> np.ndarray:
        """Indices of the instances alive at a position."""
        exists, end = self.lives(recomputed)
        return np.flatnonzero(exists & (self._start <= position) & (position < end))

    def _wrapped(self, recomputed: np.ndarray) -> np.ndarray:
        """Bool per region: is any of its units recomputed."""
        wrapped = np.zeros(len(self.problem.regions), dtype=bool)
        wrapped[self._unit_region[recomputed]] = True
        return wrapped

    def lives(self, recomputed: Decisions) -> tuple[np.ndarray, np.ndarray]:
        """For each instance whether it exists, and the position before which it dies.

        Args:
            recomputed: bool per unit.
        """
        chosen = np.asarray(recomputed, dtype=bool)
        wrapped = self._wrapped(chosen)
        holding = self._holds.hold(chosen, wrapped)
        end = self._end.copy()
        np.maximum.at(end, self._holder_instance[holding], self._holder_end[holding])
        return self._exists.hold(chosen, wrapped), end


def simulate(problem: Problem, recomputed: Decisions) -> Timeline:
    """`Simulator.simulate` for a single use."""
    return Simulator(problem).simulate(recomputed)


def alive_at(problem: Problem, recomputed: Decisions, position: int) -> np.ndarray:
    """`Simulator.alive_at` for a single use."""
    return Simulator(problem).alive_at(recomputed, position)


def violations(problem: Problem, recomputed: Decisions) -> list[str]:
    """`Simulator.violations` for a single use."""
    return Simulator(problem).violations(recomputed)


def _pairs(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Two rows: the first ones, the second ones."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T
