"""Fake tensors, their mode and its errors: torch/_subclasses/fake_tensor.py."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import torch
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
