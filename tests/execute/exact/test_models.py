"""Models of every shape: what is frozen, shared, called several times, routed by the data, and what goes in and out."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_gradients_of_a_step,
    assert_plan_exact,
    least_budget,
    planned,
    plans,
    recomputes,
)
from tests.features.feature import feature

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
UNKNOWN_OPS = "ignore:the plan is not followed:UserWarning"


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


# -- which parameters there are ----------------------------------------------------------------------------------------


def test_frozen_parameters(engine):
    """The first block has no gradient at all, the second passes one on, the third has every other parameter frozen."""

    def build():
        model = nn.Sequential(Block(), Block(), Block(), Block())
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)
        model[2].norm.requires_grad_(True)
        return model

    made = assert_exact(Case(build, mean_square, regions=("0", "1", "2", "3")), engine)
    assert {region.fqn for region in made[0.0].regions} <= {"1", "2", "3"}


class Adapted(nn.Module):
    """A frozen layer and a trained one of low rank beside it."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base.requires_grad_(False)
        wide, narrow = base.get_parameter("weight").shape
        self.a, self.b = nn.Linear(narrow, 4, bias=False), nn.Linear(4, wide, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.base(x) + 0.5 * self.b(self.a(self.dropout(x)))


def test_adapters(engine):
    def build():
        model = nn.Sequential(Block(), Block(), Block()).requires_grad_(False)
        for block in model:
            for name in ("up", "down"):
                setattr(block, name, Adapted(block.get_submodule(name)))
        return model

    assert_exact(Case(build, mean_square, regions=("0", "1", "2")), engine)


class Tied(nn.Module):
    """Embedding and head are one parameter; two of the blocks share their weights, too."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[2].get_submodule("up").weight = self.blocks[0].get_parameter("up.weight")

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_tied_weights(engine):
    tokens = torch.arange(64).reshape(4, 16) % 50

    def forward(model):
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(1))

    assert_exact(Case(Tied, forward, regions=("blocks.*", "embedding")), engine)


def test_parametrised_weights(engine):
    def build():
        model = nn.Sequential(Block(), Block())
        for block in model:
            weight_norm(block.get_submodule("up"))
        return model

    assert_exact(Case(build, mean_square, regions=("0", "1")), engine)


# -- modules called several times --------------------------------------------------------------------------------------


class Looped(nn.Module):
    """One block called several times, the first time with gradients off."""

    def __init__(self, calls: int = 3):
        super().__init__()
        self.first, self.block, self.calls = nn.Linear(64, 64), Block(), calls

    def forward(self, x):
        x = self.first(x)
        with torch.no_grad():
            guess = self.block(x)
        for _ in range(self.calls):
            x = self.block(x)
        return x * torch.sigmoid(guess)


def test_module_called_several_times(engine):
    made = assert_exact(Case(Looped, mean_square, regions="block"), engine)
    names = [region.name for region in made[0.0].regions]
    assert names == ["block", "block#1", "block#2"]
    assert any(len({region.wrapped for region in plan.regions}) == 2 for plan in made.values())


@pytest.mark.filterwarnings("ignore:module 'block' is called 4 times in one call of the model")
def test_other_number_of_calls_than_profiled(engine):
    """Another step may call it more often or less; and what a call leaves undone does not disturb the next step."""

    def forward(model):
        model.calls = 4 if model.calls == 2 else 2
        return mean_square(model)

    assert_exact(Case(Looped, forward, regions="block", profiled=mean_square), engine)


def test_forward_hooks(engine):
    """Hooks on a planned module and inside of it run once, and on what they would run without a plan."""

    def squash(module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        return torch.tanh(output)

    def build():
        model = nn.Sequential(Block(), Block())
        model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        model[0].register_forward_hook(squash)
        model[1].get_submodule("up").register_forward_hook(squash)
        model[1].register_full_backward_hook(lambda module, grads, out_grads: (grads[0] * 3,))
        return model

    assert_exact(Case(build, mean_square, regions=("0", "1")), engine)


def test_copies_of_a_planned_model(engine):
    case = Case(lambda: nn.Sequential(Block(), Block()), mean_square, regions=("0", "1"))
    plan = plans(case, engine, [0.0])[0.0]
    model = planned(case, plan)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # which the copy must not notice
    loss = mean_square(twin)
    loss.backward()
    assert_gradients_of_a_step(twin, case)


# -- data-dependent routing --------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Each token goes to two of four experts; one without tokens is not called."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            if len(token):
                y.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return x + torch.tanh(y)


TOKENS = torch.sin(torch.arange(96.0 * 32)).reshape(96, 32)


def routed(tokens: torch.Tensor, sharpness: float = 1.0):
    def forward(model):
        with torch.no_grad():
            for layer in model:
                layer.gate.weight.mul_(sharpness)
        return model(tokens).square().mean()

    return forward


@pytest.mark.parametrize("regions", [("0", "1"), ("*.experts.*",)], ids=["layers", "experts"])
def test_mixture_of_experts(engine, regions):
    case = Case(lambda: nn.Sequential(Experts(), Experts()), routed(TOKENS), regions)
    assert_exact(case, engine)


def chosen_experts(tokens: torch.Tensor) -> list[int]:
    torch.manual_seed(1)
    return torch.bincount(Experts().gate(tokens).argmax(-1), minlength=4).tolist()


@pytest.mark.filterwarnings(UNKNOWN_OPS)
@pytest.mark.parametrize("regions", [("0", "1"), ("*.experts.*",)], ids=["layers", "experts"])
@pytest.mark.parametrize("fewer", [True, False], ids=["fewer experts", "more experts"])
def test_batch_routed_otherwise_than_the_profiled_one(engine, regions, fewer):
    """Other experts get other numbers of tokens, and some are called that were not, or the other way round."""
    some = TOKENS[:1].expand(96, 32) + 0.01 * TOKENS
    assert sum(count > 0 for count in chosen_experts(some)) < sum(
        count > 0 for count in chosen_experts(TOKENS)
    )
    profiled, batch = (TOKENS, some) if fewer else (some, TOKENS)
    case = Case(
        lambda: nn.Sequential(Experts(), Experts()), routed(batch), regions, profiled=routed(profiled)
    )
    assert_exact(case, engine)


class EarlyExit(nn.Module):
    """How often it goes round depends on the data, and so does which branch it takes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.linear(x)) if x.abs().max() > 0.5 else torch.sin(x) * 2
            if x.abs().mean() < 0.1:
                break
        return x


