"""Optimizers that other libraries have wrapped: the real one is found, never written, or the wrapper is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.record.optimizer import with_optimizer
from autoac.step.optimizer import real_optimizer
from tests.small_models import batch, make


class LightningOptimizer:
    """As Lightning's: passes on what it does not have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class _FabricOptimizer:
    """As Lightning Fabric's: of a class made for it, which is the real one's too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        object.__setattr__(self, "__class__", type("FabricAdamW", (_FabricOptimizer, type(optimizer)), {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def accelerates(optimizer: torch.optim.Optimizer) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare(optimizer)


def twice(optimizer: torch.optim.Optimizer) -> Any:
    return LightningOptimizer(accelerates(optimizer))


WRAPPERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    *(accelerates, LightningOptimizer, _FabricOptimizer, twice)
]


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> list[torch.Tensor]:
    for seed in range(steps):
        optimizer.zero_grad()
        model(batch(seed)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_training_goes_on_with_the_wrapped_optimizer(wrap: Callable[[torch.optim.Optimizer], Any]):
    model, reference = make(dropout=0.0), make(dropout=0.0)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrapped = wrap(inner)
    groups, state = inner.param_groups, inner.state
    before = copy.deepcopy(inner.state_dict())
    assert real_optimizer(wrapped, model) is inner
    found = autoac.profile(model, batch(), optimizer=wrapped)
    assert inner.param_groups is groups
    assert inner.state is state
    assert inner.state_dict() == before
    expected = autoac.profile(model, batch(), optimizer=inner)
    assert found.storage_table[-1] == expected.storage_table[-1]
    assert "includes AdamW.step(), whose time is not counted" in found.notes
    plain = trained(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2))
    assert all(map(torch.equal, trained(model, wrapped), plain))


class WithProperties:
    """As other libraries' wrappers: groups and state are the inner optimizer's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner = optimizer

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.inner.param_groups = groups


class PassingOn:
    """Has nothing of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.held = [optimizer]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["held"][0], name)


class Around(torch.optim.Optimizer):
    """Has groups of its own, and steps another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.base = optimizer


@pytest.mark.parametrize(
    ("wrap", "why"),
    [
        (WithProperties, "WithProperties, .*its param_groups and state are another object's"),
        (PassingOn, "PassingOn, .*its param_groups and state are another object's"),
        (Around, "Around, .*it holds another one, .base"),
    ],
)
def test_unknown_wrappers_are_refused(wrap: Callable[[torch.optim.Optimizer], Any], why: str):
    model = make()
    model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    inner = torch.optim.AdamW(model.parameters())
    groups = inner.param_groups
    with pytest.raises(autoac.ProfilingError, match=why):
        autoac.profile(model, batch(), optimizer=wrap(inner))
    assert inner.param_groups is groups
    assert not inner.state


@pytest.mark.parametrize("wrap", [WithProperties, accelerates])
def test_a_copy_is_never_written_through_a_property(
    wrap: Callable[[torch.optim.Optimizer], Any], monkeypatch: pytest.MonkeyPatch
):
    """Were a proxy let through, its optimizer would still not be given fake parameters."""
    model = make()
    profile = autoac.profile(model, batch())
    inner = torch.optim.SGD(model.parameters())
    wrapped, groups = wrap(inner), inner.param_groups
    monkeypatch.setattr("autoac.record.optimizer.inner_optimizer", lambda optimizer: optimizer)
    with pytest.raises(autoac.ProfilingError):
        with_optimizer(profile, wrapped)
    assert inner.param_groups is groups
    assert not inner.state
