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


def test_calls_without_hooks():
    calls: list[str] = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    before = dict(vars(module))
    with torch_private.without_hooks(module):
        module(torch.zeros(1))
    assert not calls
    assert vars(module) == before
    module(torch.zeros(1))
    assert calls == ["before", "after"]


def test_hooks_are_in_attributes_of_these_names():
    assert set(torch_private.HOOKS) == {name for name in vars(nn.Module()) if "_hooks" in name}


def test_hooks_that_are_registered_on_copies_are_gone_with_them():
    def register(module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: calls.append("before"), with_kwargs=True)
        module.register_forward_hook(lambda *_: calls.append("after"), with_kwargs=True, always_call=True)
        module.register_full_backward_pre_hook(lambda *_: calls.append("before backward"))
        module.register_full_backward_hook(lambda *_: calls.append("after backward"))
        module.register_state_dict_pre_hook(lambda *_: calls.append("before state_dict"))
        module.register_state_dict_post_hook(lambda *_: calls.append("after state_dict"))
        module.register_load_state_dict_pre_hook(lambda *_: calls.append("before load"))
        module.register_load_state_dict_post_hook(lambda *_: calls.append("after load"))

    def run() -> list[str]:
        calls.clear()
        module(torch.zeros(1, 2, requires_grad=True)).sum().backward()
        module.load_state_dict(module.state_dict())
        return list(calls)

    calls: list[str] = []
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: calls.append("another's"))
    before = dict(vars(module))
    assert set(torch_private.copied_hooks(module)) == set(torch_private.HOOKS)
    vars(module).update(torch_private.copied_hooks(module))
    register(module)
    assert sorted(run()) == sorted(
        [
            *("another's", "before", "after", "before backward", "after backward"),
            *("before state_dict", "after state_dict", "before load", "after load"),
        ]
    )
    vars(module).update(before)
    assert run() == ["another's"]
