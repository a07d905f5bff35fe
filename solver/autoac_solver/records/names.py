"""Names of modules and regions, and what messages call them."""

from __future__ import annotations

import re

PART = ":"
"""Separates a call's name from the number of a part of it."""

_PART = re.compile(rf"(.*){PART}\d+", re.DOTALL)


def is_part(name: str) -> bool:
    """Whether this is the display name of a part of a call."""
    return bool(_PART.fullmatch(name))


def module_in_words(name: str) -> str:
    """A module, one of its calls, or a part of a call, by its display name: quoted, or "the model itself"."""
    if part := _PART.fullmatch(name):
        return f"part {name!r} of {module_in_words(part[1])}"
    return repr(name) if name else "the model itself"


def region_in_words(name: str) -> str:
    """A region by its display name; the model itself is one if parts of its own call are."""
    return module_in_words(name) if not name or is_part(name) else f"region {name!r}"


def holder_in_words(kind: str, module: str) -> str:
    """The module of what holds memory at the peak, or where it was made if no submodule has done so."""
    if module:
        return module
    return "outside of all submodules" if kind in ("Activation", "Temp") else "-"
