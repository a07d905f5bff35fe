"""Modules that a later step calls and the planned step did not, or not as often.

Skipped layers, experts without a token, a block that is called a drawn number of times.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch

from autoac.step.uncompiled import compiled_modules, is_inside
from autoac.torch_private import in_backward, is_compiled_wrapper, remove_forward_pre_hooks, untraced
from autoac.warned import warn

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
        """Note the call of a training step."""
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
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
    """Note the calls of trained modules that are not known, until `unwatch_newcomers`.

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
            or is_compiled_wrapper(module)
            or isinstance(module, torch.jit.ScriptModule)
        ):
            continue
        if any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(
                UnplannedModule(name, called, warns) if warns else Newcomer(name, called)
            )
    return called


class CallCounts:
    """Counts calls of the model's modules within each call of it. A forward pre-hook of the model; see `begins`.

    Args:
        planned: module -> calls planned for, and the bytes that each saves, see `StepFacts.most_calls`.
        room_bytes: what the step may take more than planned.
        warns: as for `watch_newcomers`.

    Attributes:
        more: module -> its most calls, where that is more than planned for and has no room; forgotten by `taken`.
        found: there was one since the plan was put on.
    """

    compiled_code_may_skip = True

    def __init__(self, planned: Mapping[str, tuple[int, int]], room_bytes: int, warns: str = ""):
        self._planned = planned
        self._room_bytes = room_bytes
        self._warns = warns
        self._counts = threading.local()
        self.more: dict[str, int] = {}
        self.found = False

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCounts:
        return memo.setdefault(id(self), CallCounts(self._planned, self._room_bytes, self._warns))

    def __reduce__(self) -> Any:
        return CallCounts, (self._planned, self._room_bytes, self._warns)

    @untraced
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """The model is called."""
        if not torch.compiler.is_compiling():
            self.begins(module.training and torch.is_grad_enabled())

    def begins(self, is_of_step: bool) -> None:
        """A call of the model begins in this thread, perhaps one of a training step."""
        self._counts.of_call = Counter[str]() if is_of_step else None

    def count(self, name: str) -> None:
        """A module is called, with gradients on."""
        counts: Counter[str] | None = getattr(self._counts, "of_call", None)
        if counts is None:
            return
        counts[name] += 1
        planned, size = self._planned[name]
        if (counts[name] - planned) * size > max(0, self._room_bytes):
            if self._warns and not self.more:
                warn(
                    f"{module_is_called(name, counts[name], planned)}, so this step {self._warns}. Plan a step that "
                    "calls it as often as any: autoac.plan(model, step, ...) with a function that runs it, or leave "
                    "headroom (headroom=)."
                )
            self.more[name] = max(counts[name], self.more.get(name, 0))
            self.found = True

    def taken(self) -> str:
        """What is to say of the first module that was called more often, "" if there is none; forgets them."""
        more, self.more = self.more, {}
        return next(
            (module_is_called(name, more[name], self._planned[name][0]) for name in outermost(more)), ""
        )


def module_is_called(name: str, times: int, planned: int) -> str:
    """The beginning of a sentence."""
    before = "once" if planned == 1 else f"{planned} times"
    return (
        f"module {name!r} is called {times} times in one call of the model, and {before} in the planned step"
    )


class Counted:
    """A forward pre-hook of a module that the planned step called."""

    compiled_code_may_skip = True

    def __init__(self, name: str, counts: CallCounts):
        self.name = name
        self.counts = counts

    @untraced
    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Count the call of a training step; not the second one of the model's own checkpoint."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not in_backward():
            self.counts.count(self.name)


def watch_more_calls(
    model: torch.nn.Module, planned: Mapping[str, tuple[int, int]], room_bytes: int, warns: str = ""
) -> CallCounts:
    """Count the calls of these modules, until `unwatch_newcomers`. Who does not have it `warns` tells `begins`.

    Compiled code does not count: modules in it are left out, as are those for which there is ample room.

    Args: as for `CallCounts`.
    """
    counts = CallCounts(planned, room_bytes, warns)
    compiled = list(compiled_modules(model))
    planned = {
        n: (times, size) for n, (times, size) in planned.items() if room_bytes < _MOST_TIMES * times * size
    }
    modules = dict(model.named_modules())
    watched = [n for n in planned if n in modules and not any(is_inside(n, other) for other in compiled)]
    for name in watched:
        modules[name].register_forward_pre_hook(Counted(name, counts))
    if watched and warns:
        model.register_forward_pre_hook(counts)
    return counts


def outermost(names: Collection[str]) -> list[str]:
    """The names without those of modules nested in others."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def unwatch_newcomers(model: torch.nn.Module) -> None:
    """Remove the hooks, if they are there."""
    for module in model.modules():
        remove_forward_pre_hooks(module, (Newcomer, CallCounts, Counted))
