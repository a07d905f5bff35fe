"""Draw examples with a fixed seed, for the tests and for long runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.models import ModelSpec, models


def run_examples(
    check: Callable[[Any], None],
    examples: int,
    seed: int,
    strategy: st.SearchStrategy[Any] | None = None,
    shrink: bool = False,
) -> None:
    """Call `check` with examples, always the same for the same seed.

    Args:
        strategy: what to draw; specs of models if left out.
        shrink: look for a smaller example that fails too, which takes minutes.

    Raises:
        BaseException: what the first failing check raised; the example is in its notes.
    """
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    draw: st.SearchStrategy[Any] = models() if strategy is None else strategy
    _decorated(draw, examples, seed, phases, check)()


def _decorated(
    strategy: st.SearchStrategy[Any],
    examples: int,
    number: int,
    phases: list[Phase],
    check: Callable[[Any], None],
) -> Callable[[], None]:
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        report_multiple_bugs=False,
    )
    @seed(number)
    @given(strategy)
    def run(example: ModelSpec) -> None:
        check(example)

    return run
