"""Put a plan on a model, and take it off again."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from autoac.device import device_for
from autoac.execute.attach import attach, attach_losses, attach_root, check_no_units, covered, detach
from autoac.execute.cross_entropy.chunked import same_by_chunks
from autoac.execute.cross_entropy.lean import same_in_place
from autoac.execute.engines import ENGINES, check_runnable
from autoac.execute.on_top import owned_with
from autoac.execute.plan_programs import PlanPrograms
from autoac.execute.watch.following import Following, unwatch_following, watch_following
from autoac.execute.watch.other_calls import unwatch_other_calls, watch_more_calls, watch_newcomers
from autoac.execute.watch.unplanned_backward import unwatch_backward, watch_backward
from autoac.execute.watch.unplanned_calls import UnplannedCalls, unwatch_calls, watch_calls
from autoac.step.carried import planned
from autoac.step.model import (
    device_of,
    model_fingerprint,
    trained_parameters,
    unwrapped,
)
from autoac.step.uncompiled import compiled_modules, recompile_all, to_uncompile, uncompile, uncompile_around
from autoac.step.units import own_name
from autoac.torch_private import note_untried
from autoac.warned import warn
from autoac_solver.allocator.options import options_in_environment, same_options
from autoac_solver.records.devices import kind_of
from autoac_solver.records.errors import PlanMismatchError
from autoac_solver.records.plan import PlanRecord, names_in
from autoac_solver.records.profile import (
    GRAPH_OF_BACKWARD,
    IN_EVAL,
    NO_AUTOCAST_IN_BACKWARD,
    OWN_CHECKPOINTING,
    SIZED_BY_VALUES,
    VARYING,
)


class _WeakModel:
    """A model that a plan is on, not kept alive; copies and pickles are on none."""

    def __init__(self, model: torch.nn.Module | None = None):
        self._ref = None if model is None else weakref.ref(model)

    def __reduce__(self) -> Any:
        return _WeakModel, ()

    def is_it(self, model: torch.nn.Module) -> bool:
        """Whether it is this one."""
        return self._ref is not None and self._ref() is model


class Placement:
    """Puts a plan on models and takes it off again.

    Args:
        record: the plan.

    Attributes:
        carriers: names of the modules that it was attached to last.
    """

    def __init__(self, record: PlanRecord):
        self.record = record
        self._programs = PlanPrograms(record)
        self._unplanned = UnplannedCalls("", 0, 0)  # until `prepare`
        self.carriers: tuple[str, ...] = ()
        self._on = _WeakModel()  # that it is attached to

    @functools.cached_property
    def plan_id(self) -> str:
        """Marks the modules that carry this plan: a hash of its decisions, stable across saving and loading."""
        decisions = [
            (region.fqn, region.call, region.wrapped, region.steps, region.point)
            for region in self.record.regions
        ]
        content = repr(
            (self.record.model_fingerprint, self.record.engine, decisions, self.record.chunked_losses)
        )
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def put_on(self, model: torch.nn.Module) -> None:
        """Put the plan on the model.

        Raises:
            PlanMismatchError: the model is not the one that was profiled, or it has a plan already. Nothing is changed.
        """
        self.prepare(model)
        inner = unwrapped(model)
        self.attach(inner)
        if ENGINES[self.record.engine].eager_only and self._programs.of_modules:
            uncompile_around(model, self.plan_id)
        self._unwatch(inner)  # a plan that recomputes nothing leaves no other trace
        if self._programs.of_modules:
            watch_following(inner, self._programs.following)
        watch_calls(inner, self._unplanned)
        self.watch_backward(inner)
        if not self.record.others and {VARYING, SIZED_BY_VALUES}.isdisjoint(self.record.step.facts):
            watch_newcomers(inner, self.record.step.called, warns=self._unplanned.may_take_more)
        if not self.record.others:
            watch_more_calls(inner, self.record.step.most_calls, self._unplanned, warns=True)

    def prepare(self, model: torch.nn.Module) -> None:
        """The part of `put_on` that does not touch the model: checks, kernel tests, re-arming the warnings.

        Raises:
            PlanMismatchError: as for `put_on`.
        """
        self.check(model)
        check_runnable(self.record.engine)
        note_untried()
        self._compare_allocator()
        self._try_losses(unwrapped(model))
        self._programs.following.start_anew(waits=True)
        step = self.record.step
        self._unplanned = UnplannedCalls(
            *(step.sample, self.record.predicted_peak_bytes, self.record.budget_bytes),
            others=self.record.others,
            following=self._programs.following,
            one_call=step.one_call,
            in_eval=IN_EVAL in step.facts,
            trained=trained_parameters(unwrapped(model)),
            checkpointed=OWN_CHECKPOINTING in step.facts,
            plan_id=self.plan_id,
        )
        for program in self._programs.all:
            program.warned = False
            program.not_compiled.clear()

    def attach(self, inner: torch.nn.Module) -> None:
        """Attach the programs to the model, after `prepare`. Adds no hooks that watch the model's calls.

        Args:
            inner: the model without wrappers.
        """
        try:
            programs_of = {**self._programs.of_modules, **self._programs.alike(inner)}
            compiled = compiled_modules(inner)
            eager_only = ENGINES[self.record.engine].eager_only
            for fqn in to_uncompile(compiled, programs_of, eager_only=eager_only):
                uncompile(compiled[fqn], self.plan_id)
            attach_losses(inner, self.record.losses, self.record.chunked_losses, eager_only, self.plan_id)
            for fqn, programs in programs_of.items():
                attach(inner.get_submodule(fqn), programs, self.record.engine, self.plan_id)
            own = (fqn for fqn in programs_of if planned(inner.get_submodule(fqn)) is not None)
            self.carriers = self._unplanned.carriers = tuple(own)
            self._on = _WeakModel(inner)
            if (several := self.record.several) is not None:
                attach_root(inner, several, self.plan_id)
        except BaseException:
            self._detach(inner, filter(planned, inner.modules()))
            raise

    def watch_backward(self, inner: torch.nn.Module) -> None:
        """Warn from now on if backward runs otherwise than in the profiled step; `take_off` ends it."""
        facts = self.record.step.facts
        watch_backward(inner, autocast=NO_AUTOCAST_IN_BACKWARD in facts, graph=GRAPH_OF_BACKWARD not in facts)

    def trains(self, model: torch.nn.Module) -> bool:
        """Whether a call of the model now belongs to a training step."""
        return self._unplanned.trains(model)

    def begins(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn if inputs are larger than planned for. For models without hooks: call it before each call."""
        self._unplanned(model, args, kwargs)

    def ends(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Warn if the call ran other ops than planned. For models without hooks: call it after each call."""
        self._programs.following.root_is_over(args, kwargs, model.training)
        self._unplanned.earlier(model, args, output)

    def share_earlier(self, other: Placement) -> None:
        """Count the calls under another plan among the earlier calls, from `prepare` on."""
        self._unplanned.earlier = other._unplanned.earlier

    def can_detach(self, model: torch.nn.Module) -> bool:
        """Whether `detach` is possible: no other code has replaced the plan's forwards."""
        return not any(map(covered, self._carriers(model).values()))

    def detach(self, inner: torch.nn.Module) -> None:
        """Undo `attach`."""
        self._detach(inner, self._carriers(inner).values())

    def _detach(self, inner: torch.nn.Module, carriers: Iterable[torch.nn.Module]) -> None:
        self._on = _WeakModel()
        for module in carriers:
            detach(module)
        recompile_all(inner, self.plan_id)

    def take_off(self, model: torch.nn.Module) -> None:
        """Take the plan off the model, restoring it exactly.

        Raises:
            PlanMismatchError: this plan is not on the model, or other code has replaced one of its forwards since.
        """
        _check_is_module(model)
        modules = self._carriers(model)
        is_on = self._on.is_it(unwrapped(model))  # all that carried it may be replaced
        if not (modules or is_on) and (self._programs.of_modules or self.record.losses):
            raise PlanMismatchError("this plan is not applied to this model, so there is nothing to remove.")
        for name, module in modules.items():
            if covered(module):
                raise PlanMismatchError(
                    f"module {name!r} was given another forward after the plan was applied (some libraries wrap it): "
                    "undo that first, then remove the plan."
                )
        self._detach(model, modules.values())
        if not any(map(planned, model.modules())):  # else another plan's
            self._unwatch(model)

    @staticmethod
    def _unwatch(model: torch.nn.Module) -> None:
        for module in model.modules():
            unwatch_calls(module)
            unwatch_following(module)
            unwatch_backward(module)
        unwatch_other_calls(model)

    def _carriers(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The modules that carry this plan, by name."""
        return {
            name: module
            for name, module in model.named_modules()
            if (carried := planned(module)) is not None and carried.plan_id == self.plan_id
        }

    @contextlib.contextmanager
    def taken_off(self, model: torch.nn.Module) -> Iterator[None]:
        """Context that takes this plan off the model, if it is on it, and puts it on again afterwards."""
        _check_is_module(model)
        if owned_with(model) is not None:
            raise PlanMismatchError(
                "autoac.auto (or a plan for each bucket) is on this model, and puts its plans on and takes them off: "
                "call remove() on its handle first."
            )
        if not self._carriers(model):
            yield
            return
        self._check_is_of(model)  # else it could not be put on again
        if words := self._unplanned.words_on_replaced(unwrapped(model)):
            raise PlanMismatchError(words)
        self.take_off(model)
        try:
            yield
        finally:
            self.put_on(model)

    def check(self, model: torch.nn.Module) -> None:
        """Check that the plan can be put on the model.

        Raises:
            PlanMismatchError: the plan was made for another model or device, or the model has a plan already.
        """
        _check_is_module(model)
        if any(planned(module) for module in model.modules()):
            raise PlanMismatchError(
                "this model has a plan applied already: call remove(model) on that plan before applying another."
            )
        self._check_is_of(model)

    def _check_is_of(self, model: torch.nn.Module) -> None:
        model = unwrapped(model)
        found = model_fingerprint(model)
        missing = sorted(names_in(self.record) - dict(model.named_modules(remove_duplicate=False)).keys())
        if found == self.record.model_fingerprint and not missing:
            self._check_device(device_of(model).type)
            for fqn, programs in self._programs.of_modules.items():
                children = {child for program in programs for child in program.children}
                check_no_units(model.get_submodule(fqn), fqn, children)
            return
        if inner := self._place_in(model):
            raise PlanMismatchError(
                f"this plan was made for {self.record.model}, which this {type(model).__name__} holds as {inner}: "
                f"apply the plan to {inner}, or to the model before it is wrapped."
            )
        detail = f"; it has no module {missing[0]!r}" if missing else ""
        raise PlanMismatchError(
            f"this plan was made for {self.record.model} (fingerprint {self.record.model_fingerprint}), and this "
            f"{type(model).__name__} is another one or has changed since (fingerprint {found}){detail}. Modules, "
            "parameter shapes, dtypes and which parameters are frozen must be those that were profiled: plan again "
            "for the model as it is."
        )

    def _place_in(self, model: torch.nn.Module) -> str:
        """The submodule that this plan was made for, as code ("model.encoder"); "" if there is none."""
        for name, module in model.named_modules():
            if own_name(module) != self.record.model:
                continue  # fingerprints are slow to compute
            if model_fingerprint(module) == self.record.model_fingerprint:
                is_path = all(part.isidentifier() for part in name.split("."))
                return f"model.{name}" if is_path else f"model.get_submodule({name!r})"
        return ""

    def _check_device(self, found: str) -> None:
        """Check that the model is on the planned kind of device, or on the meta device, where nothing is computed."""
        planned_for = kind_of(self.record.device)
        if found not in (planned_for, "meta"):
            raise PlanMismatchError(
                f"this plan was made for {self.record.model} on {self.record.device}, and the model is on {found}: "
                "bytes, times and ops are other ones there. Move the model before applying the plan, or plan again."
            )

    def _compare_allocator(self) -> None:
        """Warn if a budget of reserved memory was planned for other allocator options than this process has."""
        planned, here = self.record.allocator, "".join(options_in_environment().split())
        if self.record.budget_of == "reserved" and not same_options(planned, here):
            warn(
                f"this plan keeps reserved memory within its budget with PYTORCH_CUDA_ALLOC_CONF={planned!r}, and here "
                f"it is {here!r}: the allocator may reserve more. Set it as planned, or plan again here."
            )

    def _try_losses(self, model: torch.nn.Module) -> None:
        """Test the device's kernels for lean and chunked losses now, so that no step pays for it in time or bytes.

        Warns if a chunked loss gives other bits.
        """
        device = device_of(model).type
        if not self.record.losses or not device_for(device_of(model)).known:
            return
        dtypes = self.record.chunk_dtypes
        for dtype in _types({*self.record.step.log_softmax_dtypes, *dtypes}):
            same_in_place(device, dtype)
        if not all(same_by_chunks(device, dtype) for dtype in _types(dtypes)):
            warn(
                f"a cross entropy over chunks of rows does not give the same bits on {device} for {', '.join(dtypes)}, "
                "so this plan's loss is computed as a whole: its peak may lie above the prediction. Plan with "
                'policies=[autoac.Policy("MUST_SAVE", op="aten._log_softmax*")] instead.',
            )

    def unlooked(self) -> contextlib.AbstractContextManager[None]:
        """Context in which planned steps do not check recomputed values, because the caller checks the whole step."""
        return self._programs.unlooked()

    @property
    def not_compiled(self) -> dict[str, str]:
        """The compiler's error, by region, where it has failed for the planned inputs since the plan was put on."""
        return {
            program.region: error
            for programs in self._programs.of_modules.values()
            for program in programs
            for (inputs, _), error in program.not_compiled.items()
            if inputs == program.inputs or not program.inputs
        }

    @property
    def following(self) -> Following:
        """How the regions' calls differ from the profiled step, since the plan was last put on a model."""
        return self._programs.following


def _types(names: Iterable[str]) -> list[torch.dtype]:
    """The floating dtypes with these names; a file may hold any name."""
    found = [getattr(torch, name, None) for name in names]
    return [dtype for dtype in found if isinstance(dtype, torch.dtype) and dtype.is_floating_point]


def _check_is_module(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise PlanMismatchError(f"model is a {type(model).__name__}, not a torch.nn.Module.")
