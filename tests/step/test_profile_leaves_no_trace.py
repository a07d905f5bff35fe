"""Profiling changes nothing, whether it succeeds or fails: tensors, gradients, random states, modules, the sample."""

import copy
import random
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from autoac.record.optimizer import with_optimizer
from autoac.torch_private import top_saved_tensors_hooks

pytestmark = pytest.mark.usefixtures("one_thread")


class Frozen(dict):
    """As diffusers keeps its configurations: nothing can be written to it."""

    def refuse(self, *_: Any) -> None:
        raise TypeError("frozen")

    __setitem__ = __delitem__ = update = clear = pop = refuse  # type: ignore[assignment]


class Restless(nn.Module):
    """Changes in its forward whatever a module can change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.second = nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 4)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.steps: torch.Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", None)
        self.temporary: torch.Tensor
        self.register_buffer("temporary", torch.zeros(3), persistent=False)
        self.noise = torch.Generator().manual_seed(11)
        self.noises = {"of a dictionary": torch.Generator().manual_seed(12)}
        self.history: list[float] = []
        self.counters = {"calls": 0}
        self.ordered = OrderedDict(a=1, b=2)
        self.seen: set[int] = set()
        self.plain_tensor = torch.zeros(5)
        self.config = Frozen(width=8)

    def forward(self, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        x = x + 0.1 * torch.randn(x.shape, generator=self.noise)
        x = x + 0.1 * torch.randn(x.shape, generator=self.noises["of a dictionary"])
        self.steps += 1
        self.temporary.fill_(float(self.steps))
        self.plain_tensor.add_(1)
        self.cache = x.detach().mean()
        self.history.append(random.random() + np.random.rand())
        self.counters["calls"] += 1
        self.counters["new"] = 1
        self.ordered.move_to_end("a")
        self.seen.add(len(self.history))
        self.added_attribute = True
        self.second.train(not self.second.training)
        self.head.register_forward_hook(lambda *_: None)
        options.pop("labels").mul_(2)
        x = self.second(self.first(x)).mean(dim=2)
        with torch.no_grad():
            self.frozen.mul_(0.9)
        return self.head(x * self.frozen)


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 3, 10, generator=generator)
    x.requires_grad_()
    x.grad = torch.ones_like(x)
    return {"x": x, "options": {"labels": torch.ones(3), "nested": [torch.ones(2)]}}


def make() -> Restless:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Restless()
    model.head.weight.grad = torch.full_like(model.head.weight, 3.0)
    model.second.eval()
    return model


def contents(value: Any) -> Any:
    """What is in an attribute: of containers the objects, of tensors the bits."""
    if isinstance(value, torch.Tensor):
        grad = None if value.grad is None else (id(value.grad), value.grad.tolist())
        return value.data_ptr(), value.tolist(), value.requires_grad, grad
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, dict):
        return [(key, id(item), contents(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [(id(item), contents(item)) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def state(model: nn.Module, given: Any) -> dict[str, Any]:
    """Everything, by name."""
    values: dict[str, Any] = {"the sample": contents(given)}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            values[f"{name}.{attribute}"] = (id(value), contents(value))
        values[f"order of attributes of {name}"] = list(vars(module))
    values["torch's random state"] = torch.get_rng_state().tolist()
    values["Python's random state"] = random.getstate()
    values["numpy's random state"] = repr(np.random.get_state(legacy=False))
    values["modes"] = torch._C._len_torch_dispatch_stack()
    values["hooks on saved tensors"] = top_saved_tensors_hooks()
    return values


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


class Breaks(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise LookupError("on purpose")


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def test_the_model_is_restless():
    """A step changes what the other tests watch."""
    model, given = make(), sample()
    before = state(model, given)
    mean(model(**given)).backward()
    assert set(changed(before, state(model, given))) >= {
        "the sample", "torch's random state", "Python's random state", "numpy's random state", ".noise", ".noises",
        ".history", ".counters", ".ordered", ".seen", ".plain_tensor", ".added_attribute", "._parameters", "._buffers",
        "second.training", "first.0._parameters", "second.1._buffers", "head._forward_hooks", "head._parameters",
    }  # fmt: skip


def test_after_success():
    model, given = make(), sample()
    before = state(model, given)
    autoac.profile(model, given, loss=mean)
    assert changed(before, state(model, given)) == []
    autoac.plan(model, given, 10**9, loss=mean)
    assert changed(before, state(model, given)) == []


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_after_a_failure(where: str, step: int):
    """In the warm-up step, and in the step that is recorded."""
    model, given = make(), sample()
    steps = 0

    def maybe(place: str) -> bool:
        nonlocal steps
        steps += place == "loss" if where != "forward" else place == "forward"
        return place == where and steps == step

    def in_forward(*_: Any) -> None:
        if maybe("forward"):
            raise LookupError("on purpose")

    def loss(output: torch.Tensor) -> torch.Tensor:
        if maybe("loss") and where == "loss":
            raise LookupError("on purpose")
        return mean(Breaks.apply(output) if where == "backward" and steps == step else output)

    model.second.register_forward_pre_hook(in_forward)
    before = state(model, given)
    with pytest.raises(LookupError, match="on purpose") as caught:
        autoac.profile(model, given, loss=loss)
    assert "model and sample are as they were" in caught.value.__notes__[0]
    assert steps == step
    assert changed(before, state(model, given)) == []
    where = ""
    autoac.profile(model, given, loss=mean)  # nothing stands in the way of another try


def test_what_the_step_writes_outside_of_the_model():
    """A whole step of one's own may train a second model, draw from a generator of its own, and write elsewhere."""
    model, other = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    other[0].weight.grad = torch.ones(4, 4)
    generator = torch.Generator().manual_seed(5)
    learned = torch.zeros(4, requires_grad=True)
    log = torch.zeros(3)

    def step() -> None:
        noise = torch.randn(8, 4, generator=generator)
        output = model(noise) + learned
        other(output).square().mean().backward()
        log[0] += output.detach().sum()

    def outside() -> Any:
        return [contents(dict(vars(m))) for m in other.modules()], contents([learned, log, generator])

    before = outside()
    autoac.profile(model, step)
    assert outside() == before
    step()
    assert outside() != before


