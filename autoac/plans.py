"""A plan: look at it, save it, put it on a model, check it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

from autoac.engine import sac
from autoac.engine.attach import (
    attach,
    attach_losses,
    attach_pausing,
    attach_root,
    covered,
    detach,
    planned,
)
from autoac.engine.chunked import same_by_chunks
from autoac.engine.program import Program
from autoac.memory_trace import measured_memory
from autoac.recorder import device_of, model_fingerprint, unwrapped
from autoac.uncompiled import compiled_modules, recompile, to_uncompile, uncompile, uncompiled_by
from autoac.verify import Report, verify
from autoac_solver import curve
from autoac_solver.errors import PlanMismatchError
from autoac_solver.explanation import Explanation, explain, explanation
from autoac_solver.losses import chunkable_losses, lean_losses
from autoac_solver.plan_record import PlanRecord, RegionPlan
from autoac_solver.profile import NEVER

Model = TypeVar("Model", bound=torch.nn.Module)


class Plan:
    """What to save and what to recompute in one training step of one model.

    Made by `autoac.plan` or `autoac.solve`; `Plan.load` reads one from a file, which runs no code from it.
    """

    def __init__(self, record: PlanRecord):
        self.record = record

    @functools.cached_property
    def _id(self) -> str:
        """Tells on a model whose decisions it carries; a plan that was saved and loaded is the same plan."""
        decisions = [(region.fqn, region.call, region.wrapped, region.steps) for region in self.regions]
        content = repr((self.record.model_fingerprint, self.engine, decisions, self.record.chunked_losses))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    # -- what it says ------------------------------------------------------------------------------------------

    @property
    def predicted_peak_bytes(self) -> int:
        """Largest number of live bytes during the planned step, resident bytes included."""
        return self.record.predicted_peak_bytes

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
        """ "replay" or "sac"."""
        return self.record.engine

    @property
    def regions(self) -> tuple[RegionPlan, ...]:
        """The regions: module name, call, whether it is wrapped, and the decision for each of its ops."""
        return self.record.regions

    @property
    def decisions(self) -> pd.DataFrame:
        """One row a value: region, module, op, bytes, decision ("save", "recompute" or "skip"), time_s."""
        return self.record.decisions

    def memory_timeline(self) -> pd.DataFrame:
        """One row an op of the planned step: op, module, phase, live_bytes in all and by kind of memory."""
        return self.record.timeline

    def explain(self) -> str:
        """The plan in words: the peak and who holds it, what is recomputed at what price, what more memory buys."""
        return explain(self.record)

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
        return self.record.plot_memory(axes, measured)

    def __repr__(self) -> str:
        return str(self.record)

    def _repr_html_(self) -> str:
        return self.record._repr_html_()

    # -- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            FileNotFoundError: there is no folder to write it in.
            IsADirectoryError: there is a folder of that name.
        """
        self.record.save(path)

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
        _check_is_module(model)
        self._check(model)
        inner = unwrapped(model)
        self._try_chunked_losses(inner)
        try:
            programs_of = self._programs
            compiled = compiled_modules(inner)
            for fqn in to_uncompile(compiled, programs_of, self.engine):
                uncompile(compiled[fqn], self._id)
            attach_losses(inner, self._losses, self.record.chunked_losses, self._id)
            for fqn, programs in programs_of.items():
                for program in programs:
                    program.warned = False  # to be said anew, of this model
                attach(inner.get_submodule(fqn), programs, self.engine, self._id)
            pauses = [pause for calls in programs_of.values() for p in calls for pause in p.pauses.values()]
            for fqn in {pause.fqn for pause in pauses}:
                attach_pausing(inner.get_submodule(fqn), fqn, self._id)
            several = [fqn for fqn, programs in programs_of.items() if len(programs) > 1]
            if several and "" not in programs_of:
                calls = self.record.profile.calls_below_root(several)
                if calls is not None:
                    attach_root(inner, *calls, self._id)
        except BaseException:
            for module in filter(planned, inner.modules()):
                detach(module)
            self._recompile(inner)
            raise
        return model

    def _try_chunked_losses(self, model: torch.nn.Module) -> None:
        """Warn if the device's kernels do not give the same bits by chunks; tried here, so that no step pays for it."""
        device = device_of(model).type
        if not self.record.chunked_losses or device not in ("cpu", "cuda"):
            return
        dtypes = sorted({loss.dtype for loss in chunkable_losses(self.record.profile)})
        if not all(same_by_chunks(device, getattr(torch, dtype)) for dtype in dtypes):
            warnings.warn(
                f"a cross entropy over chunks of rows does not give the same bits on {device} for {', '.join(dtypes)}, "
                "so this plan's loss is computed as a whole: its peak may lie above the prediction. Plan with "
                'policies=[autoac.Policy("MUST_SAVE", op="aten._log_softmax*")] instead.',
                stacklevel=3,
            )

    def remove(self, model: Model) -> Model:
        """Take the plan off the model, which is then exactly as it was before, and return it.

        Raises:
            PlanMismatchError: this plan is not on the model, or somebody has put another forward over it since.
        """
        _check_is_module(model)
        modules = {
            name: module
            for name, module in model.named_modules()
            if (carried := planned(module)) is not None and carried.plan_id == self._id
        }
        if not modules and (self._programs or self._losses):
            raise PlanMismatchError("this plan is not applied to this model, so there is nothing to remove.")
        for name, module in modules.items():
            if covered(module):
                raise PlanMismatchError(
                    f"module {name!r} was given another forward after the plan was applied (some libraries wrap it): "
                    "undo that first, then remove the plan."
                )
        for module in modules.values():
            detach(module)
        self._recompile(model)
        return model

    def _recompile(self, model: torch.nn.Module) -> None:
        """Let the modules run compiled again that this plan has made run uncompiled."""
        for module in model.modules():
            if uncompiled_by(module) == self._id:
                recompile(module)

    @contextlib.contextmanager
    def applied(self, model: Model) -> Iterator[Model]:
        """Context in which the plan is on the model."""
        self.apply(model)
        try:
            yield model
        finally:
            self.remove(model)

    @functools.cached_property
    def _programs(self) -> dict[str, list[Program]]:
        """The programs of each module that has anything to recompute, one for each of its calls.

        They stay the same objects however often the plan is applied: torch's compiler takes another one for other code.
        """
        programs: dict[str, list[Program]] = {}
        for region in self.regions:
            untouched = Program(region.fqn, (), wrapped=False)
            calls = programs.setdefault(region.fqn, [untouched] * region.calls)
            pauses = self.record.pauses(region) if region.wrapped else ()
            calls[region.call] = Program(region.name, region.steps, region.wrapped, pauses)
        return {fqn: calls for fqn, calls in programs.items() if any(program.wrapped for program in calls)}

    @functools.cached_property
    def _losses(self) -> dict[str, tuple[str | None, ...]]:
        """As for `attach_losses`."""
        return lean_losses(self.record.profile)

    @property
    def is_not_followed(self) -> bool:
        """Whether a region has run ops that the profiled step did not run, since the plan was last applied (replay)."""
        return any(program.warned for programs in self._programs.values() for program in programs)

    @contextlib.contextmanager
    def _taken_off(self, model: torch.nn.Module) -> Iterator[None]:
        """Context in which this plan is not on the model, if it is."""
        _check_is_module(model)
        carried = [found.plan_id for module in model.modules() if (found := planned(module)) is not None]
        if self._id not in carried:
            yield
            return
        self.remove(model)
        try:
            yield
        finally:
            self.apply(model)

    def _check(self, model: torch.nn.Module) -> None:
        if any(planned(module) for module in model.modules()):
            raise PlanMismatchError(
                "this model has a plan applied already: call remove(model) on that plan before applying another."
            )
        model = unwrapped(model)
        found = model_fingerprint(model)
        if found == self.record.model_fingerprint:
            self._check_device(device_of(model).type)
            return
        if inner := self._place_in(model):
            raise PlanMismatchError(
                f"this plan was made for {self.record.model}, which this {type(model).__name__} holds as {inner}: "
                f"apply the plan to {inner}, or to the model before it is wrapped."
            )
        missing = [r.fqn for r in self.regions if r.fqn not in dict(model.named_modules())]
        detail = f"; it has no module {missing[0]!r}" if missing else ""
        raise PlanMismatchError(
            f"this plan was made for {self.record.model} (fingerprint {self.record.model_fingerprint}), and this "
            f"{type(model).__name__} is another one or has changed since (fingerprint {found}){detail}. Modules, "
            "parameter shapes, dtypes and which parameters are frozen must be those that were profiled: plan again "
            "for the model as it is."
        )

    def _place_in(self, model: torch.nn.Module) -> str:
        """Where a module of the model is the one that this plan was made for, as code; "" if none is."""
        for name, module in model.named_modules():
            if type(module).__name__ != self.record.model:
                continue  # a fingerprint takes a while
            if model_fingerprint(module) == self.record.model_fingerprint:
                is_path = all(part.isidentifier() for part in name.split("."))
                return f"model.{name}" if is_path else f"model.get_submodule({name!r})"
        return ""

    def _check_device(self, found: str) -> None:
        """A model on the meta device computes nothing; any other must be on the kind of device that was planned for."""
        planned_for = self.record.device.split(":")[0]
        if found not in (planned_for, "meta"):
            raise PlanMismatchError(
                f"this plan was made for {self.record.model} on {self.record.device}, and the model is on {found}: "
                "bytes, times and ops are other ones there. Move the model before applying the plan, or plan again."
            )

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
        if self.engine != "sac":
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

    # -- trust -------------------------------------------------------------------------------------------------

    def verify(
        self, model: torch.nn.Module, sample: Any, loss: Callable[[Any], torch.Tensor] | None = None
    ) -> Report:
        """Run one step with the plan and one without from the same state, and compare.

        The model and the sample are left as they were: if this plan is on the model, so it is afterwards.

        Args:
            model, sample, loss: as for `autoac.plan`.

        Returns:
            Whether loss, gradients, buffers and random states are equal to the bit, predicted and measured peak, and
            the ratio of the step times; where something differs, the first op or parameter that does.

        Raises:
            PlanMismatchError: the plan is not for this model.
            ProfilingError: a callable step leaves nothing to compare: no loss, no gradients, no optimizer's step.
        """
        with self._taken_off(model):
            self._check(model)
            return verify(self, unwrapped(model), sample, loss)

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
            ValueError: the model is not on CPU.
            ProfilingError: the step ran other ops than the plan was made for.
        """
        with self._taken_off(model):
            self._check(model)
            return measured_memory(self, unwrapped(model), sample, loss)


def _check_is_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise PlanMismatchError(f"model is a {type(model).__name__}, not a torch.nn.Module.")


class Tradeoff(curve.Tradeoff):
    """A `autoac_solver.curve.Tradeoff` whose plans can be put on models."""

    @classmethod
    def of(cls, found: curve.Tradeoff) -> Tradeoff:
        """The same curve."""
        return cls(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})

    @functools.cached_property
    def plans(self) -> Sequence[Plan]:
        """The plan of each row; it is made when it is first looked at."""
        return curve.Lazy(len(self.points), lambda row: Plan(self.record(row)))
