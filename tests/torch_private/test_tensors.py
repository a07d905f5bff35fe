"""Tensors: layout, versions, aliases."""

import contextlib
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import torch_private
from tests.torch_private.modes import Seen


def test_is_dense():
    a = torch.empty(4, 6)
    assert torch_private.is_dense(a)
    assert torch_private.is_dense(a.t())
    assert torch_private.is_dense(a[1:3])
    assert not torch_private.is_dense(a[:, 1:3])
    assert not torch_private.is_dense(a[:1].expand(3, 6))


def test_dense_values():
    values = torch.arange(6.0).reshape(3, 2)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]))
    with Seen() as seen:
        assert torch_private.dense_values(nested).shape == (3, 2)
        assert torch_private.dense_values(values) is values
    assert set(seen.names) <= {"prim.layout.default"}  # nothing that computes
    assert not isinstance(nested.shape[1], int)


def test_version_of():
    a = torch.zeros(3)
    before = torch_private.version_of(a)
    a.add_(1)
    assert torch_private.version_of(a) == before + 1
    assert torch_private.version_of(a[1:]) == before + 1
    with torch.inference_mode():
        assert torch_private.version_of(torch.zeros(3)) == -1


def test_counted_writes():
    tensors = [torch.ones(2), torch.ones(3)]
    versions = []

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for context in (contextlib.nullcontext, torch_private.counted_writes):
                before = [torch_private.version_of(t) for t in tensors]
                with context(tensors):
                    func(*args, **(kwargs or {}))
                versions.append(
                    [torch_private.version_of(t) - b for t, b in zip(tensors, before, strict=True)]
                )

    with Writes():
        torch.ops.aten._foreach_mul_(tensors, 2.0)
    assert versions == [[0, 0], [1, 1]]  # were the first like the second, the context would be needed no more
    with torch_private.counted_writes(tensors):
        before = torch_private.version_of(tensors[0])
        tensors[0].add_(1)
    assert torch_private.version_of(tensors[0]) == before + 1  # not counted twice


def test_detach_sharing_version():
    results = {}

    def look(func: Any, args: Any) -> None:
        if str(func) == "aten.sin.default" and not results:
            results["with"] = torch_private.detach_sharing_version(args[0])

    a = torch.ones(3, requires_grad=True) * 2
    with Seen(look):
        a.sin()
    kept = results["with"]
    assert kept.grad_fn is None
    assert not kept.requires_grad
    assert torch_private.storage_key(kept) == torch_private.storage_key(a)
    before = torch_private.version_of(kept)
    with torch.no_grad():
        a.add_(1)
    assert torch_private.version_of(kept) == before + 1


def test_detach_unseen():
    held = torch.ones(2, requires_grad=True) * 2
    parameter = nn.Parameter(torch.ones(2, 2))
    with Seen() as mode:
        found = [
            torch_private.detach_unseen(tensor)
            for tensor in (held, held.view(1, 2), parameter, parameter.t())
        ]
    assert "aten.detach.default" not in mode.names
    for tensor in found:
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor._base is None
    assert torch_private.storage_key(found[0]) == torch_private.storage_key(held)
    assert found[1].shape == (1, 2)
    before = torch_private.version_of(found[0])
    with torch.no_grad():
        held.add_(1)
    assert torch_private.version_of(found[0]) == before + 1
    with FakeTensorMode():
        fake = torch.ones(2, requires_grad=True) * 2
        assert type(torch_private.detach_unseen(fake)) is type(fake)


def test_conjugate_view():
    a = torch.tensor([1 + 2j])
    view = torch_private.conjugate_view(a)
    assert view.is_conj()
    assert torch_private.storage_key(view) == torch_private.storage_key(a)
    assert view.resolve_conj().tolist() == [1 - 2j]


def test_negative_view():
    a = torch.tensor([3.0])
    view = torch_private.negative_view(a)
    assert view.is_neg()
    assert torch_private.storage_key(view) == torch_private.storage_key(a)
    assert view.resolve_neg().tolist() == [-3.0]


