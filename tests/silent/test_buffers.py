"""Buffers that numpy writes in a forward: seen, put back, and not written a second time."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from autoac.record.buffers import Buffers
from tests.execute.exact.harness import assert_nothing_active

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
    buffers = Buffers(model)
    buffers.put_back()
    assert not buffers.overwritten


def test_what_a_step_drops_is_not_held():
    model = nn.Module()
    model.state = torch.ones(3)
    buffers, known = Buffers(model), weakref.ref(model.state)
    model.state = torch.zeros(3)
    assert known() is None
    buffers.put_back()
    assert not buffers.overwritten
