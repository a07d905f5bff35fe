"""A wrapper subclass with few ops of its own, as quantized weights and the states of low-bit optimizers are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

KNOWN = (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default)


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
            return func(x, weight.values(), *rest, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in KNOWN, f"{cls.__name__} has no {func}"
        return cls(func(args[0].integers), func(args[0].scale))

    def values(self) -> torch.Tensor:
        """Without quantization."""
        return self.integers.to(self.scale.dtype) * self.scale
