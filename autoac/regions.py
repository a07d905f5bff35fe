"""Which modules become regions.

While a step is recorded any choice will do that needs little memory (`lean_modules`), for the record does not depend
on it. The regions of a plan are chosen from the record: the largest modules whose working set the budget can carry,
found by descending the module tree (`partitions`), or what the user names.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable

import torch

from autoac_solver.errors import ProfilingError

RegionChoice = None | str | Iterable[str] | Callable[[str, torch.nn.Module], bool]

_LEAN_SHARE = 8


def lean_modules(model: torch.nn.Module) -> set[torch.nn.Module]:
    """Modules that together hold the model and of which each is a small part of it, by number of layers."""
    sizes: dict[torch.nn.Module, int] = {}

    def layers(module: torch.nn.Module) -> int:
        if module not in sizes:
            sizes[module] = max(1, sum(layers(child) for child in module.children()))
        return sizes[module]

    limit = max(1, layers(model) // _LEAN_SHARE)
    chosen: set[torch.nn.Module] = set()

    def descend(module: torch.nn.Module) -> None:
        children = list(module.children())
        has_forward = (
            type(module).forward is not torch.nn.Module.forward
        )  # ModuleList and the like are never called
        if has_forward and (layers(module) <= limit or not children or _is_block(module)):
            chosen.add(module)
            return
        for child in children:
            descend(child)

    descend(model)
    return chosen


def _is_block(module: torch.nn.Module) -> bool:
    """Whether none of its children is large: a block of a small model that one would not split further."""
    return all(not list(child.children()) for child in module.children())


def select_modules(model: torch.nn.Module, choice: RegionChoice) -> list[str] | None:
    """Names of the modules that the user chose as regions; None for no choice.

    Args:
        choice: None, a name or glob (`"layers.*"`), several of these, or a predicate `(fqn, module) -> bool`.

    Raises:
        ProfilingError: a name or glob matches no module, nothing is chosen, or one choice is inside another.
    """
    if choice is None:
        return None
    modules = dict(model.named_modules())
    if callable(choice):
        names = [name for name, module in modules.items() if choice(name, module)]
    else:
        names = []
        for pattern in [choice] if isinstance(choice, str) else list(choice):
            found = [
                name for name in modules if name == pattern or (name and fnmatch.fnmatchcase(name, pattern))
            ]
            if not found:
                raise ProfilingError(
                    f"regions={pattern!r} matches no module. Modules of this model are: {_some(modules)}."
                )
            names += [name for name in found if name not in names]
    names = [name for name in names if type(modules[name]).forward is not torch.nn.Module.forward]
    if not names:
        raise ProfilingError(f"regions= chooses no module that is called. Modules are: {_some(modules)}.")
    if isinstance(choice, (str, list, tuple)):
        names = _outermost(names)
    for name in names:
        for other in names:
            if other != name and _inside(name, other):
                raise ProfilingError(f"region {name!r} is inside region {other!r}: choose one of them.")
    return names


def _outermost(names: list[str]) -> list[str]:
    """A glob's "*" crosses dots, so it also finds the modules inside those that are meant."""
    return [name for name in names if not any(other != name and _inside(name, other) for other in names)]


def _inside(name: str, other: str) -> bool:
    return other == "" or name.startswith(other + ".")


def _some(modules: dict[str, torch.nn.Module]) -> str:
    names = [repr(name) for name in modules if name]
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
