"""Captures the arguments of region calls in the user's own step, or in a step of the user's loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoac.device import device_for
from autoac.execute.compiled.idle_hooks import busy_hooks_inside, without_idle_hooks
from autoac.ops.geometry import clone_with_geometry
from autoac.step.autocast import autocasts
from autoac.step.inputs import described
from autoac.step.model import device_of
from autoac.step.restore import own_gradient
from autoac.step.step import TrainingStep
from autoac.step.trial import trial
from autoac.step.uncompiled import uncompiled
from autoac.step.units import has_units, roots_of_units
from autoac.torch_private import (
    disable_dispatch_modes,
    disable_dynamo,
    is_dense,
    is_unit,
    reset_units,
    tree_flatten,
    tree_map,
    without_hooks,
)
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import Profile

Call = tuple[str, int]
"""A module's name, and the number of its call with gradients on."""


@dataclass(frozen=True)
class Captured:
    """One call of a module, or of a tail: what its own code does after the calls of some modules in it.

    Args:
        module: the called module.
        args, kwargs: copies of the call's arguments; tensors that need a gradient are leaves here.
        autocast: device and dtype of each autocast that was on.
        hooked: name of a module in it that had hooks during the call, "" if none had; some models add them in forward.
        children: for a tail, the names that these modules have in this one.
        results: copies of what they returned, by these names; as `args`. Alike ones, but for the last, are one copy.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: tuple[tuple[str, torch.dtype], ...]
    hooked: str
    children: tuple[str, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    _now: dict[str, Any] = field(default_factory=dict)
    _returned: set[str] = field(default_factory=set)
    _when_in_tail: list[Callable[[], object]] = field(default_factory=list)

    @property
    def given(self) -> Any:
        """All that the region is given."""
        return self.args, self.kwargs, self.results

    def arguments(self, own: bool = False) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """`given`, as the region's code gets it: tensors that need a gradient are results of ops.

        Args:
            own: nobody else holds any of the tensors.
        """
        return _each_once(_computed, _each_once(_copy, self.given) if own else self.given)

    @property
    def described(self) -> str:
        """The arguments, as `step.inputs.described` tells them during the call."""
        with self.around():
            return described(self.args, self.kwargs)

    @contextlib.contextmanager
    def around(
        self, results: Mapping[str, Any] | None = None, when_in_tail: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Context: the autocast of the call, no idle hooks, and for a tail modules that only return what they did.

        Args:
            results: from `arguments`.
            when_in_tail: called once all these modules have returned.
        """
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            stack.enter_context(without_idle_hooks(self.module))
            self._returned.clear()
            self._when_in_tail[:] = [when_in_tail] if when_in_tail else []
            for name, result in (results or {}).items():
                stack.enter_context(self._returning(name, result))
            yield

    def is_in_tail(self) -> bool:
        """Within `around`: whether all these modules have returned."""
        return len(self._returned) == len(self.children)

    @contextlib.contextmanager
    def _returning(self, name: str, result: Any) -> Iterator[None]:
        module = self.module.get_submodule(name)
        before = module.__dict__.get("forward")
        self._now[name] = result
        module.__dict__["forward"] = self._stand_ins[name]
        try:
            with without_hooks(module) if is_unit(module) else contextlib.nullcontext():
                yield
        finally:
            del self._now[name]
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

    @functools.cached_property
    def _stand_ins(self) -> dict[str, Callable[..., Any]]:
        """For each module of `results` a forward; always the same one, for which code is compiled once."""

        def of(name: str) -> Callable[..., Any]:
            def returns(*args: Any, **kwargs: Any) -> Any:
                self._returned.add(name)
                while self.is_in_tail() and self._when_in_tail:
                    self._when_in_tail.pop()()
                return self._now[name]

            return disable_dynamo(returns, "it stands in for a module")

        return {name: of(name) for name in self.results}


class _Enough(BaseException):
    """Ends the step once all calls are captured. A `BaseException`, so that user code does not catch it."""


@dataclass(frozen=True)
class Tail:
    """Kind of a call of which only the tail is caught.

    Args:
        children: names, in the called module, of the modules called before the tail.
        sample: what the step was called with, as `described` tells it.
    """

    children: tuple[str, ...]
    sample: str


Caught = list[tuple[Captured, list[Call]]]
"""Groups of alike calls, each with the arguments of its first call."""


_CATCHES = "autoac catches what a block is called with"


