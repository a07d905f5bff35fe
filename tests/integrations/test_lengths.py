"""Batches of random lengths under `autoac.auto`: weights to the bit as without, no planned step over the budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

transformers = pytest.importorskip("transformers")

import autoac  # noqa: E402
from autoac.measure import measure_peak  # noqa: E402
from autoac_solver.plan.planning import least_budget_bytes  # noqa: E402
from tests.integrations.test_transformers import ENOUGH, TOKENS, assert_same_weights, tiny  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SHORTEST, LONGEST, BATCH = 16, 64, 4
LENGTHS = [40, 24, 40, 64, 33, 64, 16, 57, 20]


@dataclass
class Run:
    """A loop over always the same lengths.

    Args:
        peaks: (length, bytes with what is resident) of each step that was planned for or is smaller.
    """

    model: torch.nn.Module
    plan: autoac.Plan | None = None
    peaks: list[tuple[int, int]] = field(default_factory=list)


def random_lengths(steps: int) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(SHORTEST, LONGEST + 1, (steps,), generator=generator).tolist()


def trained(budget: int | None, lengths: list[int], measured: bool = True) -> Run:
    """Train on texts of these lengths, with a plan made anew for each that is the longest so far."""
    transformers.set_seed(0)
    generator = torch.Generator().manual_seed(4)
    run = Run(tiny().train())
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    handle = None if budget is None else autoac.auto(run.model, budget, on_larger="replan")
    planned_for = recorded = 0
    for length in lengths:
        ids = torch.randint(4, TOKENS, (BATCH, length), generator=generator)

        def step(ids: torch.Tensor = ids) -> None:
            run.model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        # A step that is recorded cannot be measured as well, and the plan for it is made when the next one begins.
        if handle is not None and measured and length <= planned_for:
            taken = measure_peak(step)
            assert handle.plan is not None
            run.peaks.append((length, handle.plan.resident_bytes + taken.peak_above_start_bytes))
        else:
            step()
        planned_for, recorded = recorded, max(recorded, length)
    run.plan = None if handle is None else handle.plan
    return run


def test_trains_as_without_within_the_budget():
    without = trained(None, LENGTHS)
    ample = trained(ENOUGH, [LONGEST, LONGEST], measured=False).plan
    assert ample is not None
    full, least = ample.record.unplanned_peak_bytes, least_budget_bytes(ample.record.profile)
    budget = int(least + 0.4 * (full - least))
    run = trained(budget, LENGTHS)
    assert run.plan is not None
    assert_same_weights(without.model, run.model)
    assert any(region.wrapped for region in run.plan.regions)
    assert [length for length, _ in run.peaks] == [40, 33, 64, 16, 57, 20]
    assert max(peak for _, peak in run.peaks) <= budget
    assert f"[{BATCH},{LONGEST}]" in run.plan.record.profile.sample
    assert run.plan.predicted_peak_bytes in [peak for length, peak in run.peaks if length == LONGEST]
