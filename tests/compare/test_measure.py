"""Strategies leave nothing behind: each is measured as if it were alone."""

from __future__ import annotations

import copy
import functools
import gc
import random
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.compare.measure import Bench, Installed
from autoac.compare.run import compare
from autoac.compare.strategies import Strategy, by_hand, checkpoint_module, policies_for
from autoac.compare.workload import Workload
from autoac.measure import unique_storage_bytes
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import Profile
from tests.small_models import attributes, batch, make

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
BLOCKS = tuple(f"blocks.{index}" for index in range(4))


def workload(**changes) -> Workload:
    return Workload("small", "small", make(blocks=4), batch(), BLOCKS, **changes)


def bench(work: Workload) -> Bench:
    there = [*work.model.parameters(), *work.model.buffers(), batch()]
    return Bench(work, CPU, unique_storage_bytes(there))


@functools.cache
def profile_of_small() -> Profile:
    work = workload()
    return autoac.profile(work.model, work.sample)


def strategies() -> list[Strategy]:
    profile = profile_of_small()
    plan = autoac.solve(profile, (work_least := least(profile)) + work_least // 10)
    ours = Strategy("ours", "ours", plan.apply, plan.budget_bytes, plan.predicted_peak_bytes, 0.0)
    return [*by_hand(BLOCKS, policies_for(profile, BLOCKS)), ours]


def least(profile: Profile) -> int:
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1)
    return caught.value.minimum_bytes


def test_the_order_of_strategies_changes_nothing() -> None:
    work, made = workload(), strategies()
    forwards, backwards = (examined(bench(work), order) for order in (made, made[:1] + made[:0:-1]))
    assert forwards == backwards
    assert len({peak for peak, _, _ in forwards.values()}) >= 4
    assert all(gradients for _, gradients, _ in forwards.values())


def examined(measured: Bench, order: list[Strategy]) -> dict[str, tuple[int, bool, bool]]:
    found = [measured.examine(strategy) for strategy in order]
    return {c.strategy.name: (c.peak_bytes, c.gradients_equal, c.buffers_equal) for c in found}


def test_resident_bytes_are_what_is_there_before_a_step() -> None:
    work = workload()
    there = [*work.model.parameters(), *work.model.buffers(), work.sample]
    assert profile_of_small().resident_bytes == unique_storage_bytes(there)


def test_ours_is_as_predicted_and_its_statistics_are_right() -> None:
    work = workload()
    measured = bench(work)
    rows = {s.name: (s, measured.examine(s)) for s in strategies()}
    strategy, ours = rows["ours"]
    assert ours.peak_bytes == pytest.approx(strategy.predicted_peak_bytes, abs=100)  # scalars
    assert ours.gradients_equal
    assert ours.buffers_equal
    assert rows["full, each block"][1].gradients_equal


def test_the_model_is_left_as_it_was() -> None:
    work = workload()
    before, seen = attributes(work.model), work.model.get_buffer("seen").clone()
    weight = work.model.get_parameter("head.weight")
    weight.grad = gradient = torch.ones_like(weight)
    state, drawn = torch.get_rng_state(), random.getstate()
    measured = bench(work)
    configurations = [measured.examine(strategy) for strategy in strategies()]
    measured.time(configurations, 2, lambda text, share: None)
    assert all(len(c.seconds) == len(c.wall_s) == 2 for c in configurations)
    assert attributes(work.model) == before
    assert weight.grad is gradient
    assert torch.equal(work.model.get_buffer("seen"), seen)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == drawn


def fails_half_way(model: nn.Module) -> None:
    def forward(*args, **kwargs):
        raise RuntimeError("out of luck\nmore of it")

    model.get_submodule("blocks.3").forward = forward


def fails_to_install(model: nn.Module) -> None:
    checkpoint_module(model.get_submodule("blocks.0"))
    raise ValueError("cannot")


def test_what_the_caller_has_frozen_stays_frozen() -> None:
    measured = bench(workload())
    plain = measured.examine(strategies()[0])
    for frozen in (True, False):
        gc.freeze() if frozen else gc.unfreeze()
        measured.time([plain], 1, lambda *_: None)
        assert bool(gc.get_freeze_count()) == frozen
    gc.freeze()


def test_a_strategy_that_fails_is_a_row_that_says_why_and_nothing_else() -> None:
    work = workload()
    before, seen = attributes(work.model), work.model.get_buffer("seen").clone()
    measured = bench(work)
    none = measured.examine(Strategy("none", "none", lambda model: model))
    for install, why in (
        (fails_half_way, "RuntimeError: out of luck"),
        (fails_to_install, "ValueError: cannot"),
    ):
        failed = measured.examine(Strategy("fails", "other", install))
        assert (failed.error, failed.peak_bytes) == (why, 0)
        assert attributes(work.model) == before
        assert torch.equal(work.model.get_buffer("seen"), seen)
        assert all(p.grad is None for p in work.model.parameters())
    again = measured.examine(Strategy("none again", "none", lambda model: model))
    assert again.peak_bytes == none.peak_bytes
    assert again.gradients_equal


