"""Choice of the modules that become regions.

A recording does not depend on the choice, so any that needs little memory will do (`lean_modules`). The regions of a
plan are chosen from the record: the largest modules whose working set the budget can carry, found by descending the
module tree (`partitions`), or those that the user names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from autoac.step.units import holds_units
from autoac.torch_private import WRAPPED, is_compiled_wrapper
from autoac_solver.records.arguments import as_patterns, matched, outermost_matched, some
from autoac_solver.records.errors import ProfilingError

RegionChoice = None | str | Iterable[str] | Callable[[str, torch.nn.Module], bool]

_POSSIBLE = 'names or globs of modules ("layers.*"), several of these, or a predicate (fqn, module) -> bool'

_LEAN_SHARE = 8


def lean_modules(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules that together cover the model, each a small part of it by number of layers."""
    sizes: dict[torch.nn.Module, int] = {}

    def layers(module: torch.nn.Module) -> int:
        if module not in sizes:
            sizes[module] = max(1, sum(layers(child) for child in module.children()))
        return sizes[module]

    limit = max(1, layers(model) // _LEAN_SHARE)
    chosen: set[torch.nn.Module] = set()

    def descend(module: torch.nn.Module) -> None:
        children = list(module.children())
        if isinstance(module, torch.jit.ScriptModule):
            return  # its calls, and those of the modules in it, are TorchScript's own
        small = layers(module) <= limit or not children or _is_block(module)
        if is_called(module) and small and not holds_units(module):
            chosen.add(module)
            return
        for child in children:
            descend(child)

    descend(model)
    return chosen


def is_called(module: torch.nn.Module) -> bool:
    """Whether calls of the module can be seen; containers such as ModuleList are never called."""
    # TorchScript's modules come first: some have `forward` on instances only.
    scripted = isinstance(module, torch.jit.ScriptModule)
    return not scripted and type(module).forward is not torch.nn.Module.forward


def _is_block(module: torch.nn.Module) -> bool:
    """Whether none of its children is large: a block of a small model that one would not split further."""
    return all(not list(child.children()) for child in module.children())


def select_modules(model: torch.nn.Module, choice: RegionChoice) -> list[str] | None:
    """Names of the modules that the user chose as regions; None for no choice.

    Args:
        choice: None, a name or glob (`"layers.*"`), several of these, or a predicate `(fqn, module) -> bool`. Of the
            modules that a glob matches, the outermost are chosen.

    Raises:
        ProfilingError: a name or glob matches no module that is called, nothing is chosen, or one choice is inside
            another.
        ValueError: the choice is of another type.

    A wrapper made by `torch.compile` stands for the module in it.
    """
    if choice is None:
        return None
    modules = dict(model.named_modules())
    # A ModuleList is never called, only the modules in it.
    called = {name for name, module in modules.items() if is_called(module)}
    if callable(choice) and not isinstance(choice, torch.nn.Module):
        found = {name: [name] for name, module in modules.items() if choice(name, module) and name in called}
    else:
        found = matched(as_patterns(choice, _POSSIBLE), modules, "this model")
    found = {
        pattern: [name for name in _unwrapped(names, modules) if name in called]
        for pattern, names in found.items()
    }
    idle = [pattern for pattern, names in found.items() if not names]
    if idle or not found:
        which = repr(idle[0]) if idle else ""
        known = some(name for name in modules if name in called)
        raise ProfilingError(f"regions={which} chooses no module that is called. Modules are: {known}.")
    return outermost_matched(found)


def _unwrapped(names: Iterable[str], modules: dict[str, torch.nn.Module]) -> list[str]:
    """The names without duplicates, with the wrapped modules in place of the wrappers of `torch.compile`."""
    return list(dict.fromkeys(f"{n}.{WRAPPED}" if is_compiled_wrapper(modules[n]) else n for n in names))
