"""Models as people train them, held to the contract: equal to the bit, within the budget, the peak as predicted.

Nothing of autoac's own verification is used here: the step, the ruler and what a step leaves behind are the test's.
"""

import functools

import pytest

import autoac
from tests import real_models
from tests.contract import TOLERANCE, Subject, faults, subject

FRACTIONS = (0.0, 0.4, 1.0)
"""Budgets: the way from the least feasible one (0) to the peak with nothing recomputed (1)."""

pytestmark = pytest.mark.usefixtures("one_thread")


@functools.lru_cache(maxsize=1)  # tests come model by model
def subject_of(name: str) -> Subject:
    return subject(real_models.make(name))


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("name", real_models.ALL)
def test_exact_and_within_the_budget(name: str, engine: str):
    assert not faults(subject_of(name), engine, FRACTIONS)


def test_unplanned_peak_is_predicted():
    """`unplanned_peak_bytes`, which users compare with, is the peak without any plan."""
    for name in ("gpt2", "cnn_with_skips"):
        model = subject_of(name)
        plan = autoac.solve(model.profile, 10**12)
        assert plan.record.unplanned_peak_bytes == pytest.approx(model.expected.peak_bytes, rel=TOLERANCE)
