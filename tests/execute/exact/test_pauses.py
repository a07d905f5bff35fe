"""Engine replay does not look while modules run in which nothing is recorded, and it is noticed if they surprise it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.execute import replay
from autoac.execute.program import Program
from autoac.execute.replay.pausing import attach_pausing
from autoac_solver.build.pauses import Pause
from autoac_solver.records.profile import Profile
from tests.execute.exact.harness import assert_nothing_active
from tests.small_models import BLOCKS, assert_same, batch, make, step, tight_plan

X = torch.linspace(-1, 1, 64).reshape(8, 8)


class Inner(nn.Module):
    """Takes a sine, after what it is told to do."""

    def __init__(self, first: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = first

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.first(y)
        return y.sin()


def region(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
    y = x * 3.0
    t = y.tanh()
    return inner(y) + y.cos() + t


OPS = ("aten.mul.Tensor", "aten.tanh.default", "aten.sin.default", "aten.cos.default", "aten.add.Tensor")
NAMES = (*OPS, OPS[-1])
PAUSE = Pause("inner", 2, 3)


def gradient(
    first: Callable[[torch.Tensor], Any], recomputed: set[str] | None, pauses: tuple[Pause, ...] = (PAUSE,)
) -> torch.Tensor:
    """Of the region's input; without the engine if nothing is said of what is recomputed."""
    x = X.clone().requires_grad_()
    inner = Inner(first)
    attach_pausing(inner, "inner", "plan")
    if recomputed is None:
        result = region(x, inner)
    else:
        program = Program("it", [(name, name in recomputed) for name in NAMES], pauses=pauses)
        result = replay.run(program, region, (x, inner), {})
    result.sum().backward()
    assert_nothing_active()
    assert x.grad is not None
    return x.grad


def nothing(y: torch.Tensor) -> None:
    pass


def doubled(y: torch.Tensor) -> None:
    y.mul_(2.0)


@pytest.mark.parametrize("recomputed", [{OPS[0]}, {OPS[1]}, {OPS[0], OPS[1]}, {OPS[3]}, set(OPS) - {OPS[2]}])
def test_equal_to_the_bit(recomputed: set[str], monkeypatch: pytest.MonkeyPatch):
    seen = seen_ops(monkeypatch)
    assert torch.equal(gradient(nothing, recomputed), gradient(nothing, None))
    assert "aten.sin.default" not in seen
    assert {"aten.tanh.default", "aten.cos.default"} <= set(seen)


@pytest.mark.filterwarnings("ignore:.*region .it. runs ops that the profiled step did not run")
def test_what_is_written_unseen_is_kept_from_there_on():
    """The profiled step did not write there: what was to be recomputed would be what it was before."""
    expected = gradient(doubled, None)
    assert torch.equal(gradient(doubled, {OPS[0]}), expected)
    assert torch.equal(gradient(doubled, {OPS[0], OPS[3]}), expected)
    assert torch.equal(gradient(doubled, {OPS[0]}, pauses=()), expected)


@pytest.mark.filterwarnings("ignore:.*region .it. runs ops that the profiled step did not run")
def test_what_a_record_holds_and_is_written_unseen_is_an_error():
    assert torch.equal(gradient(doubled, {OPS[1]}, pauses=()), gradient(doubled, None))
    with pytest.raises(RuntimeError, match="was modified by an in-place operation after forward"):
        gradient(doubled, {OPS[1]})
    assert_nothing_active()


