"""`autoac.auto` on several ranks: they settle on one plan, or all raise the same error.

NOTE [ One loop on several ranks ]
  1. Each rank records its own step, without collectives that the loop does not have. A rank that records announces it
     beforehand, and all meet when the next step begins; see `autoac.ranks.meetings`.
  2. There they compare their newly recorded step, or the plan on their model. The step that keeps the most bytes is
     planned for, by the rank that has it, and all put that plan on: that of another rank, if its step would exceed the
     budget. So a rank that meets a larger batch later records that step alone, and the others join in the next one.
  3. If one rank fails, all raise its error, and take their plans off. That no plan fits is such an error in the first
     steps only; later, all go on under the plan of the least peak.
  4. Rank 0 reads and writes the plan's file.
  5. Rule 2 is not for engine compile, whose regions all ranks measure together: all record a step if one does. A rank
     whose measured step is off asks for a meeting in its next step, before anything that the others wait for. There
     the highest of the ranks' corrections counts.
  6. With `on_larger="error"`, a batch that is refused on one rank when a step begins is an error on all.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

from autoac.automatic.compiling import Compiling
from autoac.automatic.wanted import Wanted
from autoac.automatic.watch import Refused
from autoac.parallel.one_plan import (
    facts_of,
    for_all,
    kept_bytes,
    needs_most,
    owner_first,
    same_everywhere,
    shared,
    solved_by,
)
from autoac.parallel.wrapped import is_spread
from autoac.plans import Plan
from autoac.ranks.all_or_none import Ranks, together
from autoac.ranks.meetings import Meetings
from autoac.ranks.session import Presence, store_is_there
from autoac.torch_private import ranks_of
from autoac_solver.records.errors import InfeasibleBudgetError
from autoac_solver.records.profile import Profile


class Meeting:
    """The decisions that ranks make together while they meet.

    Args:
        ranks: all of them.
        given: the model as the loop calls it.
    """

    def __init__(self, ranks: Ranks, given: torch.nn.Module):
        self.ranks = ranks
        self._given = given

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.rank == 0

    def any(self, mine: bool) -> bool:
        """Whether `mine` is true on any rank."""
        return any(self.ranks.all(mine))

    def one_plan(
        self, profile: Profile | None, at_hand: Plan | None, make: Callable[[Profile], Plan], goes_on: bool
    ) -> Plan | None:
        """The plan of the rank whose step keeps the most bytes, for all ranks; None if no rank has a plan.

        Args:
            profile: a step that this rank has recorded and has no plan for.
            at_hand: this rank's plan, used without such a step.
            make: makes the plan for that profile.
            goes_on: whether this rank has trained under a plan before.
        """
        step = profile or (at_hand.record.profile if at_hand is not None else None)
        found = self.ranks.all(-1 if step is None else kept_bytes(step))
        if max(found) < 0:
            return None
        return for_all(
            self.ranks,
            found.index(max(found)),
            self._given,
            step,
            lambda: at_hand if profile is None else make(profile),
            goes_on=self.any(goes_on),
        )

    def compiled_plan(
        self,
        compiling: Compiling,
        profile: Profile | None,
        plan: Plan | None,
        take_off: Callable[[], None],
        make: Callable[..., Plan],
    ) -> Plan | None:
        """The plan of engine compile for all ranks; None if they record a step first, or go on with the one they have.

        Args:
            profile: a step that this rank has recorded.
            plan: the one on this rank's model.
            take_off: takes that off.
            make: makes the plan for a profile.

        Raises:
            NothingCompiled: no region can be compiled.
            InfeasibleBudgetError: no plan fits.
        """
        if not self.any(profile is not None):
            if self.any(plan is None):
                return None
            assert plan is not None
            planned = plan.record.profile
            known = compiling.known or planned
            found = [tuple(one) for one in self.ranks.all(_corrections(known))]
            if max(found) == _corrections(planned):
                return None
            take_off()
            return self._corrected_plan(found.index(max(found)), known, compiling.best, make)
        take_off()
        if self.any(profile is None or not compiling.is_ready(profile)):
            if profile is not None:
                compiling.catch_next(profile)
            return None
        assert profile is not None
        with self.ranks.step():
            profile = compiling.with_regions(profile)
        # Others' steps are not compared with the plan's: each rank measures its next one.
        owner = needs_most(self.ranks, profile)
        with owner_first(self.ranks, owner):
            return solved_by(self.ranks, owner, self._given, make, profile)

    def _corrected_plan(
        self, owner: int, known: Profile, best: Plan | None, make: Callable[..., Plan]
    ) -> Plan:
        """The plan for the step of the rank that took the most, as the ranks have measured.

        Args:
            owner: index of that rank.
            known: what the plan before was made from, with what this rank's measured step has shown.
            best: a plan that this rank has measured to be within the budget.

        Raises:
            InfeasibleBudgetError: no plan fits, and none did on all ranks.
        """
        with owner_first(self.ranks, owner):
            try:
                return solved_by(
                    self.ranks, owner, self._given, functools.partial(make, is_corrected=True), known
                )
            except InfeasibleBudgetError:
                ids = self.ranks.all("" if best is None else best.program_id)
                if best is None or set(ids) != {best.program_id}:
                    raise
                return shared(self.ranks, owner, best, self._given)


def _corrections(step: Profile) -> tuple[int, int]:
    """How many calls of a step are not compiled, and how many bytes it takes that no point shows."""
    table = step.compiled
    assert table is not None
    return sum(len(region.calls) for region in table.regions if region.failure), table.unseen_bytes


class Across:
    """The ranks that run a loop together; a single process has no others.

    Args:
        given: the model as the loop calls it.
        model: the same without wrappers.
    """

    def __init__(self, given: torch.nn.Module, model: torch.nn.Module, wanted: Wanted):
        self._given = given
        self._model = model
        self._wanted = wanted
        self._meetings: Meetings | None = None
        self._presence: Presence | None = None  # until the ranks have met
        self._is_known = False

    @property
    def several(self) -> bool:
        """Whether there are several ranks; known once the first step has begun."""
        return self._meetings is not None

    def step_begins(self) -> bool:
        """Note that a step of the loop begins; returns whether the ranks meet now."""
        if not self._is_known:  # not sooner: the model may be wrapped after `auto` was called
            self._is_known = True
            if is_spread(self._given):
                with store_is_there():
                    self._meetings, self._presence = Meetings(ranks_of(self._given)), Presence()
                if self._wanted.path is not None:  # there may be a plan in it
                    self._meetings.step_begins()
                    return True
        return self._meetings is not None and self._meetings.step_begins()

    @contextlib.contextmanager
    def beginning(self, begins: bool, abandon: Callable[[], None]) -> Iterator[None]:
        """Context of a call of the model that may be refused. A step begins on all ranks that have met, or on none.

        Args:
            begins: whether a step begins with the call.
            abandon: called if another rank refuses.

        Raises:
            ParallelError: a rank refuses.
            Refused: this one does, and there are no others, or they have begun the step.
        """
        refused: Refused | None = None
        try:
            yield
        except Refused as error:
            if not (begins and self._begins_together):
                raise
            refused = error
        if begins and self._begins_together:
            assert self._meetings is not None
            try:
                self._meetings.begin_together(str(refused or ""))
            except BaseException as error:
                abandon()
                raise error from refused

    @property
    def _begins_together(self) -> bool:
        return self._wanted.on_larger == "error" and self._meetings is not None and self._meetings.were_held

    def ask(self) -> None:
        """Make all ranks meet when the next step begins."""
        if self._meetings is not None:
            self._meetings.ask()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[Meeting]:
        """Context in which all ranks decide together.

        Raises:
            ParallelError: a rank has failed, has not come, or trains something else; raised on all ranks.
        """
        wanted = self._wanted
        try:
            with together("settle on a plan for their loop", members=ranks_of(self._given)) as ranks:
                same_everywhere(
                    ranks,
                    facts_of(
                        self._model,
                        budget=wanted.budget,
                        regions=wanted.names,
                        policies=wanted.policies,
                        engine=wanted.engine,
                        headroom=wanted.headroom,
                        on_larger=wanted.on_larger,
                        budget_of=wanted.budget_of,
                    ),
                )
                yield Meeting(ranks, self._given)
        finally:
            if self._presence is not None:
                self._presence.end()
