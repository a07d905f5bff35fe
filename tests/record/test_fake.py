"""Profiles on fake tensors: the same record as for real, nothing allocated, and a clear word where it cannot be."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import autoac
from autoac.api import Mode
from autoac_solver.build.build import build
from autoac_solver.plan.partitions import partitions
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.profile import Profile
from tests import real_models

ROOT = Path(__file__).resolve().parents[2]
# torch's fake grouped_mm (mixtral) takes bfloat16 only, and the CTC loss of wav2vec2 selects labels by their values.
FAMILIES = [name for name in real_models.ALL if name not in ("mixtral", "wav2vec2")]


def peaks(profile: Profile) -> list[int]:
    """Simulated peaks of both engines for several choices of regions: nothing, all and every other group recomputed."""
    found = []
    for engine in ("replay", "sac"):
        for calls in partitions(profile)[:3]:
            problem = build(profile, calls, engine).problem
            free = [not group.must_save for group in problem.groups]
            simulator = Simulator(problem)
            for decisions in ([False] * len(free), free, [f and i % 2 == 0 for i, f in enumerate(free)]):
                found.append(simulator.simulate(decisions).peak_bytes)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_fake_and_real_profile_have_the_same_peaks_to_the_byte(family: str):
    made = getattr(real_models, family)()
    real = autoac.profile(made.model, made.sample, loss=made.loss, mode="real")
    fake = autoac.profile(made.model, made.sample, loss=made.loss, mode="fake")
    assert (real.mode, fake.mode) == ("real", "fake")
    assert fake.op_fingerprint == real.op_fingerprint
    assert fake.model_fingerprint == real.model_fingerprint
    assert fake.resident_bytes == real.resident_bytes
    assert peaks(fake) == peaks(real)
    assert fake.time_shares.get("measured", 0) > 0.95


def test_a_plan_from_a_fake_profile_keeps_its_promise():
    made = real_models.gpt2()
    fake = autoac.profile(made.model, made.sample, loss=made.loss, mode="fake")
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(fake, 1)
    report = autoac.solve(fake, caught.value.minimum_bytes).verify(made.model, made.sample, made.loss)
    assert report.ok
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_the_model_is_left_as_it_was():
    made = real_models.resnet()
    tensors = dict(made.model.state_dict(keep_vars=True))
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    state = torch.get_rng_state()
    autoac.profile(made.model, made.sample, loss=made.loss, mode="fake")
    after = made.model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in tensors.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


class FrozenEncoder(nn.Module):
    """A recurrent layer that runs without gradients, and the same one with."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.recurrent(x)[0]
        return self.recurrent(x)[0].square().mean()


def test_a_recurrent_layer_without_gradients_makes_no_workspace():
    model, x = FrozenEncoder(), torch.randn(4, 30, 16)
    real, fake = (autoac.profile(model, x, mode=mode) for mode in ("real", "fake"))
    assert peaks(fake) == peaks(real)
    assert [s.bytes for s in fake.storage_table if s.bytes] == [s.bytes for s in real.storage_table]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 16)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.tokens(ids))[0]).logsumexp(-1).mean()


def test_tied_and_flattened_parameters():
    model, ids = Tied(), torch.randint(40, (2, 5))
    real, fake = (autoac.profile(model, ids, mode=mode) for mode in ("real", "fake"))
    assert fake.resident_bytes == real.resident_bytes
    assert peaks(fake) == peaks(real)
    model(ids).backward()  # the GRU's own list of weights is back, too


