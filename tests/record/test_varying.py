"""Steps that do not call the same modules every time: the plan is for the one that calls them all, and says so."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from autoac.measure import measure_peak
from autoac.record.single_draws import CHANCE, HIGH, LOW, SingleDraws
from autoac_solver.plan.baselines import checkpointed
from autoac_solver.records.profile import VARIES, Profile
from tests.small_models import BATCH, WIDTH, Block, make

pytestmark = pytest.mark.usefixtures("one_thread")

RATE = 0.4
SKIPS: dict[str, Callable[[], bool]] = {
    "torch.rand([])": lambda: bool(torch.rand([]) < RATE),
    "torch.rand(1).item()": lambda: torch.rand(1).item() < RATE,
    "uniform_": lambda: bool(torch.empty(1).uniform_(0, 2) < 2 * RATE),
    "keep + rand, floored": lambda: not torch.floor(1 - RATE + torch.rand(())),
    "bernoulli": lambda: not torch.bernoulli(torch.tensor(1 - RATE)),
    "bernoulli_": lambda: bool(torch.empty(1).bernoulli_(RATE)),
    "called if below": lambda: not torch.rand([]) < 1 - RATE,
    "randint": lambda: int(torch.randint(5, (1,))) < 2,
    "random.random": lambda: random.random() < RATE,
    "random.uniform": lambda: random.uniform(0, 1) < RATE,
    "numpy.random.rand": lambda: np.random.rand() < RATE,
    "numpy.random.uniform": lambda: np.random.uniform(0, 1) < RATE,
}


class Dropping(nn.Module):
    """Blocks, each of which is skipped by chance."""

    def __init__(self, skips: Callable[[], bool], blocks: int = 5) -> None:
        super().__init__()
        self.skips = skips
        self.blocks = nn.ModuleList(Block(0.1) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if not (self.training and self.skips()):
                x = block(x)
        return x


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def numbers() -> list[int]:
    """The state of numpy's generator."""
    state: Any = np.random.get_state()
    return state[1].tolist()


def called(profile: Profile) -> set[str]:
    return {call.fqn for call in profile.calls}


def varies(profile: Profile) -> bool:
    return any(note.startswith(VARIES) for note in profile.notes)


def tight(profile: Profile) -> int:
    """A budget that takes some recomputation."""
    full = checkpointed(profile, ()).peak_bytes
    return int(profile.resident_bytes + 0.8 * (full - profile.resident_bytes))


def trains_exactly_within(
    plan: autoac.Plan, model: nn.Module, step: Callable[[], Any], steps: int
) -> list[int]:
    """Train some steps from seeds; gradients as without a plan, to the bit. Returns the peaks."""
    peaks = []
    for number in range(steps):
        gradients = []
        for planned in (False, True):
            model.zero_grad(set_to_none=True)
            seed(number)
            if planned:
                with plan.applied(model):
                    taken = measure_peak(step)
                peaks.append(plan.resident_bytes + taken.peak_above_start_bytes)
            else:
                step()
            gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
    model.zero_grad(set_to_none=True)
    return peaks


@pytest.mark.parametrize("kind", SKIPS)
def test_every_module_is_called_in_the_step_that_is_planned_for(kind: str):
    seed(3)
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Dropping(SKIPS[kind])).train(),
        torch.randn(BATCH, WIDTH),
    )
    states = torch.get_rng_state(), random.getstate(), numbers()
    profile = autoac.profile(model, x)
    assert {f"1.blocks.{i}" for i in range(5)} <= called(profile)
    (note,) = (note for note in profile.notes if note.startswith(VARIES))
    assert "all modules that any of them called" in note
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert numbers() == states[2]
    if kind != "uniform_" and kind != "bernoulli_":  # fake tensors are written, and hold no value
        fake = autoac.profile(model, x, mode="fake")
        assert fake.op_fingerprint == profile.op_fingerprint
        assert varies(fake)