def test_a_wrong_gradient_is_seen() -> None:
    def wrong(model: nn.Module) -> None:
        inner = model.get_submodule("head").forward
        model.get_submodule("head").forward = lambda x: inner(x) * (1 + 2**-20)

    measured = bench(workload())
    measured.examine(Strategy("none", "none", lambda model: model))
    assert not measured.examine(Strategy("wrong", "other", wrong)).gradients_equal


def test_wrong_statistics_are_seen() -> None:
    """A checkpointed BatchNorm counts its batch twice."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))).train()
    measured = bench(Workload("norm", "norm", model, batch(), ("1",)))
    rows = [measured.examine(strategy) for strategy in by_hand(("1",), {})[:3]]
    assert [row.buffers_equal for row in rows] == [True, True, False]
    assert all(row.gradients_equal for row in rows)
    assert model.get_buffer("1.1.num_batches_tracked") == 0


def test_a_plans_hooks_are_taken_off_with_it():
    model = workload().model
    profile = profile_of_small()
    installed = Installed(model, autoac.solve(profile, least(profile)).apply)
    assert not model._forward_pre_hooks
    with installed.applied():
        assert model._forward_pre_hooks
    assert not model._forward_pre_hooks


def test_a_strategy_is_applied_and_taken_off() -> None:
    model = make(blocks=4)
    before = attributes(model)
    installed = Installed(model, lambda m: checkpoint_module(m.get_submodule("blocks.1")))
    assert attributes(model) == before
    with installed.applied():
        assert "forward" in vars(model.get_submodule("blocks.1"))
        assert "forward" not in vars(model.get_submodule("blocks.0"))
    assert attributes(model) == before


def test_a_step_of_the_users_own() -> None:
    """It trains the model itself, and all strategies start from the same weights all the same."""
    model, x = make(blocks=4), batch()

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
        return loss

    weights = [p.detach().clone() for p in model.parameters()]
    measured = bench(Workload("own", "own", model, step, BLOCKS))
    rows = [measured.examine(strategy) for strategy in by_hand(BLOCKS, {})]
    assert all(row.gradients_equal and not row.error for row in rows)
    assert rows[2].peak_bytes < rows[0].peak_bytes
    assert all(map(torch.equal, model.parameters(), weights))


@pytest.mark.parametrize("has_stepped", [False, True])
def test_the_optimizer_of_a_whole_step_is_left_as_it_was(has_stepped: bool) -> None:
    """Its state is set up before a peak is measured, and is not there afterwards if it was not before."""
    model, x = make(blocks=4), batch()
    adam = torch.optim.Adam(model.parameters())

    def step() -> torch.Tensor:
        adam.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        adam.step()
        return loss

    if has_stepped:
        step()
    before, weights = copy.deepcopy(adam.state_dict()), [p.detach().clone() for p in model.parameters()]
    at = [value.data_ptr() for row in adam.state.values() for value in row.values()]
    measured = bench(Workload("own", "own", model, step, BLOCKS))
    rows = [measured.examine(strategy) for strategy in by_hand(BLOCKS, {})[:3]]
    assert all(row.gradients_equal for row in rows)
    assert rows[2].peak_bytes < rows[0].peak_bytes == rows[1].peak_bytes
    for _ in range(2):
        assert_equal(adam.state_dict(), before)
        assert [value.data_ptr() for row in adam.state.values() for value in row.values()] == at
        assert all(map(torch.equal, model.parameters(), weights))
        measured.time(rows, 2, lambda *_: None)


def assert_equal(state: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(state, other, rtol=0, atol=0)


def test_a_step_that_drops_its_gradients_is_refused() -> None:
    """Nothing would be compared, and everything called equal."""
    model, x = make(blocks=4), batch()

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    with pytest.raises(ProfilingError, match="leaves no gradients to compare"):
        compare(Workload("own", "own", model, step, BLOCKS), rounds=1)


class StolenTime:
    """The clock of a machine whose host takes seconds away in some steps.

    Args:
        seconds: what it takes from each step, in order; nothing from later ones.
    """

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.steps = 0

    def clock(self, step) -> tuple[float, float]:
        step()
        self.steps += 1
        return float(self.steps), 10.0

    def stolen_s(self) -> float:
        return sum(self.seconds[: self.steps])


@pytest.mark.parametrize(
    ("seconds", "kept", "again"),
    [
        ([], 1.0, 0),
        ([0.001], 1.0, 0),
        ([50.0, 50.0, 0.001], 3.0, 2),
        ([5000.0, 20.0, 9000.0, 5000.0, 5000.0], 2.0, 3),  # it gives up, and takes the least disturbed
    ],
)
def test_samples_that_the_host_has_disturbed_are_taken_again(monkeypatch, seconds, kept, again) -> None:
    stolen = StolenTime(seconds)
    monkeypatch.setattr("autoac.price.meters.stolen_s", stolen.stolen_s)
    measured = bench(workload())
    measured.clock = stolen.clock
    configuration = measured.examine(Strategy("none", "none", lambda model: None))
    measured.time([configuration], 1, lambda *_: None)
    assert configuration.seconds == [kept]
    assert configuration.wall_s == [10.0]
    assert measured.taken_again == again
