"""Random numbers: dropout that is partly saved, attention's dropout, generators of the user's own."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.execute.replay import ReplayCall
from autoac.execute.sac.randoms import HostRandoms
from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_plan_exact,
    decisions,
    differences,
    plan_with,
    recomputes,
    run,
)
from tests.features.feature import feature

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
BERNOULLI = "aten.bernoulli_.float"  # what dropout draws its mask with on CPU
MASK_OPS = {"aten.empty_like.default", BERNOULLI, "aten.div_.Scalar"}


def dropouts() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()),
        *(nn.Dropout(0.3), nn.Linear(64, 64)),
        *(nn.Dropout(0.5), nn.Tanh()),
    )


DROPOUTS = Case(
    build=lambda: nn.Sequential(dropouts(), dropouts()),
    forward=lambda model: model(X).square().mean(),
    regions=("0", "1"),
)


@feature("dropout")
def test_dropout(engine):
    made = assert_exact(DROPOUTS, engine)
    assert any(decisions(made[0.0], BERNOULLI))


@feature("dropouts of one region partly saved", "replay")
@pytest.mark.parametrize("saved", range(3))
def test_one_of_three_dropouts_saved(saved):
    """The recomputed ones before and after the saved one draw the same masks as in forward."""
    partly = plan_with(DROPOUTS, "replay", lambda region, op, nth: not (op in MASK_OPS and nth == saved))
    assert decisions(partly, BERNOULLI) == [nth != saved for nth in range(3)] * 2
    assert_plan_exact(DROPOUTS, partly)


def test_dropouts_of_one_region_saved_under_sac():
    """Its random ops go together, but each region has a random state of its own."""
    partly = plan_with(DROPOUTS, "sac", lambda region, op, nth: not (op in MASK_OPS and region == "0"))
    assert decisions(partly, BERNOULLI) == [False] * 3 + [True] * 3
    assert_plan_exact(DROPOUTS, partly)


@feature("dropouts of one region partly saved", "sac", cell="refused")
def test_one_of_three_dropouts_saved_is_refused_under_sac():
    """Torch restores one random state for the whole region, so its masks would be other ones."""
    partly = plan_with(DROPOUTS, "sac", lambda region, op, nth: not (op in MASK_OPS and nth == 1))
    with pytest.raises(RuntimeError, match=r'draws random numbers for one part .* Plan with engine="replay"'):
        run(DROPOUTS, partly)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_attention_with_dropout(engine):
    x = torch.linspace(-1, 1, 4 * 16 * 32).reshape(4, 16, 32)
    case = Case(
        build=lambda: nn.Sequential(Attention(), Attention()),
        forward=lambda model: model(x).square().mean(),
        regions=("0", "1"),
    )
    assert_exact(case, engine)


class OwnGenerator(nn.Module):
    """Noise from a generator of its own, by an op that makes a tensor and by one that fills one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        x = torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=self.generator)
        keep = torch.empty_like(x).bernoulli_(0.8, generator=self.generator)
        return torch.sin(x * keep) * torch.rand_like(x)


@feature("a generator of the model's own")
def test_own_generator(engine):
    case = Case(
        build=lambda: nn.Sequential(OwnGenerator(), OwnGenerator()),
        forward=lambda model: model(X).square().mean(),
        regions=("0", "1"),
    )
    expected = run(case)
    assert "generator 0.generator of step 0" in expected
    assert_exact(case, engine)


class PythonNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sin(self.linear(x) * random.random())


class NumpyNoise(PythonNoise):
    def forward(self, x):
        return torch.sin(self.linear(x) * torch.from_numpy(np.random.rand(64).astype(np.float32)))


class LayerDrop(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if (np.random.rand() if index % 2 else random.random()) >= 0.4:
                x = layer(x)
        return torch.sin(x)


@feature("random numbers of Python and numpy in a region")
@pytest.mark.parametrize("kind", [PythonNoise, NumpyNoise])
def test_random_numbers_of_the_host(engine, kind):
    def forward(model):
        random.seed(5)
        np.random.seed(5)
        return model(X).square().mean()

    case = Case(lambda: nn.Sequential(kind(), kind()), forward, regions=("0", "1"))
    assert_exact(case, engine)


def test_layers_that_are_dropped_by_the_hosts_numbers_inside_of_a_region(engine):
    """The second run takes the path of the first, in each step, and leaves the generators as it found them."""
    torch.manual_seed(0)
    model = nn.Sequential(LayerDrop(), LayerDrop()).train()
    profile = autoac.profile(model, X, regions=["0", "1"])
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1000, engine=engine)
    plan = autoac.solve(profile, least.value.minimum_bytes, engine=engine)
    assert recomputes(plan)

    def steps() -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        values: list[Any] = []
        for _ in range(20):
            model.zero_grad()
            model(X).square().mean().backward()
            values.append([parameter.grad for parameter in model.parameters()])
        return [*values, random.random(), np.random.rand()]

    expected = steps()
    plan.apply(model)
    found = steps()
    assert found[-2:] == expected[-2:]
    for ours, theirs in zip(found[:-2], expected[:-2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a is b is None or torch.equal(a, b)


def test_regions_that_draw_nothing_on_the_host_are_looked_at_once(monkeypatch):
    plan = plan_with(DROPOUTS, "sac", lambda region, op, nth: True)
    model = plan.apply(DROPOUTS.model())
    model.eval()
    model(X).sum().backward()
    model.train()
    looked = []
    init = HostRandoms.__init__
    monkeypatch.setattr(HostRandoms, "__init__", lambda self: (looked.append(self), init(self))[1])
    for _ in range(3):
        model(X).sum().backward()
    assert len(looked) == 2  # not again after the first step in training


def test_a_call_that_fails_does_not_tell_whether_a_region_draws(monkeypatch):
    case = Case(lambda: nn.Sequential(PythonNoise(), PythonNoise()), lambda m: m(X).sum(), regions=("0", "1"))
    plan = plan_with(case, "sac", lambda region, op, nth: True)
    model = case.model()
    random.seed(5)
    model(X).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model = plan.apply(case.model())
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(X)
    random.seed(5)
    model(X).sum().backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))


def test_randomised_relu(engine):
    """One op writes the noise that it draws into a tensor it is given, and autograd has saved that tensor before."""
    case = Case(
        build=lambda: nn.Sequential(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.RReLU()),
            nn.Sequential(nn.Linear(64, 64), nn.RReLU()),
        ),
        forward=lambda model: model(X).square().mean(),
        regions=("0", "1"),
    )
    assert_exact(case, engine)


def test_replay_that_draws_other_numbers_is_noticed(monkeypatch):
    """A check of the harness: a broken engine must not pass it."""
    plan = plan_with(DROPOUTS, "replay", lambda region, op, nth: True)
    expected = run(DROPOUTS)
    run_one = ReplayCall._run_one

    def without_state(call, record, table):
        record.rng = None
        return run_one(call, record, table)

    monkeypatch.setattr(ReplayCall, "_run_one", without_state)
    found = differences(run(DROPOUTS, plan), expected)
    assert any("gradient" in name for name in found)
    assert any("RNG" in name for name in found)