def test_what_is_turned_after_a_pause_is_recomputed_still(monkeypatch: pytest.MonkeyPatch):
    """To change in place how a tensor sees its storage counts as a write, and this one is seen."""

    class Shifted(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y + 1.0

    def turned(x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        y = x * 3.0
        shifted = inner(y)
        y.t_()
        return shifted * y.cos()

    handles = []
    pack = replay.Recording.pack

    def packed(self: Any, tensor: torch.Tensor) -> Any:
        handles.append(type(found := pack(self, tensor)))
        return found

    monkeypatch.setattr(replay.Recording, "pack", packed)
    names = ("aten.mul.Tensor", "aten.add.Tensor", "aten.cos.default", "aten.mul.Tensor")
    program = Program("it", [(name, not i) for i, name in enumerate(names)], pauses=(Pause("inner", 1, 2),))
    gradients = []
    for run in (lambda *given: replay.run(program, turned, given, {}), turned):
        x, inner = X.clone().requires_grad_(), Shifted()
        attach_pausing(inner, "inner", "plan")
        run(x, inner).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert handles.count(replay.Handle) == 1  # of what the cosine was taken of


def test_a_module_that_fails():
    def fails(y: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradient(fails, {OPS[0]})
    assert_nothing_active()
    assert torch.equal(gradient(nothing, {OPS[0]}), gradient(nothing, None))


def test_no_pause_where_all_has_not_been_as_profiled(monkeypatch: pytest.MonkeyPatch):
    """The ops before the module are others than those of the profiled step."""
    seen = seen_ops(monkeypatch)
    assert torch.equal(gradient(nothing, {OPS[0]}, (Pause("inner", 1, 2),)), gradient(nothing, None))
    assert torch.equal(gradient(nothing, {OPS[0]}, (Pause("other", 2, 3),)), gradient(nothing, None))
    assert seen.count("aten.sin.default") == 2


def test_no_pause_below_a_mode_of_the_users(monkeypatch: pytest.MonkeyPatch):
    class Doubles(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    seen = seen_ops(monkeypatch)
    x = X.clone().requires_grad_()
    inner = Inner(nothing)
    attach_pausing(inner, "inner", "plan")

    def under_a_mode(x: torch.Tensor) -> torch.Tensor:
        with Doubles():
            return region(x, inner)

    program = Program("it", [(name, name == OPS[0]) for name in NAMES], pauses=(PAUSE,))
    replay.run(program, under_a_mode, (x,), {}).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient(nothing, None))
    assert "aten.sin.default" in seen


def profiled() -> Profile:
    """With costs that are no measurements, and make pauses worth it."""
    return dataclasses.replace(autoac.profile(make(), batch()), costs={})


def test_a_layer_with_another_forward_does_not_pause():
    """Somebody has put it there since the step was profiled, and it may write what nobody sees."""
    plan = tight_plan(profiled(), "replay", [f"blocks.{i}" for i in range(BLOCKS)])
    pausing = {pause.fqn for region in plan.regions if region.wrapped for pause in region.pauses}
    assert pausing
    for own in (False, True):
        model = make()
        layers = [model.get_submodule(fqn) for fqn in pausing]
        forwards = [functools.partial(type(layer).forward, layer) for layer in layers]
        for layer, forward in zip(layers, forwards, strict=True):
            if own:
                layer.__dict__["forward"] = forward
        plan.apply(model)
        for layer, forward in zip(layers, forwards, strict=True):
            assert (layer.__dict__["forward"] is forward) == own
        assert_same(step(model, batch()), step(make(), batch()))
        plan.remove(model)


def test_a_plan_sees_as_many_ops_as_it_reckons_with(monkeypatch: pytest.MonkeyPatch):
    profile = profiled()
    plans = autoac.tradeoff(profile, points=4, regions=[f"blocks.{i}" for i in range(BLOCKS)]).plans
    expected = step(make(), batch())
    hidden = 0
    for plan in plans:
        calls = {(call.fqn, call.call): call for call in profile.calls}
        reckoned = 0
        for planned in plan.regions:
            if planned.wrapped:
                reckoned += len(planned.steps) + calls[planned.fqn, planned.call].views
                for pause in planned.pauses:
                    reckoned -= pause.seen
                    hidden += pause.seen
        with monkeypatch.context() as patch:
            seen = seen_ops(patch)
            assert_same(step(plan.apply(make()), batch()), expected)
        assert len(seen) == reckoned
    assert hidden


def seen_ops(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the ops that recordings see from now on."""
    seen: list[str] = []
    original = replay.Recording.__torch_dispatch__

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(replay.Recording, "__torch_dispatch__", dispatch)
    return seen
