"""Storages: their identity and their holders."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage object: unique among the storages that are alive.

    Source: `UntypedStorage._cdata` (torch/csrc/StorageMethods.cpp).
    """
    return tensor.untyped_storage()._cdata


key_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""`storage_key` of a storage itself; faster.

Source: `UntypedStorage._cdata` (torch/csrc/StorageMethods.cpp).
"""


def storage_ref(tensor: torch.Tensor) -> weakref.ref[torch.UntypedStorage]:
    """A weak reference that dies with the storage itself, not with this tensor's wrapper.

    torch keeps a storage's Python object alive as long as the storage (PyObject preservation).

    Source: `StorageImpl::pyobj_slot` (torch/csrc/Storage.cpp), which keeps the Python object.
    """
    return weakref.ref(tensor.untyped_storage())


def storage_users(key: int) -> int:
    """Number of tensors (TensorImpl) on the storage with this key, which must be alive.

    Source: `torch._C._storage_Use_Count` (torch/csrc/Module.cpp).
    """
    return torch._C._storage_Use_Count(key) - 1  # asking takes a reference of its own


def has_its_storage_alone(tensor: torch.Tensor) -> bool:
    """Whether this tensor is the only holder of its storage, and the storage's memory is torch's.

    The memory is then freed with this tensor. Other holders are views, saved tensors, numpy arrays made from it,
    tensors of other libraries, and references to the storage itself. The counts are compared with those of a new
    tensor. A storage on foreign memory (numpy's, a file's) cannot be resized.

    Source: `torch._C._storage_Use_Count` (torch/csrc/Module.cpp).
    """
    storage, ours = tensor.untyped_storage(), torch.empty(1, device="cpu")
    if not storage.resizable() or (tensor.device.type == "cpu" and storage.is_shared()):
        return False
    del storage
    return _storage_holders(tensor) == _storage_holders(ours)


def _storage_holders(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


def held_once_as_argument(tensor: torch.Tensor) -> bool:
    """Whether an argument of `__torch_dispatch__`, and its storage, have only one owner, which is not Python.

    The dispatch adds three references to the owner's: the wrapper, the boxed argument and the call's own. All Python
    references count as the one wrapper, which has five references here: the dispatch's, the tuple of arguments, the
    caller's variable, ours and that of `getrefcount`.

    Source: `Tensor._use_count` (torch/csrc/autograd/python_variable.cpp), `torch._C._storage_Use_Count`.
    """
    holders, probe = tensor._use_count(), object()
    # One more where the interpreter does not inline calls, as after torch.compile has failed in this process (PEP 523).
    by_call = _references(probe) - 3
    return holders <= 4 and storage_users(storage_key(tensor)) <= 1 and sys.getrefcount(tensor) <= 5 + by_call


def _references(argument: object) -> int:
    """References to an object that only a caller's variable holds: that, ours, `getrefcount`'s, and the call's."""
    return sys.getrefcount(argument)
