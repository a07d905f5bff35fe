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
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.price import chunked_loss
from autoac.price.chunked_loss import with_price_of_chunks
from autoac_solver.build.losses.chunked import CHUNKED
from autoac_solver.build.losses.cross_entropy import ChunkableLoss, chunkable_losses
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile
from tests.small_models import least_bytes

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 256
LOGITS = "aten._log_softmax*"


class Classifier(nn.Module):
    def __init__(self, classes: int = 2048, blocks: int = 1) -> None:
        super().__init__()
        wide = (
            layer
            for _ in range(blocks)
            for layer in (nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))
        )
        self.blocks, self.classes = nn.Sequential(*wide), nn.Linear(WIDTH, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.classes(self.blocks(x))
        return F.cross_entropy(logits, torch.arange(len(x)) % logits.shape[1])


@pytest.fixture(scope="module")
def profile() -> Profile:
    return autoac.profile(Classifier(), torch.randn(ROWS, WIDTH))


@pytest.fixture
def loss(profile: Profile) -> ChunkableLoss:
    [found] = chunkable_losses(profile)
    return found


def at_price(profile: Profile, price_s: float | None) -> Profile:
    """The profile if chunks cost this; None for no measured price."""
    [loss] = chunkable_losses(profile)
    others = {name: parts for name, parts in profile.costs.items() if name != CHUNKED}
    costs = others if price_s is None else others | {CHUNKED: {loss.kind: price_s}}
    return dataclasses.replace(profile, costs=costs)


def tightest(profile: Profile) -> autoac.Plan:
    plan = autoac.solve(profile, profile.least_peak_bytes)
    assert plan.record.chunked_losses
    return plan


def test_it_is_measured_with_the_sizes_of_the_loss(profile: Profile, loss: ChunkableLoss, tmp_path: Path):
    assert loss.kind == f"float32[{ROWS},2048]"
    price_s = profile.costs[CHUNKED][loss.kind]
    assert math.isfinite(price_s)
    assert 0.0 <= price_s < 1.0
    profile.save(tmp_path / "profile.json")
    assert autoac.Profile.load(tmp_path / "profile.json").costs == profile.costs


def test_a_plan_pays_it(profile: Profile, loss: ChunkableLoss):
    free_s = tightest(at_price(profile, 0.0)).record.predicted_extra_s
    again_s = sum(profile.tape[op].again_s for op in loss.forward)
    assert tightest(at_price(profile, None)).record.predicted_extra_s == pytest.approx(free_s + again_s)
    assert tightest(at_price(profile, 1e-3)).record.predicted_extra_s == pytest.approx(free_s + 1e-3)


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_loss_without_need_of_chunks_is_a_whole_even_if_they_are_free(engine: str):
    """The peak is in the blocks, so chunks of these few logits are of no use; only a tie could bring them about."""
    model = Classifier(50, blocks=4)
    profile = at_price(autoac.profile(model, torch.randn(ROWS, WIDTH)), 0.0)
    least = least_bytes(profile, engine)
    for share in (0.2, 0.5, 0.8):
        budget = int(least + share * (profile.peak_bytes - least))
        plan = autoac.solve(profile, budget, engine=engine)
        whole = autoac.solve(profile, budget, engine=engine, policies=[Policy("MUST_SAVE", op=LOGITS)])
        assert not plan.record.chunked_losses
        assert plan.predicted_peak_bytes <= budget
        assert plan.predicted_overhead == pytest.approx(whole.predicted_overhead)


def test_hints_have_weight_even_if_chunks_are_free(profile: Profile):
    free = at_price(profile, 0.0)
    wanted = autoac.solve(free, "100GB", policies=[Policy("PREFER_RECOMPUTE", op=LOGITS)])
    assert wanted.record.chunked_losses
    unwanted = autoac.solve(
        free, free.least_peak_bytes, policies=[Policy("PREFER_SAVE", op=LOGITS, weight=3)]
    )
    assert unwanted.record.chunked_losses
    again_s = sum(free.tape[loss.log_softmax].again_s for loss in chunkable_losses(free))
    assert unwanted.record.hint_s == pytest.approx(3 * again_s)


def test_it_is_measured_once_and_unseen(profile: Profile, monkeypatch: pytest.MonkeyPatch):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} is seen")

    bare = dataclasses.replace(profile, costs={})
    chunked_loss._measured_s.cache_clear()
    state = torch.get_rng_state()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"), Seen():
        found = with_price_of_chunks(bare, CPU)
    assert found.costs[CHUNKED].keys() == profile.costs[CHUNKED].keys()
    assert torch.equal(torch.get_rng_state(), state)

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it is measured again")

    monkeypatch.setattr(chunked_loss, "in_turn", fail)
    assert with_price_of_chunks(bare, CPU).costs == found.costs


def test_without_chunks_nothing_is_measured(profile: Profile):
    """A model without a loss, hooks under which it is not chunked, and devices on which it is not tried."""
    plain = autoac.profile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.randn(ROWS, WIDTH))
    assert CHUNKED not in plain.costs
    bare = dataclasses.replace(profile, costs={})
    assert CHUNKED not in with_price_of_chunks(bare, torch.device("cuda")).costs
    with torch.autograd.graph.save_on_cpu():
        assert CHUNKED not in with_price_of_chunks(bare, CPU).costs
    assert CHUNKED in with_price_of_chunks(bare, CPU).costs


@pytest.mark.parametrize(
    ("rows", "classes", "measured"), [(1, 2, 1), (300, 50, 256), (1024, 50_257, 256), (10**6, 2**24, 1)]
)
def test_large_losses_are_measured_by_some_of_their_rows(
    loss: ChunkableLoss, rows: int, classes: int, measured: int
):
    assert chunked_loss._rows_measured(dataclasses.replace(loss, rows=rows, classes=classes), 4) == measured
