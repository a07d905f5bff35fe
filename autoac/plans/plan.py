"""A plan: inspect it, save it, put it on a model, verify it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from autoac.check.timeline import measured_memory
from autoac.check.verify import Report, verify
from autoac.execute.engines import ENGINES, check_runnable
from autoac.execute.on_top import owner_of
from autoac.execute.placement import Placement
from autoac.execute.program import Program
from autoac.execute.sac import sac
from autoac.execute.watch.following import NotFollowed
from autoac.plans.view import PlanView
from autoac.ranks.joined import step_of_all_ranks
from autoac.step.model import unwrapped
from autoac.step.step import TrainingStep
from autoac.torch_private import is_one_of_several_ranks
from autoac_solver.plan.recorded.made import predicted_anew
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.records.collectives import may_repeat
from autoac_solver.records.compiled import EAGER, TORCHS
from autoac_solver.records.errors import PlanMismatchError
from autoac_solver.records.plan import PlanRecord, RegionPlan
from autoac_solver.records.profile import Profile

Model = TypeVar("Model", bound=torch.nn.Module)


class Plan(PlanView):
    """What to save and what to recompute in one training step of one model.

    Made by `autoac.plan` or `autoac.solve`; `Plan.load` reads one from a file, and runs no code from it.
    """

    def __init__(self, record: PlanRecord):
        super().__init__(record)
        self.placement = Placement(record)
        self.is_shared = False  # whether all ranks that hold the model have this plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            ProfileError: the file is damaged, of another kind, or from another version; or its programs do not give
                its predicted peak.
        """
        record = PlanRecord.load(path)
        step_of(record)
        return cls(record)

    def apply(self, model: Model) -> Model:
        """Put the plan on the model, and return the model; train it as before.

        Regions with nothing to recompute are left untouched. Under `torch.no_grad` the model runs as without a plan.
        Submodules that `torch.compile` has compiled run uncompiled until `remove` where the plan needs it, see
        `uncompiled.to_uncompile`.

        Raises:
            PlanMismatchError: the model is not the one that was profiled, or it has a plan already; or the plan runs
                collectives again, and the ranks have not agreed on it. Nothing is changed.
        """
        if not self.is_shared and self._repeats_collectives and is_one_of_several_ranks():
            raise PlanMismatchError(
                "this plan runs collectives again, and waits for ever if another rank's plan does not: let all ranks "
                "take one plan, plan = autoac.parallel.agree(plan, model), or make it with autoac.plan on all of them."
            )
        owner = owner_of(unwrapped(model)) if isinstance(model, torch.nn.Module) else None
        if owner is not None and owner.takes_turns:
            raise PlanMismatchError(
                "plans for several sizes are on this model, one at a time: call remove(model) on them first."
            )
        self.placement.put_on(model)
        return model

    @property
    def _repeats_collectives(self) -> bool:
        steps = itertools.chain.from_iterable(
            region.steps for region in self.record.regions if region.wrapped
        )
        return any(again and may_repeat(op) for op, again in steps)

    def remove(self, model: Model) -> Model:
        """Take the plan off the model, restoring it exactly, and return the model.

        Raises:
            PlanMismatchError: this plan is not on the model, or other code has replaced one of its forwards since.
        """
        self.placement.take_off(model)
        return model

    @contextlib.contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """Context in which the plan is on the model."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    def check(self, model: torch.nn.Module) -> None:
        """Check that the plan can be put on a model, and change nothing.

        Raises:
            PlanMismatchError: as for `apply`.
        """
        self.placement.check(model)

    @property
    def program_id(self) -> str:
        """Identifies this plan's programs and the model they are for; stable across saving and loading."""
        return self.placement.plan_id

    @property
    def is_not_followed(self) -> NotFollowed:
        """Regions that have run ops that the profiled step did not run, since the plan was last applied.

        It is false if there are none. Otherwise it has, for each region, the op that was expected and the one that
        came, and the likely cause and the possible peak; printed, it is the text of the warning that is given once.
        """
        return self.placement.following.report()

    def policy_fn(self, region: str) -> Callable[..., Any]:
        """A policy for `create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)`.

        It answers by (overload, n-th call in the region), so every call of the region needs a new one: pass
        `context_fn(region)` to `checkpoint`, which makes it.

        Args:
            region: name of a region of this plan, as in `plan.regions`.

        Raises:
            PlanMismatchError: there is no such region, the plan was made for another engine, or it computes a loss over
                chunks of rows, which only `apply` does.
        """
        return sac.SacPolicy(self._sac_program(region))

    def context_fn(self, region: str) -> Callable[[], tuple[Any, Any]]:
        """For `torch.utils.checkpoint.checkpoint(function, ..., use_reentrant=False, context_fn=...)`.

        Args:
            region: name of a region of this plan, as in `plan.regions`.

        Raises:
            PlanMismatchError: as for `policy_fn`.
        """
        return functools.partial(sac.contexts, self._sac_program(region))

    def _sac_program(self, region: str) -> Program:
        check_runnable(self.engine)
        if not ENGINES[self.engine].is_policy:
            raise PlanMismatchError(
                f"this plan is for engine {self.engine!r}, whose decisions torch's checkpoint cannot follow exactly: "
                'plan with engine="sac" to use policy_fn or context_fn.'
            )
        if self.record.chunked_losses:
            raise PlanMismatchError(
                "this plan also computes the model's loss over chunks of rows, which takes plan.apply(model): plan "
                'with policies=[autoac.Policy("MUST_SAVE", op="aten._log_softmax*")] to call checkpoint yourself.'
            )
        for record in self.regions:
            if record.name == region:
                return Program(record.name, record.steps, wrapped=record.wrapped)
        known = ", ".join(repr(record.name) for record in self.regions[:12])
        raise PlanMismatchError(f"this plan has no region {region!r}; it has {known}.")

    def gradient_at_start(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A leaf's gradient at the start of the profiled step: None, or the tensor that the step adds to."""
        if not self.record.profile.has_gradients_before or not tensor.requires_grad:
            return None
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()

    def on(self, profile: Profile) -> Plan:
        """The same decisions, with the predictions of another profile of the same step."""
        plan = Plan(predicted_anew(self.record, profile))
        plan.is_shared = self.is_shared
        return plan

    def verify(
        self,
        model: torch.nn.Module,
        sample: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        steps: int = 1,
    ) -> Report:
        """Run one step with the plan and one without from the same state, and compare.

        Model and sample are left as they were: if this plan is on the model, it is on it afterwards.

        Args:
            model, sample, loss: as for `autoac.plan`.
            steps: number of steps to compare and measure, each but the first with other random numbers. For a model
                whose steps vary (layer drop, routed experts) the report has the largest peak, and all peaks.

        Returns:
            Whether loss, gradients, buffers and random states are equal to the bit, predicted and measured peak, and
            the ratio of the step times; if something differs, the first op or parameter that does. For engine compile,
            the step without the plan has the same regions compiled as torch does by default, and floating values that
            are equal within `tolerance` count as equal.

        Raises:
            PlanMismatchError: the plan is not for this model.
            ProfilingError: a callable step leaves nothing to compare: no loss, no gradients, no optimizer's step.
            ParallelError: an error of one of the ranks that run the step together, raised on all of them.
            ValueError: `steps` is not a positive integer.
        """
        what = "verify a plan" if steps == 1 else f"verify a plan in {steps} steps"
        with (
            step_of_all_ranks(what, model, sample) as joint,
            self.placement.taken_off(model),
            self.placement.unlooked(),
        ):
            if type(steps) is not int or steps < 1:
                raise ValueError(f"steps is {steps!r}: at least one step is compared.")
            self.placement.check(model)
            step = TrainingStep(unwrapped(model), joint, loss)
            return verify(self, step, self.compiled_as_torch_does(), steps)

    def measure_memory(
        self, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> pd.Series:
        """Run one step with the plan and measure the live bytes at each op, as the allocator counts them.

        Model and sample are left as they were: if this plan is on the model, it is on it afterwards. On CPU only:
        CUDA's allocator reports the peak (`verify`), but not when it occurs.

        Args:
            model, sample, loss: as for `autoac.plan`.

        Returns:
            Live bytes, one for each row of `memory_timeline()`; `plot_memory(measured=...)` draws both.

        Raises:
            ValueError: the model is not on CPU, or regions are compiled.
            ProfilingError: the step ran other ops than the plan was made for.
        """
        with (
            step_of_all_ranks("measure the memory of a plan", model, sample) as joint,
            self.placement.taken_off(model),
        ):
            if self.compiled_as_torch_does() is not None:
                raise ValueError(
                    "compiled regions run no ops that memory could be told at: verify() measures the step's peak."
                )
            self.placement.check(model)
            return measured_memory(self, TrainingStep(unwrapped(model), joint, loss))

    def compiled_as_torch_does(self) -> Plan | None:
        """A plan that compiles the same regions without a budget, for comparison; None if no region is compiled."""
        if not any(region.point != EAGER for region in self.regions):
            return None
        regions = tuple(map(_without_budget, self.regions))
        return Plan(dataclasses.replace(with_regions(self.record, regions), chunked_losses=False))


def _without_budget(region: RegionPlan) -> RegionPlan:
    """The region without a budget: compiled as torch does by default, or with nothing recomputed."""
    if region.point != EAGER:
        return dataclasses.replace(region, point=TORCHS)
    return dataclasses.replace(region, wrapped=False, steps=tuple((name, False) for name, _ in region.steps))
