"""A plan: look at it, save it, put it on a model, check it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from autoac.check.timeline import measured_memory
from autoac.check.verify import Report, verify
from autoac.execute.engines import ENGINES
from autoac.execute.following import NotFollowed
from autoac.execute.placement import Placement
from autoac.execute.program import Program
from autoac.execute.sac import sac
from autoac.progress import progress_shown
from autoac.step.model import unwrapped
from autoac.step.step import TrainingStep
from autoac_solver.plan import curve
from autoac_solver.plan.parts import peak_parts
from autoac_solver.plan.record import predicted_anew
from autoac_solver.plan.step import step_of
from autoac_solver.plan.transfer import Outcome
from autoac_solver.records.compiled import TORCHS
from autoac_solver.records.engines import COMPILE
from autoac_solver.records.errors import PlanMismatchError
from autoac_solver.records.plan import PlanRecord, RegionPlan
from autoac_solver.records.profile import NEVER, Profile
from autoac_solver.show import refusals
from autoac_solver.show.explanation import Explanation, explain, explanation
from autoac_solver.show.memory import plot_memory
from autoac_solver.show.notebook import Page, plan_html
from autoac_solver.show.page import render_report, write_report
from autoac_solver.show.summary import notes, summary

Model = TypeVar("Model", bound=torch.nn.Module)


class Plan:
    """What to save and what to recompute in one training step of one model.

    Made by `autoac.plan` or `autoac.solve`; `Plan.load` reads one from a file, which runs no code from it.
    """

    def __init__(self, record: PlanRecord):
        self.record = record
        self.placement = Placement(record)
        self.outcomes: tuple[Outcome, ...] = ()  # of other samples that were given, see `samples`

    # -- what it says ------------------------------------------------------------------------------------------

    @property
    def predicted_peak_bytes(self) -> int:
        """Largest number of live bytes during the planned step, resident bytes included."""
        return self.record.predicted_peak_bytes

    @property
    def predicted_reserved_bytes(self) -> int | None:
        """What CUDA's caching allocator reserves at most during the planned step, as simulated.

        None for plans for other devices, and where the allocator's options (`PYTORCH_CUDA_ALLOC_CONF`) are not
        understood; `explain` says why.
        """
        return self.record.predicted_reserved_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes alive before the step: parameters, buffers, optimizer state, the sample."""
        return self.record.resident_bytes

    @property
    def budget_bytes(self) -> int:
        """The limit that was asked for."""
        return self.record.budget_bytes

    @property
    def predicted_overhead(self) -> float:
        """Extra step time / step time with nothing recomputed, the engine's own cost included."""
        step_s = self.record.predicted_step_s
        return self.record.predicted_extra_s / step_s if step_s else 0.0

    @property
    def optimality_gap(self) -> float:
        """How much faster another plan within the budget can be at most, as a fraction of the step's time."""
        return self.record.gap

    @property
    def status(self) -> str:
        """ "optimal" if no plan within the budget is faster by more than the asked gap, else "feasible"."""
        return self.record.status

    @property
    def engine(self) -> str:
        """The engine's name: "replay", "sac" or "compile"."""
        return self.record.engine

    @property
    def regions(self) -> tuple[RegionPlan, ...]:
        """The regions: module name, call, whether it is wrapped, and the decision for each of its ops."""
        return self.record.regions

    @property
    def decisions(self) -> pd.DataFrame:
        """One row a value: region, module, op, bytes, decision ("save", "recompute" or "skip"), time_s."""
        return step_of(self.record).decisions.copy()

    @property
    def samples(self) -> pd.DataFrame:
        """One row a sample that `autoac.plan` was given, that which was planned for first.

        Columns: sample, peak_bytes, unplanned_peak_bytes, overhead, fits. A plan that was read from a file knows its
        own sample only; its profile's notes tell of the others.
        """
        own = Outcome(
            self.record.profile.sample,
            self.predicted_peak_bytes,
            self.record.unplanned_peak_bytes,
            self.predicted_overhead,
            fits=True,
        )
        return pd.DataFrame([dataclasses.asdict(outcome) for outcome in (own, *self.outcomes)])

    def peak_parts(self) -> dict[str, int]:
        """What is alive at the predicted peak on one rank, in bytes, by what it is.

        Returns:
            parameters (of sharded ones the shards), gathered (parameters that FSDP2 has gathered there), gradients
            (with DDP's buckets), optimizer (its state), inputs (the sample, buffers and what else was there before),
            activations, and other (what ops and collectives take for a while). They add up to the predicted peak.
        """
        return peak_parts(self.record)

    def memory_timeline(self) -> pd.DataFrame:
        """One row an op of the planned step: op, module, phase, live_bytes in all and by kind of memory."""
        return step_of(self.record).timeline.copy()

    @property
    def notes(self) -> tuple[str, ...]:
        """What one should know of the plan: how its step was recorded, and what could be better."""
        return notes(self.record)

    def summary(self) -> str:
        """The plan in at most 15 lines; `explain` says all there is."""
        return summary(self.record)

    def explain(self) -> str:
        """The plan in words: the peak and who holds it, what is recomputed at what price, what more memory buys."""
        return explain(self.record)

    def why(self, module: str) -> str:
        """What the plan does with a module, and why it does no more: why it is no region, what in it must be saved.

        Args:
            module: its name in the model, "" for the model itself.

        Raises:
            ProfilingError: the profiled step calls no module of this name.
        """
        return refusals.why(self.record, module)

    def explanation(self) -> Explanation:
        """What `explain` says, as tables. Takes a moment: it solves once more, for a little more memory."""
        return explanation(self.record)

    def plot_memory(self, axes: Any = None, measured: Any = None) -> Any:
        """Draw the live bytes over the step: by kind, with nothing recomputed, the budget, and as measured.

        Args:
            axes: matplotlib axes to draw on; None makes a new figure.
            measured: what `measure_memory` returned; None for none.

        Returns:
            The axes.
        """
        return plot_memory(self.record, axes, measured)

    def __repr__(self) -> str:
        return str(self.record)

    def _repr_html_(self) -> str:
        return plan_html(self.record)

    def show(self, curve: Any = None, points: int = 8, height: int = 900) -> Page:
        """The report page in a notebook: with hover and zoom, and a slider over budgets.

        Args:
            curve, points: as for `report`.
            height: of the frame, pixels.

        Returns:
            What Jupyter shows as the page, if it is the last line of a cell.
        """
        with progress_shown("planning other budgets", None) as tell:
            return Page(render_report(self.record, curve=curve, points=points, progress=tell), height)

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no folder to write it in.
            IsADirectoryError: there is a folder of that name.
        """
        self.record.save(path)

    def report(self, path: str | Path, curve: Any = None, points: int = 20) -> None:
        """Write the plan as a page: one HTML file that opens offline.

        Args:
            path: of the file, .html; one that is there is replaced.
            curve: plans for other budgets, from the same profile and for the same engine; None makes them, which takes
                a while.
            points: how many budgets to make plans for if there is no curve; 0 shows this plan alone.

        Raises:
            ValueError: the curve is of another profile or engine.
            FileNotFoundError, IsADirectoryError: no file can be at this path; before the page is made.
        """
        with progress_shown("planning other budgets", None) as tell:
            write_report(self.record, path, curve=curve, points=points, progress=tell)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan.

        Raises:
            ProfileError: the file is damaged, of another kind, or from a newer version.
        """
        return cls(PlanRecord.load(path))

    # -- on a model --------------------------------------------------------------------------------------------

    def apply(self, model: Model) -> Model:
        """Put the plan on the model, and return the model; train it as before.

        Regions with nothing to recompute are left untouched. Under `torch.no_grad` the model runs as without a plan.
        Submodules that `torch.compile` has compiled run uncompiled until `remove` where the plan needs it, see
        `uncompiled.to_uncompile`.

        Raises:
            PlanMismatchError: the model is not the one that was profiled, or it has a plan already. Nothing is changed.
        """
        self.placement.put_on(model)
        return model

    def remove(self, model: Model) -> Model:
        """Take the plan off the model, which is then exactly as it was before, and return it.

        Raises:
            PlanMismatchError: this plan is not on the model, or somebody has put another forward over it since.
        """
        self.placement.take_off(model)
        return model

    def check(self, model: torch.nn.Module) -> None:
        """Check that the plan can be put on a model, and change nothing.

        Raises:
            PlanMismatchError: as for `apply`.
        """
        self.placement.check(model)

    @property
    def program_id(self) -> str:
        """Tells this plan's programs and the model that they are for from others; the same in a file."""
        return self.placement.plan_id

    @contextlib.contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """Context in which the plan is on the model."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    @property
    def is_not_followed(self) -> NotFollowed:
        """Which regions have run ops that the profiled step did not run, since the plan was last applied.

        It is false where none has. Otherwise it tells, for each region, which op was expected and which came, the
        likely cause, and what the peak may be now; printed it is the warning that is given once.
        """
        return self.placement.is_not_followed

    # -- for those who call checkpoint() themselves ------------------------------------------------------------

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
        """What a leaf's gradient is at the start of the step that was profiled: None, or what the step adds to."""
        table = self.record.profile.storage_table
        accumulates = any(storage.kind == "Gradient" and storage.alloc == NEVER for storage in table)
        if not accumulates or not tensor.requires_grad:
            return None
        return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()

    def on(self, profile: Profile) -> Plan:
        """The same decisions, with what another profile of the same step predicts of them."""
        return Plan(predicted_anew(self.record, profile))

    # -- trust -------------------------------------------------------------------------------------------------

    def verify(
        self,
        model: torch.nn.Module,
        sample: Any,
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        steps: int = 1,
    ) -> Report:
        """Run one step with the plan and one without from the same state, and compare.

        The model and the sample are left as they were: if this plan is on the model, so it is afterwards.

        Args:
            model, sample, loss: as for `autoac.plan`.
            steps: how many steps to compare and measure, each but the first with other random numbers: of a model
                whose steps vary (layer drop, routed experts) the report has the largest peak, and all of them.

        Returns:
            Whether loss, gradients, buffers and random states are equal to the bit, predicted and measured peak, and
            the ratio of the step times; where something differs, the first op or parameter that does. Of engine compile
            the step without the plan has the same regions compiled as torch does, and floating values that are equal
            within `tolerance` are equal.

        Raises:
            PlanMismatchError: the plan is not for this model.
            ProfilingError: a callable step leaves nothing to compare: no loss, no gradients, no optimizer's step.
            ValueError: `steps` is no number of steps.
        """
        if type(steps) is not int or steps < 1:
            raise ValueError(f"steps is {steps!r}: at least one step is compared.")
        with self.placement.taken_off(model):
            self.placement.check(model)
            return verify(
                self, TrainingStep(unwrapped(model), sample, loss), self._compiled_as_torch_does(), steps
            )

    def _compiled_as_torch_does(self) -> Plan | None:
        """Where regions are compiled: a plan that compiles them without a budget, so that the two can be compared."""
        if self.engine != COMPILE or not any(region.wrapped for region in self.regions):
            return None
        regions = tuple(
            dataclasses.replace(region, point=TORCHS) if region.wrapped else region for region in self.regions
        )
        return Plan(dataclasses.replace(self.record, regions=regions))

    def measure_memory(
        self, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> pd.Series:
        """Run one step with the plan and measure how many bytes are alive at each op, by the allocator's own account.

        The model and the sample are left as they were: if this plan is on the model, so it is afterwards. On CPU
        only: CUDA's allocator tells the peak (`verify`), but not when.

        Args:
            model, sample, loss: as for `autoac.plan`.

        Returns:
            Live bytes, one for each row of `memory_timeline()`; `plot_memory(measured=...)` draws both.

        Raises:
            ValueError: the model is not on CPU, or regions are compiled.
            ProfilingError: the step ran other ops than the plan was made for.
        """
        if self._compiled_as_torch_does() is not None:
            raise ValueError(
                "compiled regions run no ops that memory could be told at: verify() measures the step's peak."
            )
        with self.placement.taken_off(model):
            self.placement.check(model)
            return measured_memory(self, TrainingStep(unwrapped(model), sample, loss))


class Tradeoff(curve.Tradeoff):
    """A `autoac_solver.plan.curve.Tradeoff` whose plans can be put on models."""

    @classmethod
    def of(cls, found: curve.Tradeoff) -> Tradeoff:
        """The same curve."""
        return cls(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})

    @functools.cached_property
    def plans(self) -> Sequence[Plan]:
        """The plan of each row; it is made when it is first looked at."""
        return curve.Lazy(len(self.points), lambda row: Plan(self.record(row)))

    def report(self, path: str | Path, row: int | None = None) -> None:
        """Write the curve and its plans as a page: one HTML file that opens offline.

        Args:
            path: of the file, .html; one that is there is replaced.
            row: of the plan that the page opens with; None for the knee's, or the first.

        Raises:
            FileNotFoundError, IsADirectoryError: no file can be at this path; before the page is made.
        """
        write_report(self.record(self.opening_row if row is None else row), path, curve=self)

    def show(self, row: int | None = None, height: int = 900) -> Page:
        """The report page in a notebook: with hover and zoom, and a slider over budgets.

        Args:
            row: as for `report`.
            height: of the frame, pixels.

        Returns:
            What Jupyter shows as the page, if it is the last line of a cell.
        """
        return Page(render_report(self.record(self.opening_row if row is None else row), curve=self), height)
