"""Plans for several batch sizes on one model: each call runs under the plan for its size."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd
import torch

from autoac.check.verify import Report
from autoac.execute.engines import ENGINES
from autoac.execute.on_top import OnTop, owner_of
from autoac.plans import Model, Plan
from autoac.step.inputs import autocast_in, elements_in, elements_of
from autoac.step.model import runs_compiled, unwrapped
from autoac.step.step import TrainingStep
from autoac_solver.build.engines import check_supported
from autoac_solver.records.errors import PlanMismatchError


class Buckets:
    """Plans for batches of different sizes, applied to a model as one.

    A call of the model in train mode (in eval mode too, if the plans were made so) runs under the plan for the smallest
    batch with at least as many elements. A call with more elements than any plan's runs under the largest plan, which
    warns. The plan is changed before a call, never between its forward and its own backward.

    Made by `autoac.plan_buckets`, or from saved plans: `Buckets(map(Plan.load, paths))`.

    Args:
        plans: of one model, for one engine, each for another size; not for engine compile.

    Raises:
        ValueError: the plans cannot be put on one model by turns.
    """

    def __init__(self, plans: Iterable[Plan]):
        self.plans = tuple(sorted(plans, key=_elements))
        _check(self.plans)
        self._sizes = [_elements(plan) for plan in self.plans]
        self._applied: list[_Applied] = []

    @property
    def budget_bytes(self) -> int:
        """The largest budget of a plan; `autoac.plan_buckets` gives all the same."""
        return max(plan.budget_bytes for plan in self.plans)

    @property
    def predicted_peak_bytes(self) -> int:
        """The highest predicted peak of a plan."""
        return max(plan.predicted_peak_bytes for plan in self.plans)

    @property
    def samples(self) -> pd.DataFrame:
        """One row per sample, the smallest first.

        Samples of equal size share a plan; the first of them was planned for.

        Columns: sample, elements, peak_bytes, unplanned_peak_bytes, overhead, regions (that recompute), fits.
        """
        tables = []
        for plan, size in zip(self.plans, self._sizes, strict=True):
            table = plan.samples
            table.insert(1, "elements", size)
            table.insert(5, "regions", sum(region.wrapped for region in plan.regions))
            tables.append(table)
        return pd.concat(tables, ignore_index=True)

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan under which the model runs when it is called with these arguments."""
        return self.plans[self._index(elements_of(args, kwargs))]

    def _index(self, elements: int) -> int:
        return min(bisect.bisect_left(self._sizes, elements), len(self.plans) - 1)

    def apply(self, model: Model) -> Model:
        """Put the plans on the model, and return the model; train it as before.

        Raises:
            PlanMismatchError: the model is not the one that was profiled, or it has a plan already. Nothing is changed.
            ValueError: the model is compiled as a whole.
        """
        check_not_compiled(model)
        inner = unwrapped(model)
        if owner_of(inner) is not None:
            raise PlanMismatchError(
                "autoac.auto, or a plan for each bucket, is on this model: call remove() on it first."
            )
        self._applied.append(_Applied(self, inner))
        return model

    def remove(self, model: Model) -> Model:
        """Take the plans off the model, which restores it exactly, and return it.

        Raises:
            PlanMismatchError: they are not on the model, or other code has replaced a planned module's forward since.
        """
        applied = self._on(model)
        if applied is None:
            raise PlanMismatchError(
                "these plans are not applied to this model, so there is nothing to remove."
            )
        applied.remove()
        self._applied.remove(applied)
        return model

    @contextlib.contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """Context in which the plans are on the model."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    def verify(
        self, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> Report:
        """`Plan.verify` of the plan for this sample; the model is restored.

        Args, Raises: as for `Plan.verify`.
        """
        if TrainingStep(unwrapped(model), sample, loss).is_whole:
            raise ValueError("verify takes the model's inputs here: a callable's size is not known.")
        plan, is_on = self.plan_for(sample), self._on(model) is not None
        if is_on:
            self.remove(model)
        try:
            return plan.verify(model, sample, loss)
        finally:
            if is_on:
                self.apply(model)

    def _on(self, model: torch.nn.Module) -> _Applied | None:
        inner = unwrapped(model)
        return next((applied for applied in self._applied if applied.model is inner), None)

    def __repr__(self) -> str:
        return f"Buckets({'; '.join(plan.record.profile.sample for plan in self.plans)})"


def check_not_compiled(model: torch.nn.Module) -> None:
    """Refuse a model that `torch.compile` has compiled as a whole.

    Raises:
        ValueError: its code is traced under one plan, and all sizes would run under that.
    """
    if runs_compiled(model):
        raise ValueError(
            "plans for several sizes cannot take turns in a model that is compiled as a whole: plan for the largest "
            "batch, or compile modules inside of it."
        )


class _Applied:
    """The plans on one model, one of them attached at a time.

    Args:
        buckets: the plans.
        model: without wrappers.
    """

    takes_turns = True

    def __init__(self, buckets: Buckets, model: torch.nn.Module):
        self.model = model
        self._buckets = buckets
        self._running = False
        for plan in buckets.plans:
            plan.placement.prepare(model)
            plan.placement.share_earlier(buckets.plans[0].placement)
        self._plan = buckets.plans[-1]  # which holds for all sizes
        self._plan.placement.attach(model)
        self._plan.placement.watch_backward(model)
        self._on_top = OnTop(model, self)
        self._on_top.put_on()

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of the model under the plan for its size."""
        counts = self._plan.placement.trains(self.model) and not self._running
        if not counts:  # or a second run of its code, or a call inside of one
            return self._on_top.run(args, kwargs)
        self._take(self._buckets.plan_for(*args, **kwargs))
        self._plan.placement.begins(self.model, args, kwargs)
        self._running = True
        try:
            output = self._on_top.run(args, kwargs)
        finally:
            self._running = False
        self._plan.placement.ends(self.model, args, kwargs, output)
        return output

    def _take(self, plan: Plan) -> None:
        if plan is self._plan:
            return
        with self._on_top.aside():
            if self._plan.placement.can_detach(self.model):
                self._plan.placement.detach(self.model)
                plan.placement.attach(self.model)
                self._plan = plan

    def remove(self) -> None:
        """Restore the model.

        Raises:
            PlanMismatchError: other code has replaced a planned module's forward; nothing is changed.
        """
        with self._on_top.aside():
            self._plan.remove(self.model)
        self._on_top.take_off()


