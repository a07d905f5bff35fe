"""Properties of records that later packages compute: peaks, by the planner; HTML for Jupyter, by `show.notebook`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_ANSWERS: dict[Any, Callable[[Any], Any]] = {}

Answer = TypeVar("Answer", bound=Callable[[Any], Any])


def answers(question: str | type) -> Callable[[Answer], Answer]:
    """Decorator: registers a function from a profile to an answer, or from records of a type to HTML."""

    def register(function: Answer) -> Answer:
        _ANSWERS[question] = function
        return function

    return register


def ask(question: str, profile: Any) -> Any:
    """The answer to a question about a profile.

    Raises:
        RuntimeError: `autoac_solver.plan.planning` was not imported; importing `autoac.Profile` imports it.
    """
    if question not in _ANSWERS:
        raise RuntimeError(f"{question} takes the planner: import autoac_solver.plan.planning first.")
    return _ANSWERS[question](profile)


class Shown:
    """A record that Jupyter shows as HTML, or as plain text if no function is registered for its type."""

    def _repr_html_(self) -> str | None:
        draw = _ANSWERS.get(type(self))
        return None if draw is None else draw(self)
