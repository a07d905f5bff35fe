"""The price of a loss over chunks of rows: measured with the loss's own sizes, and taken for its decision."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.price import chunked_loss
from autoac.price.chunked_loss import with_price_of_chunks
from autoac_solver.build.losses.chunked import CHUNKED, ELEMENT
from autoac_solver.build.losses.cross_entropy import chunkable_losses
from autoac_solver.records.profile import Profile

CPU = torch.device("cpu")
WIDTH, ROWS, CLASSES = 32, 256, 2048


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.classes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classes(F.gelu(self.up(x))), torch.arange(len(x)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return autoac.profile(Classifier(), torch.randn(ROWS, WIDTH))


def chunked_at(profile: Profile, element_s: float | None) -> autoac.Plan:
    """The plan of the least budget if chunks cost this."""
    others = {name: parts for name, parts in profile.costs.items() if name != CHUNKED}
    costs = others if element_s is None else others | {CHUNKED: {ELEMENT: element_s}}
    priced = dataclasses.replace(profile, costs=costs)
    plan = autoac.solve(priced, priced.least_peak_bytes)
    assert plan.record.chunked_losses
    return plan


def test_it_is_measured_with_the_sizes_of_the_loss(profile: Profile, tmp_path: Path):
    [loss] = chunkable_losses(profile)
    assert (loss.rows, loss.classes) == (ROWS, CLASSES)
    price_s = profile.costs[CHUNKED][ELEMENT]
    assert math.isfinite(price_s)
    assert 0.0 <= price_s < 1e-6
    profile.save(tmp_path / "profile.json")
    assert autoac.Profile.load(tmp_path / "profile.json").costs == profile.costs


def test_a_plan_pays_it(profile: Profile):
    [loss] = chunkable_losses(profile)
    free = chunked_at(profile, 0.0).record.predicted_extra_s
    again_s = sum(profile.tape[op].again_s for op in loss.forward)
    assert chunked_at(profile, None).record.predicted_extra_s == pytest.approx(free + again_s)
    paid = chunked_at(profile, 1e-9).record.predicted_extra_s
    assert paid == pytest.approx(free + 1e-9 * ROWS * CLASSES)


def test_it_is_measured_once_and_leaves_nothing_behind(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = with_price_of_chunks(profile, CPU)
    assert found.costs == profile.costs
    assert torch.equal(torch.get_rng_state(), state)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is measured again")

    monkeypatch.setattr(chunked_loss, "in_turn", fail)
    assert with_price_of_chunks(profile, CPU).costs == profile.costs


def test_without_chunks_nothing_is_measured(profile: Profile):
    """A model without a loss, hooks under which it is not chunked, and devices on which it is not tried."""
    plain = autoac.profile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.randn(ROWS, WIDTH))
    assert CHUNKED not in plain.costs
    bare = dataclasses.replace(profile, costs={})
    assert CHUNKED not in with_price_of_chunks(bare, torch.device("cuda")).costs
    with torch.autograd.graph.save_on_cpu():
        assert CHUNKED not in with_price_of_chunks(bare, CPU).costs
    assert CHUNKED in with_price_of_chunks(bare, CPU).costs


def test_large_losses_are_measured_by_some_of_their_rows():
    [loss] = chunkable_losses(autoac.profile(Classifier(), torch.randn(ROWS, WIDTH)))
    large = dataclasses.replace(loss, rows=10**6, classes=50_000)
    rows, classes = chunked_loss._scaled_down(large)
    assert classes == 50_000
    assert 2**21 < rows * classes <= 2**22
    assert chunked_loss._scaled_down(dataclasses.replace(loss, classes=2**23)) == (1, 2**23)
