"""Modules that a later step calls and the planned step did not, or not as often.

Skipped layers, experts without a token, a block that is called a drawn number of times.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from autoac.execute.watch.unplanned_calls import UnplannedCalls
from autoac.step.uncompiled import compiled_modules, is_inside
from autoac.torch_private import (
    is_compiled_wrapper,
    remove_forward_hooks,
    remove_forward_pre_hooks,
    untraced,
)
from autoac.warned import warn

MostCalls = Mapping[str, tuple[int, int]]
"""As `StepFacts.most_calls`."""

_DEEPEST = 32
"""Modules nested deeper get no hooks: with one, a call takes more of the interpreter's stack."""
_MOST_TIMES = 16
"""Calls are not counted where there is room for so many times those that were planned for."""


class Newcomer:
    """A forward pre-hook of a module that the planned step did not call.

    Args:
        name: the module's name.
        called: a set that gets the name when the module is called.
    """

    compiled_code_may_skip = True

    def __init__(self, name: str, called: set[str]):
        self.name = name
        self.called = called

    def __deepcopy__(self, memo: dict[int, Any]) -> Newcomer:
        return Newcomer(self.name, set())  # a copy of the model is trained on its own

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Note the call of a training step, if autograd may record something in it."""
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        known = itertools.chain(args, module.parameters())
        if any(t.requires_grad for t in known if isinstance(t, torch.Tensor)):
            self.called.add(self.name)
            self.told()

    def told(self) -> None:
        """The call was noted."""


class UnplannedModule(Newcomer):
    """Warns of the first call of any of the modules that the planned step did not call.

    Args:
        may_take_more: the end of a sentence on a step, as of `UnplannedCalls`.
    """

    def __init__(self, name: str, called: set[str], may_take_more: str):
        super().__init__(name, called)
        self.may_take_more = may_take_more

    def __deepcopy__(self, memo: dict[int, Any]) -> UnplannedModule:
        return self  # a copy of the model has the plan, too

    def told(self) -> None:
        """Warn of the first one; modules inside of it are called later."""
        if len(self.called) == 1:
            self.called.add("")
            warn(
                f"module {self.name!r} is called, and the planned step did not call it, so this step "
                f"{self.may_take_more}. Plan a step that calls it: autoac.plan(model, step, ...) with a function that "
                "runs it, or autoac.Samples with one sample of each kind."
            )


def watch_newcomers(model: torch.nn.Module, known: Collection[str], warns: str = "") -> set[str]:
    """Note the calls of modules that are not known, until `unwatch_other_calls`.

    Args:
        known: names of the modules that the planned step called.
        warns: if not empty, warn of such calls; see `UnplannedModule.may_take_more`.

    Returns:
        A set that collects the names of those that are called.
    """
    called: set[str] = set()
    for name, module in model.named_modules():
        # `torch.compile`'s wrapper is no module of its own: calls of the one in it are recorded. Scripted modules have
        # neither recorded calls nor hooks. The model itself says nothing: a step may have called its parts.
        if (
            not name
            or name in known
            or name.count(".") >= _DEEPEST
            or is_compiled_wrapper(module)
            or isinstance(module, torch.jit.ScriptModule)
        ):
            continue
        # Codebooks are trained by averages; what has no tensors of its own mostly saves next to nothing (`Identity`).
        if not any(p.requires_grad for p in module.parameters()) and not any(True for _ in module.buffers()):
            continue
        newcomer = UnplannedModule(name, called, warns) if warns else Newcomer(name, called)
        module.register_forward_pre_hook(newcomer)
    return called


class CallCounts:
    """Counts calls of the model's modules within each call of it, from `begins` to `ends`.

    Args:
        planned: module -> calls planned for, and the bytes that each saves, see `StepFacts.most_calls`.
        unplanned: knows what is planned for.
        warns: warn of the first call of the model that has more of them.

    Attributes:
        words: the beginning of a sentence on a module called more often than there is room for; "" if none was, since
            the plan was put on or they were `taken`.
    """

    def __init__(self, planned: MostCalls, unplanned: UnplannedCalls, warns: bool):
        self._planned = planned
        self._unplanned = unplanned
        self._warns = warns
        self._counts = threading.local()
        self.words = ""
        self._is_told = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCounts:
        return memo.setdefault(id(self), CallCounts(self._planned, self._unplanned, self._warns))

    def __reduce__(self) -> Any:
        return CallCounts, (self._planned, self._unplanned, self._warns)

    def begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A call of the model begins in this thread. One that is larger than planned for has other warnings."""
        is_larger = self._unplanned.is_larger(args, kwargs)
        self._counts.of_call = None if is_larger else Counter[str]()

    def count(self, name: str) -> None:
        """A module is called, with gradients on."""
        counts: Counter[str] | None = getattr(self._counts, "of_call", None)
        if counts is not None:
            counts[name] += 1

    def ends(self) -> None:
        """The call of the model is over: calls of modules from here on are not part of it."""
        counts: Counter[str] = getattr(self._counts, "of_call", None) or Counter()
        self._counts.of_call = None
        more = outermost([name for name, times in counts.items() if times > self._planned[name][0]])
        further_bytes = sum((counts[name] - self._planned[name][0]) * self._planned[name][1] for name in more)
        if further_bytes <= self._unplanned.room_bytes:
            return
        planned = self._planned[more[0]][0]
        self.words = (
            f"module {more[0]!r} is called {counts[more[0]]} times in one call of the model, and "
            f"{'once' if planned == 1 else f'{planned} times'} in the planned step"
        )
        if self._warns and not self._is_told:
            warn(
                f"{self.words}, so this step {self._unplanned.may_take_more}. Plan a step that calls it as often as "
                "any: autoac.plan(model, step, ...) with a function that runs it, or leave headroom (headroom=)."
            )
            self._is_told = True

    def taken(self) -> str:
        """The words, which are forgotten."""
        words, self.words = self.words, ""
        return words