@pytest.mark.filterwarnings(UNKNOWN_OPS)
@pytest.mark.parametrize("scale", [1.0, 0.4, 0.2])
def test_branches_taken_otherwise(engine, scale):
    case = Case(
        lambda: nn.Sequential(EarlyExit(), EarlyExit()),
        lambda model: model(X * scale).square().mean(),
        regions=("0", "1"),
        profiled=mean_square,
    )
    assert_exact(case, engine)


# -- other sizes -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


@pytest.mark.parametrize("shape", [(1, 16), (3, 16), (8, 7), (2, 40)], ids=str)
def test_other_batch_size_and_length_than_profiled(engine, shape):
    def steps(batch, length):
        x = torch.sin(torch.arange(batch * length * 32.0)).reshape(batch, length, 32)
        return lambda model: model(x).square().mean()

    case = Case(
        lambda: nn.Sequential(Attention(), Block(32), Attention(), Block(32)),
        steps(*shape),
        regions=("0", "1", "2", "3"),
        profiled=steps(8, 16),
    )
    assert_exact(case, engine)


def test_empty_batch(engine):
    """Some data loaders end with one."""
    case = Case(lambda: nn.Sequential(Block(), Block()), mean_square, regions=("0", "1"))
    plan = plans(case, engine, [0.0])[0.0]
    assert_plan_exact(dataclasses.replace(case, forward=lambda model: model(X[:0]).sum()), plan)


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@dataclass
class State:
    x: torch.Tensor
    history: list[torch.Tensor]
    step: int = 0


