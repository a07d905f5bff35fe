"""Begin and end of the loop's steps, from the model's calls and the optimizers' steps; the phases that they make up.

NOTE [ Several optimizers ]
  In most loops a step ends with the optimizer. A GAN's loop takes one step for the discriminator, one for the
  generator, and both have to keep to the budget. So from the first step on that ends with another optimizer than the
  first one, all steps up to the last of the others are taken as one: one profile, one plan. Their number is counted
  once, in a step that is recorded for nothing else. A trainer that announces where a batch begins (Lightning) makes
  this unnecessary.

  Training in phases is another thing: an optimizer that steps several times in a row, while other parameters are
  trained than with the first one. There each step is one, with the plan for the parameters that it trains (`Phases`).

NOTE [ Optimizers over copies ]
  DeepSpeed's ZeRO and Megatron's optimizers step on copies of the parameters, and take the gradients away after each
  micro-batch. So no optimizer of the model's own is ever seen, and each micro-batch looks like a step. An optimizer of
  other parameters that steps after several of them, and not after each, tells that they are one; unless it does not
  step any more.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from autoac.automatic.optimizers import Optimizers
from autoac.automatic.wanted import is_of_another
from autoac.execute.checksums import checksums_of
from autoac.plans import Plan
from autoac.step.model import has_gradients
from autoac.torch_private import has_other_ranks, in_function_transform

_MOST = 12
"""Most optimizer steps taken as one: the plan's number of ops grows with it."""

_MOST_PLANS = 8
"""Plans kept for parameters that are trained in phases."""

_PHASE = 3
"""An optimizer other than the first steps so many times in a row in a phase; a GAN's generator less often."""

_MOST_COMPARED, _MOST_BYTES = 64, 1 << 22
"""Parameters whose values are compared, and their bytes."""

_MOST_NOTED = 8
"""Steps whose updates are looked for, if none is found."""


class Cycle:
    """Divides the loop's events into steps.

    Args:
        model: without wrappers.

    Attributes:
        is_told: a trainer announces where a step begins.
        has_stepped: an optimizer has stepped since the model was last called.
        has_own: an optimizer of the model's parameters has stepped, be it in backward.
        is_too_long: more optimizer steps belong together than are planned for as one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._own_updates = _OwnUpdates(model)
        self.is_told = False
        self.has_stepped = True
        self.has_own = False
        self.is_too_long = False
        self._first: weakref.ref[Any] | None = None  # the optimizer that ended the first step
        self._last: weakref.ref[Any] | None = None  # the optimizer that ended the last step
        self._in_a_row = 0  # steps that ended with the last optimizer
        self._before = 0  # and with the one before it
        self._trained = ""  # fingerprint of the parameters trained when the first one stepped last
        self._has_phases = False
        self._is_several = False
        self._is_partial = False  # in the rest of the step in which another optimizer first appeared
        self._count = 0  # optimizers' steps since the step began
        self._length: int | None = 1  # number of optimizer steps with which it ends; None while unknown
        # See NOTE [ Optimizers over copies ].
        self._without_gradients = 0  # calls without gradients before, since an optimizer of others stepped
        self._most_without = 1  # of them in a step that ends with an optimizer of others
        self._is_longer = False  # whether this step had more of them than those before

    @property
    def is_one(self) -> bool:
        """Whether every optimizer step ends a step of the loop."""
        return not (self.is_told or self._is_several)

    @property
    def ends_with_optimizer(self) -> bool:
        """Whether an optimizer that is still there has ended a step: then only an optimizer's step ends one."""
        return self._first_one() is not None

    @property
    def is_over(self) -> bool:
        """Whether the optimizer step counted last ends the loop's step."""
        return self.is_one or (self._length is not None and self._count >= self._length)

    @property
    def is_short(self) -> bool:
        """Whether fewer optimizers have stepped in an announced step than in an earlier one (every n-th batch more)."""
        return self.is_told and self._length is not None and self._count < self._length

    def has_gradients(self) -> bool:
        """Whether the model has gradients of this step, with which the loop has not updated it by itself."""
        if not has_gradients(self._model):
            return False
        return self.has_own or self.has_stepped or not self._own_updates.came()

    def called(self, begins: bool) -> None:
        """Note a call of the model, and whether a step begins with it."""
        if not self.is_told:
            self.has_stepped = False
        if begins and not self.has_own:
            self._own_updates.note()

    def may_begin(self) -> bool:
        """Whether a call of the model, not announced by a trainer, begins a step."""
        if self.is_told:
            return False
        if self._is_several:
            return self.has_stepped and self._last is not None and self._last() is not self._first_one()
        if self.has_stepped:
            self._without_gradients = 1
            return True
        return not (self.has_gradients() or self.ends_with_optimizer or self._goes_on_without())

    def announced_may_begin(self) -> bool:
        """Whether a batch that a trainer announces begins a step."""
        return self.has_stepped or not (self.has_gradients() or self._goes_on_without())

    def _goes_on_without(self) -> bool:
        """Whether a step goes on with a call before which the model has no gradients; counts these calls."""
        self._without_gradients += 1
        if self._without_gradients > 2 * self._most_without:
            self._most_without = 1
        return self._most_without > 1 and self._without_gradients > 1 and not self.has_own

    def count_another(self) -> None:
        """Count a step of an optimizer of other parameters, which may be copies of the model's."""
        if not self.has_own and self._without_gradients > self._most_without:
            self._most_without, self._is_longer = self._without_gradients, True
        self._without_gradients = 0

    def begins(self) -> bool:
        """Begin a step; returns whether steps end with another optimizer step than was planned for."""
        count, self._count = self._count, 0
        is_longer, self._is_longer = self._is_longer, False
        if self.is_one:
            return is_longer and not self.has_own
        if self._is_partial:
            self._is_partial = False
            return True
        if self._length is not None and count <= self._length:
            return False
        self._length = count
        return True

    def count(self, optimizer: Any, trained: str) -> None:
        """Count a step of an optimizer.

        Args:
            trained: fingerprint of the parameters that are trained.
        """
        self._count += 1
        if not self.has_stepped:
            if self._last is not None and self._last() is optimizer:
                self._in_a_row += 1
            else:  # if short runs of steps have come to follow one another, these are no phases
                self._has_phases &= max(self._in_a_row, self._before) >= _PHASE
                self._before, self._in_a_row = self._in_a_row, 1
            self._last = weakref.ref(optimizer)
            if self._first_one() is None:
                self._first = self._last
            if self._first_one() is optimizer:
                self._trained = trained
            elif self._in_a_row >= _PHASE and trained != self._trained:
                self._has_phases, self._is_several, self._is_partial = True, False, False
            elif self.is_one and not (self.is_too_long or self._has_phases):
                self._is_several = self._is_partial = True
                self._length = None
        self.has_stepped = True
        if self._is_several and self._count > _MOST:
            self._is_several, self.is_too_long = False, True

    def _first_one(self) -> Any:
        return None if self._first is None else self._first()