def test_private_workspace_of_a_recurrent_layer():
    """Fake tensors do not know it: on this device the kernel is asked, for another device the profile says so."""
    model = nn.LSTM(16, 32, num_layers=2, bidirectional=True, dropout=0.2, batch_first=True)
    x = torch.randn(2, 50, 16)

    def loss(output: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return output[0].mean()

    real, fake = (autoac.profile(model, x, loss=loss, mode=mode) for mode in ("real", "fake"))
    assert peaks(fake) == peaks(real)
    assert not any("aten.mkldnn_rnn_layer.default" in note for note in fake.notes)
    elsewhere = autoac.profile(model, x, loss=loss, device="h200")
    assert any("aten.mkldnn_rnn_layer.default" in note for note in elsewhere.notes)


SEVENTY_BILLION = """
import resource, torch, autoac
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
config = LlamaConfig(num_hidden_layers=80, vocab_size=128256, use_cache=False, **sizes)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)
assert sum(parameter.numel() for parameter in model.parameters()) > 70e9
ids = torch.ones(8, 4096, dtype=torch.long)
profile = autoac.profile(model, {"input_ids": ids, "labels": ids}, device="h200")
most = profile.peak_bytes
try:
    autoac.solve(profile, "1GB")
except autoac.InfeasibleBudgetError as error:
    plan = autoac.solve(profile, (error.minimum_bytes + most) // 2)
assert plan.predicted_peak_bytes <= plan.budget_bytes < most
assert plan.predicted_overhead > 0
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 8 * 2**30
"""


@pytest.mark.slow
def test_a_llama_of_70b_from_the_meta_device_is_planned_for_a_gpu():
    pytest.importorskip("transformers")
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    command = [sys.executable, "-c", SEVENTY_BILLION]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


class Elsewhere(nn.Module):
    """Makes something on another device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.zeros(1000, device="meta").is_meta
        return self.linear(x)


def test_what_is_on_another_device_takes_nothing_of_this_one():
    real, fake = (autoac.profile(Elsewhere(), torch.randn(2, 8), mode=mode) for mode in ("real", "fake"))
    assert 4000 not in [storage.bytes for storage in (*real.storage_table, *fake.storage_table)]


def test_a_model_from_the_meta_device_needs_no_memory():
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(8192, 8192), nn.GELU()) for _ in range(40)]
        model = nn.Sequential(*layers)
        x = torch.empty(512, 8192)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = autoac.profile(model, x, device="h200")
    assert profile.resident_bytes > 10_000_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB
    assert any("meta device" in note for note in profile.notes)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert autoac.solve(profile, "141GB").predicted_overhead == 0


def test_an_optimizer_of_a_meta_model_counts():
    def made(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
        return model, torch.optim.AdamW(model.parameters())

    (real, real_optimizer), (meta, meta_optimizer) = made("cpu"), made("meta")
    x = torch.randn(16, 64)
    expected = autoac.profile(real, x, optimizer=real_optimizer)
    found = autoac.profile(meta, x.to("meta"), optimizer=meta_optimizer)
    assert found.resident_bytes == expected.resident_bytes > 3 * sum(p.nbytes for p in real.parameters())
    assert peaks(found) == peaks(expected)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * 2 if y.sum().item() > 0 else y


class Selects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y[y > 0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Linear(8, 8), Reads()),
            r"_local_scalar_dense.default reads a value on the host, in module '1' \(Reads\) ",
        ),
        (Selects(), r"aten.index.Tensor makes a result whose shape depends on values, in the model itself"),
    ],
)
def test_what_depends_on_values_is_an_error_that_names_op_and_module(model: nn.Module, message: str):
    with pytest.raises(autoac.ProfilingError, match=message) as caught:
        autoac.profile(model, torch.randn(4, 8), mode="fake")
    assert 'Profile with mode="real"' in str(caught.value)
    assert not any(isinstance(p, torch._subclasses.FakeTensor) for p in model.parameters())
    assert autoac.profile(model, torch.randn(4, 8)).mode == "real"


@torch.library.custom_op("autoac_test::nothing_fake", mutates_args=())
def nothing_fake(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


nothing_fake.register_autograd(lambda ctx, gradient: gradient)


@torch.library.custom_op("autoac_test::draws", mutates_args=())
def draws(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand_like(x)


draws.register_fake(torch.empty_like)
draws.register_autograd(lambda ctx, gradient: gradient)


class Drawing(nn.Sequential):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        first, second = self
        return second(torch.tanh(draws(torch.sin(first(input)))))


def test_random_states_of_custom_ops_count():
    """A custom op need not say that it draws, and on fake tensors it does not run."""
    model, x = Drawing(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    found = [
        [
            op.random_bytes
            for op in autoac.profile(model, x, mode=mode).tape
            if op.name == "autoac_test.draws.default"
        ]
        for mode in ("real", "fake")
    ]
    assert found[0] == found[1] == [torch.get_rng_state().nbytes]


def test_an_op_without_a_fake_implementation_is_named():
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nothing_fake(self.linear(x))

    with pytest.raises(
        autoac.ProfilingError, match=r"autoac_test.nothing_fake.default .*in the model itself"
    ):
        autoac.profile(Opaque(), torch.randn(4, 8), mode="fake")


def test_auto_runs_for_real_where_that_fits_and_says_when_it_does_not(monkeypatch: pytest.MonkeyPatch):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    assert autoac.profile(model, x).mode == "real"
    monkeypatch.setattr("autoac.api.profiling.free_bytes", lambda device: 100)
    profile = autoac.profile(model, x)
    assert profile.mode == "fake"
    assert "gradients alone take 288 bytes" in profile.notes[-1]


def test_auto_falls_back_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch):
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr("autoac.api.profiling.recorded_step", out_of_memory)
    profile = autoac.profile(nn.Linear(8, 8), torch.randn(4, 8))
    assert profile.mode == "fake"
    assert "did not fit here (no more)" in profile.notes[-1]


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("family", ["gpt2", "resnet", "mamba"])
def test_gradients_that_are_there_count_and_are_added_to(family: str, mode: Mode):
    made = getattr(real_models, family)()
    without = autoac.profile(made.model, made.sample, loss=made.loss, mode=mode)
    for parameter in made.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    profile = autoac.profile(made.model, made.sample, loss=made.loss, mode=mode)
    assert all(bool((p.grad == 0.5).all()) for p in made.model.parameters() if p.grad is not None)
    gradients = sum(p.nbytes for p in made.model.parameters())
    assert profile.resident_bytes - without.resident_bytes == gradients
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1)
    report = autoac.solve(profile, caught.value.minimum_bytes).verify(made.model, made.sample, made.loss)
    assert report.ok
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_notes_and_mode_are_saved(tmp_path):
    profile = autoac.profile(nn.Linear(8, 8), torch.randn(4, 8), mode="fake")
    profile.save(tmp_path / "p.json")
    loaded = Profile.load(tmp_path / "p.json")
    assert loaded == profile
    assert dataclasses.asdict(loaded.tape[0])["time_from"] in ("measured", "estimated")
