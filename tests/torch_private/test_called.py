"""Which module a call is of."""

import copy
import functools
from typing import Any

import torch
from torch import nn

from autoac import torch_private


def forward(module: nn.Module, seen: list[nn.Module]) -> None:
    seen.append(torch_private.called_module(module))


def test_called_module():
    module = nn.Linear(2, 2)
    module.__dict__["forward"] = functools.partial(forward, module)
    other, apart = copy.copy(module), copy.deepcopy(module)
    seen: Any = []
    for one in (module, other, apart):
        one(seen)
    module.forward(seen)
    assert [id(one) for one in seen] == [id(one) for one in (module, other, apart, module)]


def test_with_hooks():
    module = nn.Linear(2, 2)
    module.__dict__["forward"] = functools.partial(forward, module)
    module.register_forward_pre_hook(lambda *_: None)
    other, seen = copy.copy(module), []
    other(seen)
    assert seen == [other]


def test_hooks_of_a_class_are_taken_off_and_no_others():
    class Ours:
        def __call__(self, module, args, kwargs):
            calls.append("ours")

    calls: list[str] = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(Ours(), with_kwargs=True)
    module.register_forward_pre_hook(lambda *_: calls.append("another's"))
    torch_private.remove_forward_pre_hooks(module, Ours)
    module(torch.zeros(1))
    assert calls == ["another's"]


def test_hooks_after_forward_are_taken_off_and_no_others():
    class Ours:
        def __call__(self, module, args, kwargs, output):
            calls.append("ours")

    calls: list[str] = []
    module = torch.nn.Identity()
    module.register_forward_hook(Ours(), with_kwargs=True)
    module.register_forward_hook(lambda *_: calls.append("another's"))
    module(torch.zeros(1))
    assert calls == ["ours", "another's"]
    torch_private.remove_forward_hooks(module, Ours)
    module(torch.zeros(1))
    assert calls == ["ours", "another's", "another's"]