class Catcher:
    """Catches the arguments of calls of some modules, in one step or in several.

    Args:
        kinds: as for `want`.

    Attributes:
        missing: the calls that are still to be caught.
    """

    def __init__(self, model: torch.nn.Module, kinds: Mapping[Call, Hashable]):
        self._model = model
        self._kinds: dict[Call, Hashable] = {}
        self._groups: dict[Hashable, tuple[Captured, list[Call]]] = {}
        self._counts: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._open: tuple[Captured, Call] | None = None  # a tail, before which modules are still to return
        self.missing: set[Call] = set()
        self._now: set[Call] = set()  # caught since `put_on`
        self.want(kinds)

    def want(self, kinds: Mapping[Call, Hashable]) -> None:
        """Catch these calls, too; those that were caught as another kind anew.

        Args:
            kinds: a key per call. Calls are alike if they share it and the types, shapes and `requires_grad` of their
                arguments.
        """
        for call, kind in kinds.items():
            if self._kinds.get(call) != kind:
                self._kinds[call] = kind
                self.missing.add(call)
                self._drop(call)

    def put_on(self) -> None:
        """Catch the calls of the step that begins; each module's are counted."""
        self.take_off()
        self._counts.clear()
        # Of a step that was not recorded to its end, it is not known what they were.
        for call in [*self._now, *([self._open[1]] if self._open is not None else [])]:
            self._drop(call)
            self.missing.add(call)
        self._now.clear()
        self._open = None
        for name in {name for name, _ in self._kinds}:
            hook = functools.partial(self._catch, name)
            module = self._model.get_submodule(name)
            self._hooks.append(
                module.register_forward_pre_hook(disable_dynamo(hook, _CATCHES), with_kwargs=True)
            )
        for name, child in {(n, child) for (n, _), kind in self._kinds.items() for child in _children(kind)}:
            module = self._model.get_submodule(name).get_submodule(child)
            hook = disable_dynamo(functools.partial(self._catch_result, child), _CATCHES)
            self._hooks.append(module.register_forward_hook(hook))

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is being called: its hooks have run before `put_on`."""
        if any(name == "" for name, _ in self._kinds):
            self._catch("", self._model, args, kwargs)

    def take_off(self) -> None:
        """Catch no more calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def caught(self) -> Caught:
        """The calls caught so far, by equal modules and inputs."""
        return list(self._groups.values())

    def caught_of(self, kinds: Mapping[Call, Hashable]) -> Caught:
        """Those of these calls that were caught as these kinds."""
        has = {call for call, kind in kinds.items() if self._kinds.get(call) == kind} - self.missing
        found = [(region, [call for call in calls if call in has]) for region, calls in self._groups.values()]
        return [(region, calls) for region, calls in found if calls]

    def is_over(self, kinds: Mapping[Call, Hashable]) -> None:
        """The step that began with `put_on` was recorded: its calls are of these kinds, and may be of no others.

        With inputs of another size, for example, they are not those that were to be caught.
        """
        for key, (region, calls) in list(self._groups.items()):
            wrong = [call for call in calls if call in self._now and kinds.get(call) != self._kinds[call]]
            if not wrong:
                continue
            # The arguments are those of the first.
            kind = kinds.get(calls[0]) if calls[0] == wrong[0] else None
            assert isinstance(key, tuple)
            again = kind, *key[1:]
            is_known = kind is not None and _children(kind) == region.children and again not in self._groups
            for call in wrong:
                self._drop(call)
                self.missing.add(call)
                if is_known and kinds.get(call) == kind:
                    self.missing.remove(call)
                    self._kinds[call] = kind
                    self._groups.setdefault(again, (region, []))[1].append(call)
        self._now.clear()

    def _drop(self, call: Call) -> None:
        for kind, (_, calls) in list(self._groups.items()):
            if call in calls:
                calls.remove(call)
                if not calls:
                    del self._groups[kind]

    def _catch(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        call = self._counts[name] = self._counts.get(name, -1) + 1
        if (name, call) not in self.missing:
            return
        known = self._kinds[name, call]
        children = _children(known)
        hooked = busy_hooks_inside(module, children)
        kind = known, _described((args, kwargs)), autocasts(), hooked
        if kind not in self._groups:
            with disable_dispatch_modes():  # a step that is being recorded does not see the copies
                own, named = _each_once(_copy, (args, kwargs))
                region = Captured(module, own, named, autocasts(), hooked, children)
            self._groups[kind] = region, []
        self._groups[kind][1].append((name, call))
        region, calls = self._groups[kind]
        if len(calls) == 1 and children:
            self._open = region, (name, call)
        else:
            self._found((name, call))

    def _catch_result(self, child: str, module: torch.nn.Module, args: Any, result: Any) -> None:
        if self._open is None or not torch.is_grad_enabled():
            return
        region, call = self._open
        is_last = len(region.results) == len(region.children) - 1
        # What blocks hand to each other is alike: one copy stands for all, as there may be many.
        alike = (known for known in region.results.values() if _described(known) == _described(result))
        known = None if is_last else next(alike, None)
        with disable_dispatch_modes():
            region.results[child] = _each_once(_copy, result) if known is None else known
        if is_last:
            self._open = None
            self._found(call)

    def _found(self, call: Call) -> None:
        self.missing.remove(call)
        self._now.add(call)
        if not self.missing:
            self.when_complete()

    def when_complete(self) -> None:
        """Called when the last of the calls was caught."""
        self.take_off()


class _UntilComplete(Catcher):
    def when_complete(self) -> None:
        raise _Enough


def _children(kind: Hashable) -> tuple[str, ...]:
    return kind.children if isinstance(kind, Tail) else ()


def written_parameters(
    profile: Profile, model: torch.nn.Module, forward_only: bool = False
) -> list[torch.nn.Parameter]:
    """Parameters that the recorded step writes: an embedding with `max_norm`, statistics, optimizers in backward.

    Args:
        forward_only: leave out what is written in backward or after it.
    """
    stored = profile.storage_table
    written = {s for op in profile.tape if not (forward_only and op.backward) for s in op.writes}
    names = {stored[s].name for s in written if stored[s].kind == "Parameter"}
    return [p for name, p in model.named_parameters(remove_duplicate=False) if name in names]


def captured(
    step: TrainingStep, kinds: Mapping[Call, Hashable], written: Iterable[torch.Tensor] = ()
) -> Caught:
    """Catch calls of some modules in the user's own step, which ends after the last of them unless FSDP2 is in it.

    Autograd tracks `requires_grad` but saves no tensors, so that forward takes no more memory than without gradients.
    A callable step may run backward, so there tensors are saved, in the host's memory.

    Args:
        kinds: as for `Catcher`.
        written: parameters that forward writes; they are copied.

    Raises:
        ProfilingError: the step does not make one of the calls.
    """
    model = step.model
    # A step that ended in the middle would leave units of FSDP2 in the middle of theirs.
    catcher = Catcher(model, kinds) if has_units(model) else _UntilComplete(model, kinds)
    on_host = device_for(device_of(model)).on_hosts_processors
    changed = [*(model.parameters() if step.is_whole else written), *model.buffers()]
    keeps_nothing = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _unpacked)
    with (
        trial(
            model,
            step.inputs,
            changed,
            gradient=_copied if step.is_whole else own_gradient,  # only a whole step runs backward
        ) as restorer,
        uncompiled(model),
    ):
        restorer.later(catcher.take_off)
        catcher.put_on()
        with contextlib.suppress(_Enough):
            if step.is_whole:  # the plan that makes it fit is still to come
                with contextlib.nullcontext() if on_host else torch.autograd.graph.save_on_cpu():
                    step.run()
            else:
                with keeps_nothing:
                    step.forward()
        for root in roots_of_units(model):  # no backward has followed
            reset_units(root)
    if catcher.missing:
        raise ProfilingError(
            f"module {min(catcher.missing)[0]!r} was called in the recorded step and not in the next one, so it cannot "
            "be compiled and measured. Have the step call the same modules each time."
        )
    return catcher.caught


