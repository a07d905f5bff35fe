"""Modules that the planned step did not call, and a later one does: skipped layers, experts without a token."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from autoac.torch_private import remove_forward_pre_hooks


class Newcomer:
    """A forward pre-hook of a module that the planned step did not call.

    Args:
        name: the module's.
        called: where the name is put when it is called.
    """

    def __init__(self, name: str, called: set[str]):
        self.name = name
        self.called = called

    def __deepcopy__(self, memo: dict[int, Any]) -> Newcomer:
        return Newcomer(self.name, set())  # a copy of the model trains by itself

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Note the call of a training step."""
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.called.add(self.name)


def watch_newcomers(model: torch.nn.Module, known: Collection[str]) -> set[str]:
    """Let the modules that are not known note their calls, until `unwatch_newcomers`.

    Args:
        known: names of the modules that the planned step called.

    Returns:
        The names of those that were called since.
    """
    called: set[str] = set()
    for name, module in model.named_modules():
        if name not in known and any(p.requires_grad for p in module.parameters()):
            module.register_forward_pre_hook(Newcomer(name, called))
    return called


def outermost(names: Collection[str]) -> list[str]:
    """Of modules in one another only the outermost."""
    return sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def unwatch_newcomers(model: torch.nn.Module) -> None:
    """Take the hooks off, if they are there."""
    for module in model.modules():
        remove_forward_pre_hooks(module, Newcomer)
