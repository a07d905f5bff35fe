"""Storages."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from autoac import torch_private
from tests.torch_private.modes import Seen


def test_storage_key():
    a = torch.empty(4)
    key = torch_private.storage_key(a)
    assert key == torch_private.key_of_storage(a.untyped_storage())
    assert key == torch_private.storage_key(a[1:]) == torch_private.storage_key(a.view(2, 2).detach())
    assert torch_private.storage_key(a) != torch_private.storage_key(torch.empty(4))
    empty = [torch.empty(0) for _ in range(3)]  # all at address 0
    assert len({torch_private.storage_key(t) for t in empty}) == 3
    with pytest.raises(NotImplementedError):
        torch_private.storage_key(torch.eye(2).to_sparse())


def test_storage_ref_dies_with_the_storage():
    a = torch.empty(4)
    ref = torch_private.storage_ref(a)
    view = a[1:]
    del a
    assert ref() is not None
    node = (view.requires_grad_() * 2.0).exp()  # held by C++ only
    del view
    assert ref() is not None
    del node
    assert ref() is None


def test_storage_users():
    a = torch.empty(4)
    key = torch_private.storage_key(a)
    assert torch_private.storage_users(key) == 1
    same = a
    view = a[1:]
    assert torch_private.storage_users(key) == 2
    detached = a.detach()
    assert torch_private.storage_users(key) == 3
    del view, detached, same
    assert torch_private.storage_users(key) == 1
    storage = a.untyped_storage()  # no tensor, but torch counts it
    assert torch_private.storage_users(key) in (1, 2)
    del storage


@pytest.mark.parametrize("kept_by", ["nobody", "Python", "another tensor"])
def test_held_once_as_argument(kept_by: str):
    """Of two gradients that autograd adds up, the first is the engine's alone unless somebody keeps it."""
    kept: list[torch.Tensor] = []
    once: list[bool] = []

    def look(func: Any, args: Any) -> None:
        if str(func) == "aten.add.Tensor":
            old = args[0]
            once.append(torch_private.held_once_as_argument(old))

    x = torch.ones(5, requires_grad=True) * 1.0
    # In backward the second comes first; what a view hands on stands on the storage of what it was given.
    first, second = x.sin(), x.view_as(x) if kept_by == "another tensor" else x * 1.0
    if kept_by == "Python":
        assert second.grad_fn is not None
        second.grad_fn.register_hook(lambda gradients, _: kept.append(gradients[0]))
    loss = first.sum() + second.exp().sum()
    with Seen(look):
        loss.backward()
    assert once == [kept_by == "nobody"]


def test_a_tensor_that_has_its_storage_alone():
    alone = torch_private.has_its_storage_alone
    assert alone(torch.empty(3))
    tensor = torch.empty(3, requires_grad=True) * 1
    detached = tensor.detach()
    assert not alone(detached)
    del tensor
    assert alone(detached)
    for hold in (lambda t: t[1:], lambda t: t.untyped_storage(), lambda t: t.numpy()):
        assert alone(detached)
        held = hold(detached)
        assert not alone(detached)
        del held
    assert not alone(detached)  # numpy leaves a mark
    assert not alone(torch.from_numpy(torch.empty(3).numpy()))
    assert not alone(torch.empty(3).share_memory_())
