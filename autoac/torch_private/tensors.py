"""Tensors: their layout, their in-place versions, aliases of them, and nests of them (torch/utils/_pytree.py)."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# (private names are what this file is for; torch's type stubs do not know them)

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch._prims_common
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

from autoac.torch_private.dispatch import disable_dispatch_modes


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie without gaps or overlap.

    Source: `is_non_overlapping_and_dense_or_false` in torch/_prims_common/__init__.py.
    """
    return torch._prims_common.is_non_overlapping_and_dense_or_false(tensor)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one of autograd's zeros, which have a size and no memory.

    Source: `Tensor._is_zerotensor`; `_efficientzerotensor` in aten/src/ATen/native/TensorFactories.cpp makes them.
    """
    return tensor._is_zerotensor()


def dense_values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a jagged nested tensor, whose own sizes are symbols; any other tensor itself.

    Source: `NestedTensor._values` in torch/nested/_internal/nested_tensor.py.
    """
    return cast("Any", tensor)._values if tensor.layout is torch.jagged else tensor


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse COO tensor, coalesced or not.

    Source: `Tensor._indices`, `Tensor._values` (aten/src/ATen/native/sparse/SparseTensor.cpp).
    """
    return tensor._indices(), tensor._values()


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of this type keep their values in others (quantized, distributed), see `parts_of`.

    Source: `is_traceable_wrapper_subclass_type` in torch/utils/_python_dispatch.py.
    """
    return kind is not torch.Tensor and is_traceable_wrapper_subclass_type(kind)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a wrapper subclass (quantized, distributed) keeps its values in; a plain one itself.

    Source: `is_traceable_wrapper_subclass` in torch/utils/_python_dispatch.py.
    """
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = cast("Any", tensor).__tensor_flatten__()
    for name in names:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from parts_of(part)


def taken_apart(
    tensor: torch.Tensor,
) -> tuple[list[torch.Tensor], Callable[[Iterable[torch.Tensor]], torch.Tensor]] | None:
    """The parts of a wrapper subclass, and a function that makes one like it of others; None if it is none.

    Source: `TraceableWrapperSubclass` in torch/utils/_python_dispatch.py.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return None
    kind, size, stride = cast("Any", type(tensor)), tensor.size(), tensor.stride()
    names, context = cast("Any", tensor).__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return None

    def put_together(others: Iterable[torch.Tensor]) -> torch.Tensor:
        return kind.__tensor_unflatten__(dict(zip(names, others, strict=True)), context, size, stride)

    return parts, put_together


base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that a view was made of, None if the tensor is no view.

Source: `Tensor._base` (torch/csrc/autograd/python_variable.cpp).
"""


def own_tensors(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters and buffers by name; None for a name without one.

    Source: `Module._parameters`, `Module._buffers` (torch/nn/modules/module.py).
    """
    return module._parameters, module._buffers


def conjugate_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage with the conjugate bit set.

    Source: `torch._conj` (aten/src/ATen/native/UnaryOps.cpp).
    """
    return torch._conj(tensor)


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same storage with the negative bit set.

    Source: `torch._neg_view` (aten/src/ATen/native/UnaryOps.cpp).
    """
    return torch._neg_view(tensor)


counted_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The in-place version of a tensor that has one; faster than `version_of`.

Source: `Tensor._version` (torch/csrc/autograd/python_variable.cpp).
"""


def version_of(tensor: torch.Tensor) -> int:
    """The tensor's in-place version; -1 for inference tensors, which have none.

    Source: `Tensor._version` (torch/csrc/autograd/python_variable.cpp).
    """
    try:
        return tensor._version
    except RuntimeError:
        return -1


@contextlib.contextmanager
def counted_writes(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Context, inside `__torch_dispatch__`, that increments the in-place version of every tensor written in it.

    An op that writes the tensors of a list (`_foreach_mul_`) leaves that to its inner ops, which below a dispatch mode
    on CPU do not increment it. Autograd would then miss that a saved tensor was modified, and that the gradient of a
    view has to go through the write.

    Source: `Tensor._version` (torch/csrc/autograd/python_variable.cpp).
    """
    versions = [version_of(tensor) for tensor in tensors]
    yield
    torch.autograd.graph.increment_version(
        [t for t, version in zip(tensors, versions, strict=True) if version >= 0 and version_of(t) == version]
    )


def detach_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` that no dispatch mode sees.

    Source: `Tensor._make_subclass` (torch/csrc/autograd/python_variable.cpp).
    """
    if type(tensor) is torch.Tensor:
        # As in `nn.Parameter`: it sets the modes aside in C++, in half the time.
        return torch.Tensor._make_subclass(torch.Tensor, tensor)
    with disable_dispatch_modes():
        return tensor.detach()


def detach_sharing_version(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.detach()` inside `__torch_dispatch__`, with the version counter still shared.

    Source: `_SetExcludeDispatchKeyGuard` (torch/csrc/utils/python_dispatch.cpp), used as
    `_detach_helper` in torch/utils/checkpoint.py does.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def alias_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same storage, with the same Python attributes, that no dispatch mode sees.

    It has a version of its own: a write through it does not count as a write to the tensor.

    Source: `Tensor.data`, which is `variable_data` (torch/csrc/autograd/python_variable.cpp).
    """
    with disable_dispatch_modes():
        alias = tensor.data
    alias.__dict__.update(tensor.__dict__)
    return alias


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd takes the tensor for a view of another one.

    Source: `Tensor._is_view` (torch/csrc/autograd/python_variable.cpp).
    """
    return tensor._is_view()


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the in-place version of a tensor and of all tensors that share its storage by views.

    Source: `_unsafe_set_version_counter` (torch/csrc/autograd/init.cpp).
    """
    if version_of(tensor) != version:
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
