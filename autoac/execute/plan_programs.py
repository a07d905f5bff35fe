"""A plan's programs for the modules of a model."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Iterator

import torch

from autoac.execute.program import Program
from autoac.execute.watch.following import Following
from autoac.step.model import model_fingerprint
from autoac_solver.plan.recorded.peak import peaks_if_saved
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.profile import IN_EVAL, VARYING

_NUMBER = re.compile(r"\d+")


class PlanPrograms:
    """The programs that carry out a plan's decisions, and the report of how they are followed.

    Args:
        record: the plan.
    """

    def __init__(self, record: PlanRecord):
        self._record = record
        self._copies: dict[str, Program] = {}

    @functools.cached_property
    def of_modules(self) -> dict[str, list[Program]]:
        """The programs of each module with something to recompute, one per call.

        Each application of the plan uses the same objects: for new ones, torch.compile would compile again.
        """
        programs: dict[str, list[Program]] = {}
        apart = {child for found in self._record.calls if found.wrapped for child in found.children}
        for found in self._record.calls:
            untouched = Program(found.fqn, (), wrapped=False)
            calls = programs.setdefault(found.fqn, [untouched] * found.calls)
            calls[found.call] = Program(
                *(found.name, found.steps, found.wrapped, self.following, found.point),
                unchecked=not self._record.step.compared,
                inputs=found.inputs,
                cuts=found.cuts,
                children=found.children,
                apart=found.fqn in apart,
            )
        wrapped = {fqn: calls for fqn, calls in programs.items() if any(program.wrapped for program in calls)}
        return wrapped | {
            fqn: [Program(fqn, (), wrapped=False, apart=True)] for fqn in apart - wrapped.keys()
        }

    def alike(self, model: torch.nn.Module) -> dict[str, list[Program]]:
        """Programs for modules that the profiled step did not call (a skipped layer), taken from similar modules.

        Two modules are similar if their names differ in numbers only and their fingerprints are equal. Among the
        programs of similar modules, the one that recomputes the most ops is taken.
        """
        called = set(self._record.step.called)
        known: dict[str, list[str]] = {}
        for fqn in self.of_modules:
            known.setdefault(_NUMBER.sub("*", fqn), []).append(fqn)
        found: dict[str, list[Program]] = {}
        for fqn, module in model.named_modules():
            if fqn in called or not (others := known.get(_NUMBER.sub("*", fqn))):
                continue
            built = model_fingerprint(module)
            alike = [name for name in others if model_fingerprint(model.get_submodule(name)) == built]
            if alike:
                other = max(alike, key=lambda name: max(map(_recomputed, self.of_modules[name])))
                found[fqn] = [self._copied(max(self.of_modules[other], key=_recomputed), other, fqn)]
        return found

    def _copied(self, program: Program, other: str, fqn: str) -> Program:
        """A copy of the program of module `other` for another one; the same object every time, see `of_modules`."""
        if fqn not in self._copies:
            self._copies[fqn] = Program(
                *(fqn, program.names, program.wrapped, self.following, program.point),
                unchecked=not self._record.step.compared,
                inputs=program.inputs,
                cuts=program.cuts,
                children=(f"{fqn}{child.removeprefix(other)}" for child in program.children),
                apart=program.apart,
            )
        return self._copies[fqn]

    @contextlib.contextmanager
    def unlooked(self) -> Iterator[None]:
        """Context in which planned steps do not check recomputed values, because the caller checks the whole step."""
        programs = self.all
        before = [program.unchecked for program in programs]
        for program in programs:
            program.unchecked = False
        try:
            yield
        finally:
            for program, unchecked in zip(programs, before, strict=True):
                program.unchecked = unchecked

    @functools.cached_property
    def following(self) -> Following:
        """Collects ops that the profiled step did not run, from all programs."""
        step = self._record.step
        return Following(
            *(step.sample, VARYING in step.facts, functools.partial(peaks_if_saved, self._record)),
            in_eval=IN_EVAL in step.facts,
        )

    @property
    def all(self) -> tuple[Program, ...]:
        """Every program made so far."""
        return (*itertools.chain.from_iterable(self.of_modules.values()), *self._copies.values())


def _recomputed(program: Program) -> int:
    """Number of ops that the program recomputes."""
    return sum(again for _, again in program.names)