def _elements(plan: Plan) -> int:
    return elements_in(plan.record.profile.sample)


def _check(plans: tuple[Plan, ...]) -> None:
    """Refuse plans that cannot take turns."""
    if not plans:
        raise ValueError("Buckets is given no plan.")
    first = plans[0].record
    check_supported(first.engine, "sizes")
    if not all(map(_elements, plans)):
        raise ValueError(
            "a plan for a model that is called without tensors has no size, so it cannot be one of several sizes."
        )
    for plan in plans[1:]:
        other = plan.record
        for what, one, two in (
            ("models", first.model_fingerprint, other.model_fingerprint),
            ("engines", first.engine, other.engine),
            ("devices", first.device, other.device),
            ("autocasts", autocast_in(first.profile.sample), autocast_in(other.profile.sample)),
        ):
            if one != two:
                raise ValueError(f"the plans are for different {what}: {one!r} and {two!r}.")
        # A second run of the region's code uses the plan that the region carries at that time.
        alike = (first.losses, first.chunked_losses) == (other.losses, other.chunked_losses)
        if not alike and ENGINES[first.engine].model.runs_code_twice:
            raise ValueError(
                f"with engine {first.engine!r} plans that take turns must treat the model's loss alike: plan with "
                'policies=[autoac.Policy("MUST_SAVE", op="aten._log_softmax*")], or with engine=\'replay\'.'
            )
