"""Fake tensors, their mode and its errors: torch/_subclasses/fake_tensor.py."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,
)
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily


def is_fake_type(kind: type) -> bool:
    """Whether tensors of this type have no data.

    Source: `FakeTensor` in torch/_subclasses/fake_tensor.py.
    """
    return issubclass(kind, FakeTensor)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no data.

    Source: `FakeTensor` in torch/_subclasses/fake_tensor.py.
    """
    return is_fake_type(type(tensor))


_INPUT_OF_GROUP_NORM = {
    torch.ops.aten.native_group_norm.default: 0,
    torch.ops.aten.native_group_norm_backward.default: 1,
}
"""Position of the normalized tensor among the arguments."""


def as_group_norms_kernel(func: Any, args: Any, result: Any) -> Any:
    """The results of an op on fake tensors; group norm's in the memory format that its kernel for the CPU gives them.

    torch 2.14 has another format for them: contiguous where the input is in channels-last format.

    Source: `native_group_norm` and `native_group_norm_backward` in aten/src/ATen/native/group_norm.cpp, and in
    torch/_refs/__init__.py and torch/_decomp/decompositions.py, where 2.15 has it right.
    """
    position = _INPUT_OF_GROUP_NORM.get(func)
    if position is None or result[0] is None or result[0].device.type != "cpu":
        return result
    first, *others = result
    return (first.contiguous(memory_format=suggest_memory_format(args[position])), *others)