class Counting:
    """A forward pre-hook of the model, and with `ends` a forward hook: begins or ends counting."""

    compiled_code_may_skip = True

    def __init__(self, counts: CallCounts, ends: bool = False):
        self.counts = counts
        self.ends = ends

    @untraced
    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any
    ) -> None:
        """A call of the model begins or is over."""
        if torch.compiler.is_compiling():
            return
        if self.ends:
            self.counts.ends()
        elif module.training and torch.is_grad_enabled():
            self.counts.begins(args, kwargs)


class Counted:
    """A forward pre-hook of a module that the planned step called."""

    compiled_code_may_skip = True

    def __init__(self, name: str, counts: CallCounts):
        self.name = name
        self.counts = counts

    @untraced
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Count the call."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            self.counts.count(self.name)


def watch_more_calls(
    model: torch.nn.Module, planned: MostCalls, unplanned: UnplannedCalls, warns: bool = False
) -> CallCounts:
    """Count the calls of these modules, until `unwatch_other_calls`.

    With `warns` hooks of the model begin and end the counting, else the caller does.
    Compiled code does not count: modules in it are left out, and all are where there is ample room.

    Args: as for `CallCounts`.
    """
    counts = CallCounts(planned, unplanned, warns)
    compiled = list(compiled_modules(model))
    all_bytes = sum(times * size for times, size in map(planned.__getitem__, outermost(planned)))
    if unplanned.room_bytes >= _MOST_TIMES * all_bytes:
        return counts
    modules = dict(model.named_modules())
    there = (n for n in planned if n in modules and n.count(".") < _DEEPEST)
    watched = [n for n in there if not any(is_inside(n, other) for other in compiled)]
    for name in watched:
        modules[name].register_forward_pre_hook(Counted(name, counts))
    if watched and warns:
        model.register_forward_pre_hook(Counting(counts), with_kwargs=True)
        model.register_forward_hook(Counting(counts, ends=True), with_kwargs=True)
    return counts


def outermost(names: Collection[str]) -> list[str]:
    """The names without those of modules nested in others."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def unwatch_other_calls(model: torch.nn.Module) -> None:
    """Remove the hooks, if they are there."""
    for module in model.modules():
        remove_forward_pre_hooks(module, (Newcomer, Counted, Counting))
        remove_forward_hooks(module, Counting)
