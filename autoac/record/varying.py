"""Steps that vary between runs: which modules each run of a profile called, and which run is planned for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from autoac.execute.watch.other_calls import outermost
from autoac.record.single_draws import CHANCE, HIGH, LOW
from autoac.record.tape.tape import Tape
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import VARIES

_SHOWN = 4
_WITHOUT_LAYERS = (RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError, ProfilingError)
"""Errors of steps that skip too many layers: no gradients for backward, nothing to stack, no last state."""


@dataclass(frozen=True)
class Run:
    """One run of the step.

    Args:
        outcome: of its single draws.
        calls: names of modules, with the number of the call.
        op_fingerprint: identifies the sequence of ops.
        sizes: identifies the bytes of the tensors that forward makes.
        ops: their number.
        peak_bytes: with everything recomputed.
        numbers: seed of its random numbers; None for those that the user's step would draw.
    """

    outcome: str
    calls: frozenset[tuple[str, int]]
    op_fingerprint: str
    sizes: int
    ops: int
    peak_bytes: int
    numbers: int | None = None


class Runs:
    """The runs of one step, in order.

    Attributes:
        sets_up: the first one also makes what the later ones find, as FSDP2 makes the tensors that it gathers into, and
            an optimizer its state: it is not compared with the others.
        draws: whether single random numbers were drawn in any of them.
        failures: errors of runs that failed with decided draws, by outcome.
    """

    def __init__(self, sets_up: bool = False) -> None:
        self.sets_up = sets_up
        self.all: list[Run] = []
        self.draws = False
        self.failures: dict[str, str] = {}

    def tried(
        self, tape: Tape, run: Callable[[], dict[str, Any]], numbers: int | None = None
    ) -> dict[str, Any] | None:
        """Run a step and add it; None if it fails with decided draws, see NOTE [ Steps that vary ] 5."""
        try:
            tables = run()
        except torch.OutOfMemoryError:
            raise
        except _WITHOUT_LAYERS as error:
            if not tape.single.has_decided:
                raise
            self.draws = True
            self.failures[tape.single.outcome] = f"{type(error).__name__}: {error!s:.100}"
            return None
        self.add(tape, tables, numbers)
        return tables

    def add(self, tape: Tape, tables: Mapping[str, Any], numbers: int | None = None) -> None:
        """Add a finished run; `numbers` as in `Run`."""
        calls = frozenset((call.fqn, call.call) for call in tables["calls"] if call.grad)
        found = Run(
            tape.single.outcome,
            calls,
            tables["op_fingerprint"],
            _sizes(tables),
            len(tables["tape"]),
            _peak_bytes(tables),
            numbers,
        )
        self.all.append(found)
        self.draws = self.draws or tape.single.count > 0

    @property
    def _compared(self) -> list[Run]:
        return self.all[self.sets_up :] or self.all

    @property
    def to_record(self) -> str:
        """Outcome of single draws for the planned step: the one that calls the most modules."""
        decided = [run for run in self.all if run.outcome != CHANCE]
        if not self.draws or not decided:
            return CHANCE
        return max(decided, key=lambda run: (len(run.calls), run.ops)).outcome

    @property
    def numbers_to_record(self) -> int | None:
        """Random numbers of the planned step, as in `Run`; where only sizes vary, those of the largest peak."""
        runs = [run for run in self._compared if run.outcome == self.to_record]
        if len({run.op_fingerprint for run in runs}) != 1 or len({run.sizes for run in runs}) < 2:
            return None
        return max(runs, key=lambda run: run.peak_bytes).numbers

    @property
    def low_adds(self) -> bool:
        """Whether `LOW` calls modules that `HIGH` does not."""
        called = {outcome: self._called(outcome) for outcome in (LOW, HIGH)}
        return not called[LOW] <= called[HIGH]

    def _called(self, outcome: str) -> frozenset[tuple[str, int]]:
        return frozenset().union(*(run.calls for run in self.all if run.outcome == outcome))

    @property
    def varies(self) -> bool:
        """Whether the runs differ in their ops or in the sizes of tensors."""
        return bool(self._on_variation())

    def notes(self) -> tuple[str, ...]:
        """Notes on a step that varies, none for a step that does not. The last run is the recorded one."""
        failed = tuple(
            f"with the {'largest' if outcome == HIGH else 'least'} values of the random numbers that it draws one at a "
            f"time the step fails ({error}), so these were left out"
            for outcome, error in self.failures.items()
        )
        return (*self._on_variation(), *failed)

    def _on_variation(self) -> tuple[str, ...]:
        if len({run.op_fingerprint for run in self._compared}) < 2:
            return self._on_sizes()
        recorded = self.all[-1]
        missing = frozenset().union(*(run.calls for run in self.all)) - recorded.calls
        ops, peaks = [run.ops for run in self._compared], [run.peak_bytes for run in self._compared]
        spread = (
            f"{min(ops)} to {max(ops)} ops in {len(ops)} runs, and with everything recomputed a peak of "
            f"{format_bytes(min(peaks))} to {format_bytes(max(peaks))}"
        )
        if not self.draws:
            return (
                f"{VARIES} with its data ({spread}): planned for one of {recorded.ops} ops. Which ops others "
                "run cannot be known beforehand: leave headroom, and measure with plan.verify(model, sample, steps=10)",
            )
        largest = "with all modules that any of them called"
        if missing:
            largest = (
                f"in which most modules are called; {_some(missing)} came in others only, and their memory is not "
                "planned for: leave headroom, and measure with plan.verify(model, sample, steps=10)"
            )
        return (
            f"{VARIES} with random numbers that it draws one at a time, as for layer drop ({spread}): planned for "
            f"a step {largest}{self._and_sizes(recorded)}",
        )

    def _and_sizes(self, recorded: Run) -> str:
        """The end of the note, if runs of the same ops as the recorded one made tensors of other sizes; else ""."""
        alike = [run for run in self._compared if run.op_fingerprint == recorded.op_fingerprint]
        peaks = [run.peak_bytes for run in alike]
        if len({run.sizes for run in alike}) < 2:
            return ""
        return (
            f". The sizes of its tensors vary, too (a peak of {format_bytes(min(peaks))} to {format_bytes(max(peaks))} "
            f"with the same ops, planned for one of {format_bytes(recorded.peak_bytes)}), and the largest possible is "
            "not known: leave headroom, and measure with plan.verify(model, sample, steps=10)"
        )

    def _on_sizes(self) -> tuple[str, ...]:
        if len({run.sizes for run in self._compared}) < 2:
            return ()
        peaks = [run.peak_bytes for run in self._compared]
        return (
            f"{VARIES} in the sizes of its tensors, as where a length is drawn at random or depends on values (with "
            f"everything recomputed a peak of {format_bytes(min(peaks))} to {format_bytes(max(peaks))} in "
            f"{len(peaks)} runs): planned for one of {format_bytes(self.all[-1].peak_bytes)}. The largest possible "
            "is not known: leave headroom, and measure with plan.verify(model, sample, steps=10)",
        )


def _some(calls: frozenset[tuple[str, int]]) -> str:
    names = outermost({name for name, _ in calls})
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest


def _peak_bytes(tables: Mapping[str, Any]) -> int:
    """The most bytes alive at once, with saved tensors counted only while they are used."""
    events: dict[int, int] = {}
    for storage in tables["storage_table"]:
        events[storage.alloc] = events.get(storage.alloc, 0) + storage.bytes
        events[storage.free] = events.get(storage.free, 0) - storage.bytes
    return max(accumulate(events[tick] for tick in sorted(events)), default=0)


def _sizes(tables: Mapping[str, Any]) -> int:
    storages = tables["storage_table"]
    made = (index for op in tables["tape"] if not op.backward for index in op.creates)
    return hash(tuple(storages[index].bytes for index in made))
