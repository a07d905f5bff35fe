"""The user's step as one object: what it refuses, and what is a whole step."""

from collections import UserDict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import autoac
from autoac.api import Mode
from autoac.step.step import TrainingStep
from tests.small_models import batch, make

pytestmark = pytest.mark.usefixtures("one_thread")


class CallableMapping(UserDict):
    """As transformers' `BatchEncoding` could be: a mapping of arguments that can also be called."""

    def __call__(self) -> None:
        raise AssertionError("it is the model's input, not a step")


class CallableTuple(NamedTuple):
    x: torch.Tensor

    def __call__(self) -> None:
        raise AssertionError("it is the model's input, not a step")


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("sample", [CallableMapping(x=batch()), CallableTuple(batch())])
def test_a_sample_that_can_be_called_is_still_a_sample(sample: Any, mode: Mode):
    step = TrainingStep(make(), sample)
    assert not step.is_whole
    assert [id(tensor) for tensor in step.inputs] == [
        id(t) for t in (sample.values() if isinstance(sample, CallableMapping) else sample)
    ]
    profile = autoac.profile(make(), sample, mode=mode)
    assert profile.op_fingerprint == autoac.profile(make(), batch(), mode=mode).op_fingerprint


def test_a_callable_is_a_whole_step():
    model = make()
    step = TrainingStep(model, lambda: model(batch()).mean())
    assert step.is_whole
    assert step.inputs == []
    loss = step.run()
    assert loss is not None
    assert not loss.requires_grad


@pytest.mark.parametrize(
    ("sample", "loss", "said"),
    [
        ([batch()], None, r"sample is a list; .*For a list of arguments pass tuple\(sample\)"),
        (3, None, "sample is a int; it must be a tensor, a tuple"),
        ({1: batch()}, None, "sample is a mapping with the key 1: keys are names of the model's arguments"),
        (batch(), 3, "loss is 3: pass a function from the model's output to a scalar tensor"),
        (batch(), nn.MSELoss, "loss is <class .*: pass a function"),
        (lambda: None, torch.mean, "a callable sample computes its losses itself"),
    ],
)
@pytest.mark.parametrize("call", [autoac.profile, lambda m, s, loss: autoac.plan(m, s, "1GB", loss=loss)])
def test_refused_before_anything_runs(sample: Any, loss: Any, said: str, call: Any):
    model = make()
    model.register_forward_hook(lambda *_: pytest.fail("the model ran"))
    with pytest.raises(autoac.ProfilingError, match=said):
        call(model, sample, loss=loss)


def test_verify_refuses_the_same():
    model = make()
    plan = autoac.plan(model, batch(), "1GB")
    with pytest.raises(autoac.ProfilingError, match="loss is 3"):
        plan.verify(model, batch(), loss=3)  # pyright: ignore[reportArgumentType]


def test_containers_and_tensors_are_the_models_own():
    """What it does to them does not reach the sample; what they hold does, until it is put back."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            x = given.pop("x")
            assert x.note == "an attribute"
            assert given.pop("leaf") is leaf
            x += self.weight
            return x.sum()

    x, leaf = torch.zeros(2), torch.ones(2, requires_grad=True)
    x.note = "an attribute"  # type: ignore[attr-defined]
    given = {"x": x, "leaf": leaf}
    for _ in range(2):
        TrainingStep(Takes(), (given,)).run()
    assert list(given) == ["x", "leaf"]
    assert given["x"] is x
    assert (x.requires_grad, x.grad_fn, x._version) == (False, None, 0)
    assert x.tolist() == [2, 2]


def test_a_step_that_needs_arguments_is_refused_before_it_runs():
    model, x = make(), batch()

    def step(net: nn.Module, scale: float = 1.0) -> None:
        (net(x).sum() * scale).backward()

    with pytest.raises(autoac.ProfilingError, match=r"needs arguments \(net\).*functools\.partial"):
        TrainingStep(model, step)
    for whole in (lambda: step(model), lambda *_, **__: step(model), partial(step, model)):
        TrainingStep(model, whole).run()
