"""Optimizers."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _default_to_fused_or_foreach, _foreach_supported_types

from autoac import torch_private


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("real", [torch.nn.Parameter(torch.ones(3)), torch.ones(3).as_subclass(Own)])
def test_fakes_are_treated_as_what_they_stand_for(real: torch.Tensor):
    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(3, device="cuda"))
    assert _default_to_fused_or_foreach([fake], differentiable=False) == (False, False)
    with torch_private.fakes_as_parameters([real]):
        assert _default_to_fused_or_foreach([fake], False) == (False, type(real) is not Own)
        assert _default_to_fused_or_foreach([fake], True) == (False, False)
    assert FakeTensor not in _foreach_supported_types
