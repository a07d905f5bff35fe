"""Modules that a later step calls and the planned step did not: skipped layers, experts without a token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from autoac.torch_private import is_compiled_wrapper, remove_forward_pre_hooks


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


def watch_newcomers(model: torch.nn.Module, known: Collection[str]) -> set[str]:
    """Note the calls of trained modules that are not known, until `unwatch_newcomers`.

    Args:
        known: names of the modules that the planned step called.

    Returns:
        A set that collects the names of those that are called.
    """
    called: set[str] = set()
    for name, module in model.named_modules():
        # `torch.compile`'s wrapper is no module of its own: calls of the one in it are recorded.
        if name in known or is_compiled_wrapper(module):
            continue
        if any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(Newcomer(name, called))
    return called


def outermost(names: Collection[str]) -> list[str]:
    """The names without those of modules nested in others."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def unwatch_newcomers(model: torch.nn.Module) -> None:
    """Remove the hooks, if they are there."""
    for module in model.modules():
        remove_forward_pre_hooks(module, Newcomer)
