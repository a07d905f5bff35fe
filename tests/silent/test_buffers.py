"""Buffers, parameters and attributes that numpy writes in a forward: seen, put back, and not written a second time."""

from __future__ import annotations

import copy
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from autoac.record import buffers
from autoac.record.buffers import Buffers
from tests.execute.exact.harness import assert_nothing_active
from tests.small_models import least_bytes

SAMPLE = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):
    """Scales by a buffer that numpy changes before or after it is read, and counts by an op."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.after = after
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(16))
        self.total = torch.zeros(16)  # an attribute, as a buffer is
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def grow(self) -> None:
        self.scale.numpy()[...] *= np.float32(1.1)
        self.total.numpy()[...] += self.scale.numpy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        self.calls += 1
        if not self.after:
            self.grow()
        hidden = (hidden * self.scale).tanh()
        if self.after:
            self.grow()
        return (hidden * hidden).sin().exp()


def build(after: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled(after) for _ in range(3)), nn.BatchNorm1d(16))


def trained(model: nn.Module) -> list[torch.Tensor]:
    found = []
    for _ in range(3):
        loss = model(SAMPLE).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad(set_to_none=True)
    totals = [module.total for module in model.modules() if isinstance(module, Scaled)]
    return [*found, *model.buffers(), *totals]


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("after", [False, True])
def test_written_by_numpy(after: bool, engine: Any):
    expected, model = trained(build(after)), build(after)
    profile = autoac.profile(model, SAMPLE)
    assert all(map(torch.equal, model.state_dict().values(), build(after).state_dict().values()))
    assert not any(module.total.any() for module in model.modules() if isinstance(module, Scaled))
    (note,) = (note for note in profile.notes if note.startswith("tensors of modules"))
    assert note.count("scale") == note.count("total") == 3
    assert "calls" not in note
    assert "running" not in note
    try:
        plan = autoac.solve(profile, 1, engine=engine)
    except autoac.InfeasibleBudgetError as error:
        plan = autoac.solve(profile, error.minimum_bytes, engine=engine)
    assert any(region.wrapped for region in plan.regions) or engine == "sac"
    assert all(map(torch.equal, trained(plan.apply(model)), expected))


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_in_the_recorded_step_of_a_loop(engine: Any):
    expected, model = trained(build(False)), build(False)
    handle = autoac.auto(model, "1GB", engine=engine)
    assert all(map(torch.equal, trained(model), expected))
    assert handle.plan is not None
    (note,) = (note for note in handle.plan.notes if note.startswith("tensors of modules"))
    assert note.count("scale") == note.count("total") == 3


def test_a_loops_step_that_has_read_before_is_refused():
    """The recorded step runs everything twice; it was wrong in silence."""
    model = build(True)
    handle = autoac.auto(model, "1GB")
    with pytest.raises(RuntimeError, match="has overwritten what it had read"):
        trained(model)
    handle.remove()
    assert_nothing_active()


class Shrunk(nn.Module):
    """Numpy shrinks its weight before or after the weight is used; a counter in a list is an attribute."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.after = after
        self.counts = [torch.zeros(2), torch.zeros(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight.detach().numpy()
        if not self.after:
            weight *= np.float32(0.9)
        x = self.inner(x).tanh()
        if self.after:
            weight *= np.float32(0.9)
        self.counts[0] += 1
        self.counts[1].numpy()[...] += 1
        return (x * x).sin().exp()

    def state(self) -> list[torch.Tensor]:
        return [self.inner.weight.detach(), *self.counts]


def shrunk(after: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Shrunk(after) for _ in range(3)))


def state(model: nn.Sequential) -> list[torch.Tensor]:
    return [tensor for module in model if isinstance(module, Shrunk) for tensor in module.state()]


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("after", [False, True])
def test_parameters_and_lists_written_by_numpy(after: bool, engine: Any):
    expected, model = shrunk(after), shrunk(after)
    profile = autoac.profile(model, SAMPLE)
    assert all(map(torch.equal, state(model), state(expected)))
    (note,) = (note for note in profile.notes if note.startswith("tensors of modules"))
    assert note.count("inner.weight") == note.count("counts.1") == 3
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine)
    plan.verify(model, SAMPLE)
    assert all(map(torch.equal, state(model), state(expected)))
    found = trained(plan.apply(model))
    assert all(map(torch.equal, found, trained(expected)))
    assert all(map(torch.equal, state(model), state(expected)))


