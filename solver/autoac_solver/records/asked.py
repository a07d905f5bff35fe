"""Questions to a profile whose answers take the simulator or the solver: `autoac_solver.plan.planning` knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_ANSWERS: dict[str, Callable[[Any], Any]] = {}

Answer = TypeVar("Answer", bound=Callable[[Any], Any])


def answers(question: str) -> Callable[[Answer], Answer]:
    """For a function from a profile to the answer."""

    def register(function: Answer) -> Answer:
        _ANSWERS[question] = function
        return function

    return register


def ask(question: str, profile: Any) -> Any:
    """The answer.

    Raises:
        RuntimeError: `autoac_solver.plan.planning` was not imported; `autoac.Profile` sees to it.
    """
    if question not in _ANSWERS:
        raise RuntimeError(f"{question} takes the planner: import autoac_solver.plan.planning first.")
    return _ANSWERS[question](profile)
