"""Modules that a later step calls and the planned step did not: skipped layers, experts without a token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from autoac.torch_private import is_compiled_wrapper, remove_forward_pre_hooks
from autoac.warned import warn


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


def outermost(names: Collection[str]) -> list[str]:
    """The names without those of modules nested in others."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def unwatch_newcomers(model: torch.nn.Module) -> None:
    """Remove the hooks, if they are there."""
    for module in model.modules():
        remove_forward_pre_hooks(module, Newcomer)