def test_within_budget_whatever_is_skipped():
    seed(3)
    model, x = Dropping(SKIPS["torch.rand([])"]).train(), torch.randn(BATCH, WIDTH)
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, tight(profile))
    assert any(region.wrapped for region in plan.regions)
    peaks = trains_exactly_within(plan, model, lambda: model(x).mean().backward(), 10)
    assert max(peaks) <= plan.predicted_peak_bytes <= plan.budget_bytes
    assert len(set(peaks)) > 3
    assert not plan.is_not_followed


def test_users_own_step():
    """Run three times where single numbers are drawn, and twice where none are."""
    seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Dropping(SKIPS["called if below"])).train()
    x, runs = torch.randn(BATCH, WIDTH), []

    def step() -> None:
        runs.append(1)
        model(x).mean().backward()

    assert {f"1.blocks.{i}" for i in range(5)} <= called(autoac.profile(model, step))
    assert len(runs) == 3
    model.eval()
    autoac.profile(model, step)
    assert len(runs) == 5


def test_a_step_that_does_not_vary_has_no_note():
    profile = autoac.profile(make(blocks=2), torch.randn(BATCH, WIDTH))
    assert not varies(profile)


def test_the_state_that_an_optimizer_makes_is_no_variation():
    model = make(blocks=2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(BATCH, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert not varies(autoac.profile(model, step))


def test_a_draw_with_which_the_step_fails_is_left_out():
    seed(4)
    model = Dropping(
        SKIPS["called if below"]
    ).train()  # by the largest numbers nothing is called: no gradients
    profile = autoac.profile(model, torch.randn(BATCH, WIDTH))
    assert {f"blocks.{i}" for i in range(5)} <= called(profile)
    (note,) = (note for note in profile.notes if note.startswith("with the largest values"))
    assert "the step fails" in note


class EitherOr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(0.0), Block(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if torch.rand(()) < 0.5 else self.other(self.other(x))


def test_what_no_single_step_calls_is_named():
    profile = autoac.profile(EitherOr().train(), torch.randn(BATCH, WIDTH))
    (note,) = (note for note in profile.notes if note.startswith(VARIES))
    assert "'one' came in others only" in note
    assert "steps=10" in note
    assert "other" in called(profile)


class ByData(nn.Module):
    """Goes on for as long as dropout has it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(nn.functional.dropout(torch.ones(64), 0.5).count_nonzero()) % 7):
            x = self.block(x)
        return x


def test_a_step_that_varies_with_data_says_how_much():
    seed(1)
    profile = autoac.profile(ByData().train(), torch.randn(BATCH, WIDTH))
    (note,) = (note for note in profile.notes if note.startswith(VARIES))
    found = re.search(r"varies with its data \((\d+) to (\d+) ops in 4 runs", note)
    assert found
    assert int(found[1]) < int(found[2])
    assert f"planned for one of {len(profile.tape)} ops" in note


class ByLength(nn.Linear):
    """Runs on a segment; its length is drawn for each sample, and the largest counts."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        length = BATCH if not self.training else 1 + int(torch.rand(2).max() * (BATCH - 1))
        return super().forward(input[:length])


@pytest.mark.parametrize("drawn", [True, False])
def test_a_step_whose_sizes_are_drawn_says_so(drawn: bool):
    seed(1)
    profile = autoac.profile(ByLength(WIDTH, WIDTH).train(drawn), torch.randn(BATCH, WIDTH))
    notes = [note for note in profile.notes if note.startswith(VARIES)]
    assert len(notes) == drawn
    for note in notes:
        found = re.search(
            r"in the sizes of its tensors, .* a peak of .* to (.*) in 4 runs\): planned for one of (.*)\. The",
            note,
        )
        assert found is not None
        assert found[1] == found[2]  # the largest
        assert "plan.verify(model, sample, steps=10)" in note


def test_sizes_that_are_drawn_beside_layers_that_are_skipped():
    class Both(nn.Sequential):
        """Skips a layer by one number, and draws a length by many, as speech models do."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            first, second = self
            length = BATCH // 2 + int(torch.rand(BATCH // 2).lt(0.5).sum())
            hidden = first(input[:length])
            return hidden if torch.rand(()) < 0.5 else second(hidden)

    seed(1)
    profile = autoac.profile(Both(Block(0.0), Block(0.0)).train(), torch.randn(BATCH, WIDTH))
    (note,) = (note for note in profile.notes if note.startswith(VARIES))
    assert "all modules that any of them called. The sizes of its tensors vary, too" in note
    assert "steps=10" in note


@pytest.mark.parametrize("outcome", [HIGH, LOW])
def test_code_that_draws_until_it_likes_a_number_ends(outcome: str):
    likes = {HIGH: lambda u: u < 0.9, LOW: lambda u: u > 0.1}[outcome]

    class Choosy(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            while not likes(random.random()):
                pass
            return super().forward(input)

    assert autoac.profile(Choosy(WIDTH, WIDTH), torch.randn(BATCH, WIDTH)).tape


def test_only_single_numbers_are_decided_and_chance_decides_nothing():
    high, low, chance = SingleDraws(HIGH), SingleDraws(LOW), SingleDraws(CHANCE)
    with high.of_python():
        assert random.random() > 1 - 1e-6
        assert 3 - 1e-5 < random.uniform(2, 3) < 3
        assert np.random.rand(1) > 1 - 1e-6
        assert np.random.uniform(low=2, high=3) > 3 - 1e-5
        assert np.random.rand(8).max() < 1 - 1e-6
    assert high.count == 4
    with low.of_python():
        assert random.random() < 1e-6
    expected = random.Random(7).random()
    random.seed(7)
    with chance.of_python():
        assert random.random() == expected
    assert chance.count == 1


# -- real models; `benchmarks.loops` takes 30 steps of them ------------------------------------------------------------

WORDS = 61


def speech() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import WavLMConfig, WavLMForCTC

    config = WavLMConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3,
        mask_time_length=4,
        layerdrop=0.2,
    )
    sample = {"input_values": torch.randn(2, 240), "labels": torch.randint(3, WORDS, (2, 6))}
    return WavLMForCTC(config), sample


def long_documents() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LEDConfig, LEDForConditionalGeneration

    config = LEDConfig(
        vocab_size=WORDS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_encoder_position_embeddings=32,
        max_decoder_position_embeddings=32,
        attention_window=8,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
    )
    sample = {"input_ids": torch.randint(3, WORDS, (2, 16)), "labels": torch.randint(3, WORDS, (2, 12))}
    return LEDForConditionalGeneration(config), {**sample, "use_cache": False}


def series() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import AutoformerConfig, AutoformerForPrediction

    config = AutoformerConfig(
        prediction_length=4,
        context_length=8,
        d_model=32,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_layerdrop=0.2,
        decoder_layerdrop=0.2,
        num_time_features=1,
        lags_sequence=[1, 2],
        label_length=2,
        moving_average=3,
    )
    past = 8 + 2
    sample = {
        "past_values": torch.randn(4, past),
        "past_time_features": torch.randn(4, past, 1),
        "past_observed_mask": torch.ones(4, past),
        "future_values": torch.randn(4, 4),
        "future_time_features": torch.randn(4, 4, 1),
    }
    return AutoformerForPrediction(config), sample


def pictures() -> tuple[nn.Module, dict[str, Any]]:
    """Its drop path is a mask, so that its steps are alike."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        drop_path_rate=0.2,
    )
    sample = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])}
    return SwinForImageClassification(config), sample


@pytest.mark.slow
@pytest.mark.parametrize("build", [speech, long_documents, series, pictures])
def test_real_models_are_within_budget_in_every_step(build: Callable[[], tuple[nn.Module, dict[str, Any]]]):
    pytest.importorskip("transformers")
    seed(0)
    model, sample = build()
    model.train()
    profile = autoac.profile(model, sample)
    assert varies(profile) == (build is not pictures)
    assert not (varies(profile) and profile.parts)
    for budget in (tight(profile), profile.least_peak_bytes):
        plan = autoac.solve(profile, budget)
        steps = 3 if build is pictures else 10
        peaks = trains_exactly_within(plan, model, lambda: model(**sample).loss.backward(), steps)
        assert max(peaks) <= plan.budget_bytes
        assert any(region.wrapped for region in plan.regions)
        if build is not pictures:
            assert min(peaks) < 0.95 * max(peaks)
