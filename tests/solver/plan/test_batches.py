"""Batch sizes: the largest that fits, and the fastest."""

from __future__ import annotations

import pytest

from autoac_solver.plan.batches import plan_batches
from autoac_solver.plan.choices import Choices
from autoac_solver.plan.planning import plan_profile
from autoac_solver.records.errors import InfeasibleBudgetError, ProfilingError
from tests.solver.profiles import scaled, two_blocks

REGIONS = ["blocks.0", "blocks.1"]


def profile_of(batch: int):
    """Activations of 288 bytes a sample, of which 100 or 108 can go for 4 s or 2 s of 15; 1000 bytes are parameters."""
    return scaled(two_blocks(), batch)


def test_two_batches_by_hand() -> None:
    """A sample takes 288 bytes without recomputation, 188 with one wide value recomputed and 180 with both."""
    found = plan_batches(
        {1: profile_of(1), 2: profile_of(2)}, [1180, 1288, 1360, 1576], regions=REGIONS, gap=0
    )
    frame = found.frame[["batch_size", "budget_bytes", "peak_bytes", "step_s", "fastest"]]
    assert frame.values.tolist() == [
        [1, 1180, 1180, 19.0, True],
        [1, 1288, 1288, 15.0, True],
        [1, 1360, 1288, 15.0, True],
        [1, 1576, 1288, 15.0, True],
        [2, 1360, 1360, 38.0, False],
        [2, 1576, 1576, 30.0, False],
    ]
    assert found.frame["samples_per_s"].tolist() == pytest.approx([1 / 19, *[1 / 15] * 3, 2 / 38, 2 / 30])
    assert found.largest_batch() == found.largest_batch(1576) == 2
    assert found.largest_batch(1288) == 1
    assert found.plan(1180).predicted_peak_bytes == 1180
    assert [plan.budget_bytes for plan in found.plans] == frame["budget_bytes"].tolist()
    with pytest.raises(ValueError, match=r"nothing was planned for a budget of 1\.3 KB"):
        found.largest_batch(1300)
    assert "<- fastest" in str(found)


def test_ctrl_c_ends_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of a batch size's budgets say nothing of whether it fits the largest."""
    best = Choices.best

    def interrupted(self: Choices, limit: int, *rest, **options):
        if limit == 1576:
            raise KeyboardInterrupt
        return best(self, limit, *rest, **options)

    monkeypatch.setattr(Choices, "best", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan_batches(profile_of, [1288, 1576], regions=REGIONS)


@pytest.mark.parametrize("budget", [1180, 2000, 3345, 10**4])
def test_the_largest_batch_is_the_largest(budget: int) -> None:
    found = plan_batches(profile_of, budget, regions=REGIONS)
    expected = (budget - 1000) // 180
    assert found.largest_batch() == expected
    assert expected + 1 in found.too_large
    with pytest.raises(InfeasibleBudgetError):
        plan_profile(profile_of(expected + 1), budget, regions=REGIONS)


def test_a_larger_batch_that_must_recompute_may_be_slower() -> None:
    """Fixed costs of a step make larger batches faster, recomputation slower: the fastest is in between."""
    base = two_blocks()

    def fixed(batch: int):
        return scaled(base, batch).__class__(**{**vars(scaled(base, batch)), "outside_s": 6.0})

    found = plan_batches(fixed, 2000, [1, 2, 3, 4, 5], regions=REGIONS, gap=0)
    # 3 samples fit as they are (1864 bytes): 3 / 51. 4 and 5 have one wide value recomputed.
    assert found.frame["samples_per_s"].tolist() == pytest.approx([1 / 21, 2 / 36, 3 / 51, 4 / 74, 5 / 91])
    assert found.fastest()["batch_size"] == 3
    assert found.plan().predicted_extra_s == 0
    assert found.largest_batch() == 5


def test_nothing_fits_and_bad_arguments() -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_batches(profile_of, 1179, regions=REGIONS)
    assert caught.value.minimum_bytes == 1180
    with pytest.raises(ValueError, match="a batch size is an int of at least 1"):
        plan_batches(profile_of, 2000, [0, 1])
    with pytest.raises(ValueError, match="budgets is empty"):
        plan_batches(profile_of, [])
    with pytest.raises(ValueError, match="no times"):
        plan_batches({1: scaled(two_blocks(), 0)}, 2000)
    with pytest.raises(ProfilingError, match="do not grow with the batch"):
        plan_batches(lambda batch: two_blocks(), 2000)


def test_it_shows_in_notebooks_and_as_a_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    several = plan_batches({1: profile_of(1), 2: profile_of(2)}, [1180, 1360], regions=REGIONS)
    one = plan_batches({1: profile_of(1), 2: profile_of(2)}, 1400, regions=REGIONS)
    for found, axis in ((several, "budget, kB"), (one, "batch size")):
        assert "<svg" in found._repr_html_()
        axes = found.plot()
        assert axes.get_xlabel().startswith(axis.split(",")[0])
        matplotlib.pyplot.close(axes.figure)
    assert "the fastest is" in repr(one)