class _OwnUpdates:
    """Tells whether a loop has updated the parameters without an optimizer of torch, and left their gradients there.

    So do optimizers that are no `torch.optim.Optimizer` (fastai's), and updates by hand: they write to `.data`, which
    counts as no version, and put zeros into the gradients. So values of the smallest parameters are compared.

    Args:
        model: without wrappers.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self._before: list[int] | None = None
        self._noted = 0
        self._has_come = False

    def note(self) -> None:
        """Note the values with which a step begins; no more, if updates have never come."""
        self._noted += 1
        is_wanted = self._has_come or self._noted <= _MOST_NOTED
        self._before = self._checksums() if is_wanted else None

    def came(self) -> bool:
        """Whether they have changed since."""
        if self._before is None:
            return False
        now = self._checksums()
        has_come = now is not None and len(now) == len(self._before) and now != self._before
        self._has_come |= has_come
        return has_come

    def _checksums(self) -> list[int] | None:
        """None inside of a transform of `torch.func`, where parameters may be wrapped, and on one of several ranks.

        What changes may differ from rank to rank (rows of an embedding), and all have to begin a step at once.
        """
        if in_function_transform() or has_other_ranks():
            return None
        trained = [p for p in self._model.parameters() if p.requires_grad and not is_lazy(p)]
        few, left_bytes = list[torch.Tensor](), _MOST_BYTES
        for parameter in sorted(trained, key=torch.Tensor.numel)[:_MOST_COMPARED]:
            left_bytes -= parameter.numel() * parameter.element_size()
            if left_bytes >= 0:
                few.append(parameter)
        return checksums_of(few)


class Phases:
    """The plans of a loop that trains other parameters at times, by a fingerprint of those that are trained.

    Args:
        model: without wrappers.
        optimizers: the loop's.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers) -> None:
        self._model = model
        self._optimizers = optimizers
        self._plans: dict[str, Plan] = {}

    def keep(self, trained: str, plan: Plan) -> None:
        """Keep a plan for when these parameters are trained again."""
        self._plans.pop(trained, None)
        self._plans[trained] = plan
        for oldest in list(self._plans)[:-_MOST_PLANS]:
            del self._plans[oldest]

    def plan_for(self, trained: str) -> Plan | None:
        """The plan made when these parameters were trained, if it holds for the model and all that is there now."""
        plan = self._plans.get(trained)
        if plan is None or is_of_another(plan.record.profile, self._model):
            return None
        return plan if self._optimizers.are_counted_in(plan.record.profile) else None

    def forget(self) -> None:
        """Keep none."""
        self._plans.clear()
