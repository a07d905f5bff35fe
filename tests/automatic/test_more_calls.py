"""Loops whose steps call a module more often than the recorded step did."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoac
from autoac.automatic import Auto
from autoac.measure import measure_peak
from tests.small_models import WIDTH, Block, assert_same

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 512


class Deep(nn.Module):
    """Calls its block as often as its attribute says, as a loop over a drawn number of frames does."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(WIDTH, WIDTH), Block(0.0), nn.Linear(WIDTH, WIDTH)
        self.times = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x)


def train(model: Deep, optimizer: Any, times: int) -> None:
    model.times = times
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(times))
    F.cross_entropy(model(x), x.argmax(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(counts: Sequence[int], budget: int | None, **options: Any) -> tuple[Deep, Auto | None]:
    torch.manual_seed(0)
    model = Deep().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = None if budget is None else autoac.auto(model, budget, **options)
    for times in counts:
        train(model, optimizer, times)
    return model, handle


def planned_for(times: int, budget: int) -> Any:
    """The plan of a loop of as many calls in each step."""
    handle = trained([times] * 2, budget)[1]
    assert handle is not None
    return handle.plan


@pytest.fixture(scope="module")
def budget() -> int:
    """For 6 calls, some of them recomputed; 2 take less."""
    full = planned_for(6, 10**12).predicted_peak_bytes
    two = planned_for(2, 10**12).predicted_peak_bytes
    return (full + two) // 2


def called(plan: Any) -> int:
    return sum(call.fqn == "block" for call in plan.record.profile.calls)


@pytest.mark.parametrize(
    "counts", [[2, 2, 6, 6, 6, 2, 6], [2, 6, 2, 6, 2, 6, 2, 6]], ids=["once", "by turns"]
)
def test_a_step_of_more_calls_is_recorded(counts: list[int], budget: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "autoac"):
        model, handle = trained(counts, budget)
    assert handle is not None
    assert any(
        "module 'block' is called 6 times in one call of the model, and " in text for text in caplog.messages
    )
    assert called(handle.plan) == 6
    assert handle.plan is not None
    assert handle.plan.predicted_peak_bytes <= budget
    assert_same([*model.parameters()], [*trained(counts, None)[0].parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 6)
    measured = measure_peak(lambda: train(model, optimizer, 6))
    inputs = BATCH * WIDTH * 4  # counted as there before
    found = handle.plan.resident_bytes - inputs + measured.peak_above_start_bytes
    assert found == handle.plan.predicted_peak_bytes


def test_where_none_of_the_recorded_steps_has_as_many_it_is_told_once(budget: int):
    counts = [2, *(count for distance in (2, 4, 3, 5, 6, 2, 3) for count in [2] * distance + [6])]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, handle = trained(counts, budget)
    assert handle is not None
    assert called(handle.plan) == 2
    (words,) = [str(one.message) for one in told]
    assert words.startswith(
        "the steps of this loop vary: module 'block' is called 6 times in one call of the model, and 2 times in the "
        "planned step. The memory of the further calls is not planned for"
    )


def test_more_calls_for_which_there_is_room_are_no_matter(budget: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "autoac"):
        trained([2, 2, 3, 2, 4, 3], budget)
        trained([2, 2, 6, 6], 10**12)
    assert "recording this step" not in caplog.text


def test_measured_steps_are_planned_for(budget: int):
    """Where they are drawn, and the recorded ones have few calls."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        counts = [2, *[2, 6, 2, 2, 6, 2, 2, 2, 2, 6] * 4, *[6] * 12]
        _, handle = trained(counts, budget, measure=True, on_larger="replan")
    assert handle is not None
    assert handle.plan is not None
    assert called(handle.plan) == 6
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    assert not told


@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_plan_that_is_applied_warns_once(budget: int, copied: Any):
    torch.manual_seed(0)
    model = Deep().train()
    model.times = 2
    x = torch.randn(BATCH, WIDTH)
    # Not from autoac.auto's profile: without an optimizer, and with the output's loss.
    plan = autoac.plan(model, x, autoac.plan(model, x, 10**12).predicted_peak_bytes)
    plan.apply(model)
    if copied is not None:
        model = copied(model)
    model(x).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        model.times = 6
        model(x)
    with pytest.warns(
        UserWarning, match="'block' is called 6 times in one call of the model, and 2 times in the plan"
    ):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()  # once
    if copied is None:
        plan.remove(model)
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_second_run_by_the_models_own_checkpoint_is_no_further_call(caplog: pytest.LogCaptureFixture):
    torch.manual_seed(0)

    class Checkpointing(Deep):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.block(self.stem(x))
            x = checkpoint(self.block, x, use_reentrant=False)
            return self.head(x)

    model = Checkpointing().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handle = autoac.auto(model, 10**12)
    train(model, optimizer, 2)
    least = handle.plan
    assert least is not None
    handle.remove()
    handle = autoac.auto(model, least.predicted_peak_bytes)
    with caplog.at_level(logging.INFO, "autoac"):
        for _ in range(4):
            train(model, optimizer, 2)
    assert handle.plan is not None
    assert handle.plan.record.step.most_calls["block"][0] == 2
    assert "recording this step" not in caplog.text


def test_further_calls_have_the_decisions_that_recompute_most(budget: int):
    """The last call's values are there at the peak anyway; those of all further ones are not."""
    plan = planned_for(6, budget)
    programs = [region for region in plan.regions if region.fqn == "block"]
    assert {region.wrapped for region in programs} == {True, False}
    torch.manual_seed(0)
    model, found = Deep().train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for times in (6, 6, 7, 9):
            found.append(
                measure_peak(lambda times=times: train(model, optimizer, times)).peak_above_start_bytes
            )
    x_bytes = BATCH * WIDTH * 4
    assert found[3] - found[2] == pytest.approx(2 * x_bytes, rel=1e-3)
