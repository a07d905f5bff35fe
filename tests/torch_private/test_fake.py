"""Fake tensors."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses import FakeTensorMode

from autoac import torch_private


def test_fake_tensors_are_told_by_their_type():
    with FakeTensorMode():
        fake = torch.ones(3)
    assert torch_private.is_fake_type(type(fake))
    assert not torch_private.is_fake_type(torch.Tensor)


def test_real_tensors_within_a_fake_mode():
    with torch_private.FakeTensorMode():
        assert isinstance(torch.ones(2), torch_private.FakeTensor)
        with torch_private.unset_fake_temporarily():
            assert not torch_private.is_fake(torch.ones(2))
        assert torch_private.is_fake(torch.ones(2))


def test_group_norms_results_have_the_format_that_its_kernel_gives_them():
    aten: Any = torch.ops.aten
    forward, backward = aten.native_group_norm.default, aten.native_group_norm_backward.default

    def strides_of_results() -> list[tuple[int, ...]]:
        x = torch.ones(2, 8, 4, 4).to(memory_format=torch.channels_last)
        given: Any = (x, None, None, 2, 8, 16, 4, 1e-5)
        y, *statistics = torch_private.as_group_norms_kernel(forward, given, forward(*given))
        given = (y, x, *statistics, None, 2, 8, 16, 4, [True, False, False])
        gradient, *_ = torch_private.as_group_norms_kernel(backward, given, backward(*given))
        return [y.stride(), gradient.stride()]

    real = strides_of_results()
    with torch_private.FakeTensorMode():
        assert strides_of_results() == real


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda x: x.sum().item(), torch_private.DataDependentOutputException),
        (torch.nonzero, torch_private.DynamicOutputShapeException),
        (lambda x: torch.ops.autoac_test.unknown(x), torch_private.UnsupportedOperatorException),
    ],
)
def test_what_fake_tensors_cannot_do(function: Any, error: type[Exception]):
    library = torch.library.Library("autoac_test", "FRAGMENT")
    library.define("unknown(Tensor x) -> Tensor")
    library.impl("unknown", torch.clone, "CPU")
    with torch_private.FakeTensorMode(allow_fallback_kernels=False), pytest.raises(error):
        function(torch.ones(2))