class Nested(nn.Module):
    """Takes and returns what people pass around: keywords, data classes, dictionaries, numbers, strings, nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, state: State, *pairs, scale=None, options: dict, mode: str = "tanh"):
        x = torch.sigmoid(self.linear(state.x)) * options["gain"]["value"]
        for left, (right,) in pairs:
            x = x + left * torch.sin(right)
        x = getattr(torch, mode)(x if scale is None else x * scale)
        extra = {"mean": x.mean(), "shape": x.shape, "mode": mode, "none": None, "pair": (x.cos(), [x.exp()])}
        return State(x, [*state.history, x.square()], state.step + 1), extra


class NestedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Nested(), Nested(), Nested()])
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x):
        state, extra = State(x, []), dict[str, Any](pair=(x, [x * 2]))
        for index, layer in enumerate(self.layers):
            cosine, (exponential, *_) = extra["pair"]
            state, extra = layer(
                state,
                (cosine, [exponential]),
                scale=None if index == 0 else 0.5 * index,
                options={"gain": {"value": self.gain}},
                mode=("tanh", "sin", "sigmoid")[index],
            )
        assert state.step == 3
        return extra["mean"] + sum(h.mean() for h in state.history) + extra["pair"][0].mean()


@feature("keyword, nested and other arguments")
def test_keyword_nested_and_other_arguments(engine):
    def forward(model):
        x = X.clone().requires_grad_()
        return model(x), x

    assert_exact(Case(NestedModel, forward, regions="layers.*"), engine)


class Several(nn.Module):
    """Returns its input, a view of it, one tensor twice, a constant, and something without a gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(self.linear(torch.sin(F.gelu(self.linear(torch.cos(x))))))
        return x, x[:32], y, y, y.t(), torch.ones(64), (y > 0).float(), y.detach()


def test_outputs_that_are_inputs_or_one_another(engine):
    def forward(model):
        x = X
        for layer in model:
            same, top, y, again, turned, ones, positive, detached = layer(x)
            x = same.sin() + top.sum(0) + y * again.exp() + turned * ones + positive * detached
        return x.square().mean()

    assert_exact(Case(lambda: nn.ModuleList([Several(), Several()]), forward, regions=("0", "1")), engine)


class Cached(nn.Module):
    """Keeps a tensor of its forward, which later code differentiates: a region's value that leaves by the back door."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        self.hidden = F.gelu(self.linear(x))
        return torch.sin(self.hidden) * torch.sigmoid(self.hidden)


def test_values_that_leave_a_region_as_attributes(engine):
    def forward(model):
        loss = model(X).square().mean()
        hidden = [layer.__dict__.pop("hidden") for layer in model]
        return loss + sum(h.exp().mean() for h in hidden)

    assert_exact(Case(lambda: nn.Sequential(Cached(), Cached()), forward, regions=("0", "1")), engine)


def test_sample_given_as_tensors(engine):
    """`plan` with a mapping and a loss, as in its documentation, and `verify`, which agrees."""
    import autoac

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, *, inputs, targets):
            return {"error": self.blocks(inputs) - targets}

    def loss(output):
        return output["error"].square().mean()

    sample = {"inputs": X, "targets": X.flip(0)}
    case = Case(Model, lambda model: loss(model(**sample)), regions="blocks.*")
    profile = autoac.profile(case.model(), sample, loss=loss)
    least = least_budget(profile, engine, ["blocks.0", "blocks.1"])
    plan = autoac.plan(case.model(), sample, least, loss=loss, engine=engine, regions="blocks.*")
    assert recomputes(plan)
    assert_plan_exact(case, plan)
    assert plan.verify(case.model(), sample, loss=loss).equal
