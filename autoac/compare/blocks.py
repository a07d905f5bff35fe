"""A model's equal blocks, which are usually checkpointed one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from autoac.step.modules import select_modules

_SMALL = 0.1
"""Lists of blocks of another class with fewer parameters than this share of the largest list's are left out."""


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names of the blocks, in the order of the model.

    A list of blocks is a module (ModuleList, Sequential) with at least two children of one class. The largest counts,
    and others of the same class or of a similar size (an encoder and a decoder). Of lists inside each other the outer
    one counts, unless its entries are stages: modules with a list of blocks of their own as a direct child.

    Args:
        patterns: names or globs (`"layers.*"`) instead.

    Returns:
        The names; none if the model has no such list.

    Raises:
        ProfilingError: a pattern matches no module.
    """
    if patterns:
        return tuple(select_modules(model, list(patterns)) or ())
    lists = list(_lists(model, ""))
    if not lists:
        return ()
    largest = max(lists, key=lambda names: _size(model, names))
    kinds = {type(model.get_submodule(largest[0]))}
    enough = _SMALL * _size(model, largest)
    chosen = [n for n in lists if type(model.get_submodule(n[0])) in kinds or _size(model, n) >= enough]
    return tuple(name for names in chosen for name in names)


def _lists(module: nn.Module, prefix: str) -> Iterator[list[str]]:
    """The outermost lists of blocks in a module, each as the names of its blocks."""
    own = _own_blocks(module, prefix)
    if own and not all(_is_stage(module.get_submodule(name.removeprefix(prefix))) for name in own):
        yield own
        return
    for name, child in module.named_children():
        yield from _lists(child, f"{prefix}{name}.")


def _own_blocks(module: nn.Module, prefix: str) -> list[str]:
    """The children that make a module a list of blocks: those of its most frequent class, if there are two or more."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    children = [(name, child) for name, child in module.named_children() if _can_be_block(child)]
    classes = Counter(type(child) for _, child in children).most_common(1)
    if not classes or classes[0][1] < 2:
        return []
    return [f"{prefix}{name}" for name, child in children if type(child) is classes[0][0]]


def _can_be_block(module: nn.Module) -> bool:
    """Whether the module has a forward, parameters, and submodules."""
    is_called = type(module).forward is not nn.Module.forward
    return is_called and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_stage(module: nn.Module) -> bool:
    return bool(_own_blocks(module, "")) or any(_own_blocks(child, "") for child in module.children())


def _size(model: nn.Module, names: Sequence[str]) -> int:
    return sum(p.numel() for name in names for p in model.get_submodule(name).parameters())
