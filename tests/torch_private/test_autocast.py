"""Kernels of the CPU's autocast."""

import pytest
import torch
from torch.nn import functional as F

from autoac import torch_private

pytestmark = pytest.mark.skipif(not torch_private.CAN_REPLACE_CASTS, reason="torch 2.9 and newer")


def results(x: torch.Tensor) -> list[torch.dtype]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = F.linear(x, x)
        return [y.dtype, F.layer_norm(y, (4,)).dtype, F.mse_loss(y, y).dtype]


def test_ops_that_autocast_casts():
    names = torch_private.cast_by_cpu_autocast()
    assert {"linear", "mse_loss", "conv_transpose2d.input"} <= set(names)
    assert "relu" not in names
    assert torch_private.aten_overload("softmax.int") is torch.ops.aten.softmax.int
    assert torch_private.aten_overload("linear") is torch.ops.aten.linear.default
    assert torch_private.aten_overload("no_such_op") is None


def test_kernels_are_replaced_for_ones_own_calls_and_put_back():
    x, own = torch.randn(4, 4, requires_grad=True), [True]
    before = results(x)
    assert before == [torch.bfloat16, torch.bfloat16, torch.float32]

    def in_double(below, op, args, kwargs):
        with torch_private.without_cpu_autocast():
            assert F.linear(x, x).dtype is torch.float32
            return op(*(a.double() if isinstance(a, torch.Tensor) else a for a in args), **kwargs)

    def as_it_is(below, op, args, kwargs):
        return below()

    kernels = {"layer_norm": in_double, "mse_loss": as_it_is}
    with torch_private.cpu_autocast_kernels(kernels, lambda args, kwargs: own[0]):
        assert results(x) == [torch.bfloat16, torch.float64, torch.bfloat16]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            F.layer_norm(F.linear(x, x), (4,)).sum().backward()
        assert x.grad is not None
        own[0] = False
        assert results(x) == before
    assert results(x) == before
