"""`verify` on models whose weights are wrapper subclasses with few ops of their own, as quantized ones are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.check.equal import same
from autoac.step.restore import values_kept
from autoac.torch_private import parts_of

KNOWN = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)
X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


class Quantized(torch.Tensor):
    """Rows of eight-bit integers with a scale each; linear layers can read it, and it can be detached and copied."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor):
        self.integers, self.scale = values, scale

    @classmethod
    def of(cls, weight: torch.Tensor) -> Quantized:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["integers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Any], *_: Any) -> Quantized:
        return cls(parts["integers"], parts["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, *rest = args
            return func(x, weight.integers.to(weight.scale.dtype) * weight.scale, *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in KNOWN, f"{cls.__name__} has no {func}"
        return cls(func(args[0].integers), func(args[0].scale))


class Adapted(nn.Module):
    """A frozen layer with a small one beside it that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.down, self.up = nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(8, 32)
        self.frozen.weight = nn.Parameter(Quantized.of(self.frozen.weight.detach()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(self.frozen(x)) + self.up(torch.sin(self.down(torch.cos(x)))))


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_verify(engine: str):
    model = nn.Sequential(*(Adapted() for _ in range(4)))
    profile = autoac.profile(model, X)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1, engine=engine)
    plan = autoac.solve(profile, least.value.minimum_bytes, engine=engine)
    assert any(region.wrapped for region in plan.regions)
    report = plan.verify(model, X)
    assert report.ok, report
    assert report.measured_peak_bytes == report.predicted_peak_bytes


def test_same_looks_at_the_parts():
    weight = torch.linspace(-1, 1, 64).reshape(8, 8)
    one, other = Quantized.of(weight), Quantized.of(weight)
    assert same(one, other)
    other.scale[3] += 1
    assert not same(one, other)
    assert not same(one, weight)


def test_parts_are_put_back():
    weight = Quantized.of(torch.linspace(-1, 1, 64).reshape(8, 8))
    before = [part.clone() for part in parts_of(weight)]
    with values_kept([weight]):
        weight.integers.zero_()
        weight.scale += 1
    assert all(map(torch.equal, parts_of(weight), before))
