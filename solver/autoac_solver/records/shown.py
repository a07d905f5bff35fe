"""Records show themselves in Jupyter without knowing how: `autoac_solver.show.notebook` knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_HTML: dict[type, Callable[[Any], str]] = {}

Draw = TypeVar("Draw", bound=Callable[[Any], str])


def shows(kind: type) -> Callable[[Draw], Draw]:
    """For a function that makes HTML of records of this kind."""

    def register(draw: Draw) -> Draw:
        _HTML[kind] = draw
        return draw

    return register


class Shown:
    """A record that Jupyter shows as HTML; as plain text where nobody has said how."""

    def _repr_html_(self) -> str | None:
        draw = _HTML.get(type(self))
        return None if draw is None else draw(self)