def test_parameters_that_the_step_itself_updates():
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [(p.data_ptr(), p.tolist()) for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    autoac.profile(model, step)
    assert [(p.data_ptr(), p.tolist()) for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("stepped", [False, True])
def test_the_optimizer(stepped: bool):
    model, x = nn.Linear(4, 4), torch.randn(8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: ran.append("the optimizer ran"))
    ran: list[str] = []
    if stepped:
        model(x).mean().backward()
        optimizer.step()
    ran.clear()
    before = (
        copy.deepcopy(optimizer.state_dict()),
        [p.tolist() for p in model.parameters()],
        list(optimizer.state),
    )
    profile = autoac.profile(model, x)
    with_optimizer(profile, optimizer)
    autoac.profile(model, x, optimizer=optimizer)
    assert ran == []
    assert str(
        (optimizer.state_dict(), [p.tolist() for p in model.parameters()], list(optimizer.state))
    ) == str(before)


@pytest.mark.parametrize("kind", [dict, MappingProxyType, tuple])
def test_the_samples_containers(kind: Callable[..., Any]):
    """A model that takes its batch apart gets a whole one in every step, and leaves the caller's as it was."""

    class TakesApart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            return self.linear(batch.pop("inner").pop()) + batch.pop("offset")

    batch: dict[str, Any] = {"inner": [torch.ones(2, 4)], "offset": 1.0}
    given = kind([batch]) if kind is tuple else kind({"batch": batch})
    autoac.profile(TakesApart(), given)
    assert list(batch) == ["inner", "offset"]
    assert len(batch["inner"]) == 1


class Observer(nn.Module):
    """Sizes its buffers once it knows how wide its input is, as those of quantisation-aware training do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.low: torch.Tensor
        self.register_buffer("low", torch.tensor([]))
        self.high: torch.Tensor
        self.register_buffer("high", torch.full((2, 3), 7.0))
        self.row: torch.Tensor
        self.register_buffer("row", torch.arange(8.0))
        self.observe = torch.ao.quantization.FusedMovingAvgObsFakeQuantize(
            torch.ao.quantization.MovingAveragePerChannelMinMaxObserver, qscheme=torch.per_channel_symmetric
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.low.resize_(8).copy_(x.amin(0))
            self.high.fill_(1.0)
            torch.amax(x, 0, out=self.high)
            self.row.unsqueeze_(0)
        return self.linear(self.observe(x)) + self.row


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("fails", [False, True])
def test_buffers_that_the_step_resizes(fails: bool):
    """They are the same objects of the same shapes and values, on storages of the same size."""
    model, x = nn.Sequential(Observer(), Observer(), nn.Identity()), torch.randn(16, 8)

    def seen() -> list[Any]:
        return [
            (name, id(b), b.shape, b.stride(), b.storage_offset(), b.untyped_storage().nbytes(), b.tolist())
            for name, b in model.named_buffers()
        ]

    def refuse(*_: Any) -> None:
        raise LookupError("on purpose")

    before = seen()
    if fails:
        handle = model[2].register_forward_pre_hook(refuse)
        with pytest.raises(LookupError, match="on purpose"):
            autoac.profile(model, x)
        assert seen() == before
        handle.remove()
    autoac.profile(model, x)
    assert seen() == before
    model(x)
    assert len([a for a, b in zip(before, seen(), strict=True) if a[2] != b[2]]) >= 6, "nothing was resized"


def test_storages_that_are_resized_where_no_op_sees_it():
    """As FSDP frees what it has gathered: that is left to who does it."""

    model, x, gathered = nn.Linear(8, 8), torch.randn(4, 8), torch.ones(8)
    gathered.untyped_storage().resize_(0)

    def step() -> None:
        gathered.untyped_storage().resize_(32)
        scale = gathered.fill_(2.0).clone()
        gathered.untyped_storage().resize_(0)
        model(x * scale).sum().backward()

    autoac.profile(model, step)
    assert gathered.untyped_storage().nbytes() == 0
    step()


@pytest.mark.parametrize("kind", ["callable", "in backward"])
def test_optimizers_that_step_for_the_first_time_have_no_state_afterwards(kind: str):
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), torch.randn(4, 8)
    optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]
    warm = optimizers[0]
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    warm.step()
    model.zero_grad(set_to_none=True)
    before = copy.deepcopy(warm.state_dict())

    def step() -> None:
        model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    hooks = []
    if kind == "in backward":
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
            for parameter, optimizer in zip(model.parameters(), optimizers, strict=True)
        ]
    autoac.profile(model, x if hooks else step)
    for hook in hooks:
        hook.remove()
    assert not any(optimizer.state for optimizer in optimizers[1:])
    after = warm.state_dict()["state"][0]
    assert all(torch.equal(value, after[name]) for name, value in before["state"][0].items())