def test_counted_version():
    a = torch.zeros(3)
    assert torch_private.counted_version(a) == torch_private.version_of(a)
    a.add_(1)
    assert torch_private.counted_version(a) == torch_private.version_of(a)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version"):
        torch_private.counted_version(torch.zeros(3))


def test_base_of():
    a = torch.zeros(3)
    assert torch_private.base_of(a) is None
    assert torch_private.base_of(a[1:][1:]) is a


def test_sparse_parts():
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True
    )
    assert not sparse.is_coalesced()
    indices, values = torch_private.sparse_parts(sparse)
    assert indices.tolist() == [[0, 0]]
    assert values.tolist() == [1.0, 2.0]


def test_own_tensors():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    assert torch_private.own_tensors(model) == ({}, {})
    parameters, buffers = torch_private.own_tensors(model[1])
    assert list(parameters) == ["weight", "bias"]
    assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert torch_private.own_tensors(model[0])[0] == {"weight": model[0].weight, "bias": None}


def test_nests():
    nest = {"a": [1, (2.0, None)]}
    assert torch_private.tree_leaves(nest) == [1, 2.0, None]
    leaves, structure = torch_private.tree_flatten(nest)
    assert leaves == [1, 2.0, None]
    assert str(structure) != str(torch_private.tree_flatten([1, 2.0, None])[1])
    assert torch_private.tree_map(str, nest) == {"a": ["1", ("2.0", "None")]}
    assert torch_private.tree_map_only(float, lambda number: -number, nest) == {"a": [1, (-2.0, None)]}


def test_alias_unseen():
    x = torch.ones(4)
    x.note = "an attribute"  # type: ignore[attr-defined]
    seen: list[str] = []
    with Seen(lambda func, args: seen.append(str(func))):
        alias = torch_private.alias_unseen(x)
    assert not seen
    assert alias.data_ptr() == x.data_ptr()
    assert alias.note == "an attribute"  # type: ignore[attr-defined]
    alias.mul_(torch.ones(4, requires_grad=True))
    assert (alias.requires_grad, x.requires_grad, x.grad_fn, x._version) == (True, False, None, 0)


def test_is_view():
    x = torch.ones(4)
    assert torch_private.is_view(x[1:])
    assert not torch_private.is_view(x)
    assert not torch_private.is_view(x.detach())


def test_set_version():
    x = torch.ones(4)
    saved = (x * torch.ones(4, requires_grad=True)).sum()
    version = x._version
    x.add_(1).sub_(1)
    torch_private.set_version(x, version)
    assert (x._version, x[:2]._version) == (version, version)
    saved.backward()


def test_parts_of_a_wrapper_subclass():
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, first.shape)

        def __init__(self, first: torch.Tensor, second: torch.Tensor):
            self.first, self.second = first, second

        def __tensor_flatten__(self):
            return ["first", "second"], None

        @classmethod
        def __tensor_unflatten__(cls, parts, *_):
            return cls(parts["first"], parts["second"])

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} ran")

    a, b, c = torch.zeros(2), torch.ones(2), torch.ones(2)
    found = list(torch_private.parts_of(Pair(a, Pair(b, c))))  # nested ones too
    assert [id(part) for part in found] == [id(a), id(b), id(c)]
    assert torch_private.is_wrapper_type(Pair)
    assert not any(map(torch_private.is_wrapper_type, (torch.Tensor, nn.Parameter)))
    pair = Pair(a, b)
    parts, put_together = torch_private.taken_apart(pair)  # type: ignore[misc]
    assert [id(part) for part in parts] == [id(a), id(b)]
    assert put_together([b, c]).first is b  # type: ignore[attr-defined]
    assert torch_private.taken_apart(a) is None
    assert list(map(id, torch_private.parts_of(a))) == [id(a)]
    assert len(list(torch_private.parts_of(nn.Parameter(a)))) == 1


def test_zero_tensor():
    zeros = torch.ops.aten._efficientzerotensor([2, 3])
    assert torch_private.is_zero_tensor(zeros)
    assert not torch_private.is_zero_tensor(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="invalid python storage"):
        zeros.untyped_storage().data_ptr()