def _copied(leaf: torch.Tensor) -> torch.Tensor | None:
    """A copy of a leaf's gradient, for a step that adds to it in place."""
    return None if leaf.grad is None else leaf.grad.clone()


def _described(value: Any) -> Hashable:
    """The properties of arguments that the compiler specialises for."""
    leaves, structure = tree_flatten(value)
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves) if _is_tensor(leaf))
    return str(structure), tuple(map(_of_leaf, leaves)), same


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        strides = leaf.stride() if leaf.layout is torch.strided else ()
        return type(leaf), tuple(leaf.shape), strides, leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _unpacked(_: Any) -> Any:
    raise ProfilingError(
        "the model goes backward within its forward, so its regions cannot be caught for compiling: pass a callable "
        "sample that runs the whole step."
    )


def _each_once(make: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """Apply a function to each tensor but parameters; one that is passed twice (`attention(x, x, x)`) stays one."""
    made: dict[int, torch.Tensor] = {}

    def of(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, torch.nn.Parameter):
            return value
        if id(value) not in made:
            made[id(value)] = make(value)
        return made[id(value)]

    return tree_map(of, values)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf with the same values and strides."""
    value = tensor.detach()
    return (clone_with_geometry(value) if _has_gaps(value) else value.clone()).requires_grad_(
        tensor.requires_grad
    )


def _computed(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    # A clone would have no gaps: other code would be compiled.
    return tensor.view_as(tensor) if _has_gaps(tensor) else tensor.clone()


def _has_gaps(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor's elements lie with gaps or overlap (slices, expanded tensors)."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not is_dense(tensor)