class Functional(nn.Module):
    """No lean module reads the weight that numpy shrinks afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x @ self.weight).tanh().sin()
        self.weight.detach().numpy()[...] *= np.float32(0.9)
        return self.last(x).exp()


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_weight_written_after_it_was_read(engine: Any):
    torch.manual_seed(0)
    model = nn.Sequential(Functional(), Functional(), nn.Linear(16, 16))
    expected = copy.deepcopy(model)
    profile = autoac.profile(model, SAMPLE)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    plan = autoac.solve(profile, least_bytes(profile, engine), engine=engine).apply(model)
    for _ in range(3):
        for trained_one in (plan, expected):
            trained_one(SAMPLE).square().mean().backward()
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
        found, right = ([p.grad for p in one.parameters() if p.grad is not None] for one in (model, expected))
        assert len(found) == len(right) == 8
        assert all(map(torch.equal, found, right))
        model.zero_grad()
        expected.zero_grad()


def test_large_parameters_written_by_numpy(monkeypatch):
    """They are not copied, so they cannot be put back; who trains on is told."""
    monkeypatch.setattr(buffers, "_MOST_BYTES", 100)
    model = shrunk(False)
    with pytest.warns(
        UserWarning, match=r"overwrites 0.inner.weight, 1.inner.weight, .* load the weights again"
    ):
        profile = autoac.profile(model, SAMPLE)
    assert any("'2.inner.weight'" in note for note in profile.notes)


def test_views_of_one_storage():
    """Which of them was written is not known: all count."""
    torch.manual_seed(0)
    model = nn.Sequential(Functional(), Functional(), nn.Linear(16, 16))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    place = 0
    for parameter in model.parameters():
        parameter.data = flat[place : (place := place + parameter.numel())].view_as(parameter)
    before = flat.clone()
    profile = autoac.profile(model, SAMPLE)
    assert torch.equal(flat, before)
    (note,) = (note for note in profile.notes if note.startswith("tensors of modules"))
    assert "'0.weight'" in note
    assert "'1.weight'" in note


def test_a_large_parameter_that_is_assigned(monkeypatch: pytest.MonkeyPatch):
    """Assigning `.data` is seen, and put back."""
    monkeypatch.setattr(buffers, "_MOST_BYTES", 0)

    class Clamped(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
            return super().forward(input)

    model = Clamped(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        profile = autoac.profile(model, SAMPLE)
    assert not any(note.startswith("tensors of modules") for note in profile.notes)


def odd_attributes() -> list[torch.Tensor]:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    numbers = torch.full((2,), float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return [freed, numbers[:1].expand(4), nested, torch.empty(3, dtype=torch.bits8), torch.eye(3).to_sparse()]


def test_attributes_of_any_kind_are_kept_by_trials():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.held = odd_attributes()
            self.freed, *_, self.sparse = odd_attributes()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).tanh()

    model = nn.Sequential(Odd(), Odd())
    plan = autoac.plan(model, SAMPLE, "1GB")
    assert plan.verify(model, SAMPLE).ok


def kinds() -> dict[str, torch.Tensor]:
    """Buffers of kinds whose ops are few."""
    numbers = torch.tensor([1.0 + 2j, 3.0], dtype=torch.complex64)
    found = {
        "conjugate": numbers.conj(),
        "negative": numbers.conj().imag,
        "float8": torch.ones(4).to(torch.float8_e4m3fn),
        "bits": torch.empty(3, dtype=torch.bits8),
        "number": torch.tensor(1.5),
        "empty": torch.empty(0),
        "expanded": torch.ones(1).expand(5),
        "sparse": torch.eye(3).to_sparse(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        found["quantized"] = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    return found


@pytest.mark.parametrize("kind", kinds())
def test_buffers_of_any_kind(kind: str):
    model = nn.Module()
    model.register_buffer("kept", kinds()[kind])
    found = Buffers(model, parameters=True)
    found.put_back()
    assert not found.overwritten


def test_what_a_step_drops_is_not_held():
    model = nn.Module()
    model.state = torch.ones(3)
    found, known = Buffers(model), weakref.ref(model.state)
    model.state = torch.zeros(3)
    assert known() is None
    found.put_back()
    assert not found.overwritten
