"""Code that would not do the same in a second run: it works, or the region is left alone and says why."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import autoac
from autoac_solver.plan.partitions import partitions
from autoac_solver.records.profile import INFERENCE, Profile
from tests.execute.exact.harness import Case, assert_exact
from tests.features.feature import feature
from tests.small_models import least_bytes

X = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


# -- a module that calls itself ----------------------------------------------------------------------------------------


class CallsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        if depth:
            x = self(x, depth - 1)
        return self.second(F.gelu(self.first(x)))


@feature("a module that calls itself")
def test_a_module_that_calls_itself(engine):
    case = Case(
        lambda: nn.Sequential(CallsItself(), CallsItself(), nn.Linear(32, 32)), mean_square, ("0", "1")
    )
    assert_exact(case, engine)


# -- planned code inside of a region -----------------------------------------------------------------------------------

EVERYTHING = [autoac.Policy("MUST_RECOMPUTE", module="*", optional=True)]


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.sin(self.first(x))))


def in_one_another() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Sequential(Deep(), Deep()), Deep()), Deep(), nn.Linear(32, 32))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    mean_square(model).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_gradients(model: nn.Module, expected: list[torch.Tensor]) -> None:
    found = gradients(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_a_plan_for_a_part_of_what_another_plan_recomputes(engine):
    """The part's regions are inside of a region, and run as its code, in forward as in its second run."""

    def plan(model: nn.Module, regions: list[str]) -> autoac.Plan:
        profile = autoac.profile(model, X)
        return autoac.solve(profile, 10**9, engine=engine, regions=regions, policies=EVERYTHING)

    model = in_one_another()
    plan(in_one_another(), ["0"]).apply(model)
    plan(in_one_another()[0][0], ["0", "1"]).apply(model[0][0])  # type: ignore[index]
    expected = gradients(in_one_another())
    for _ in range(2):
        assert_gradients(model, expected)


class CallsTheModel(nn.Module):
    """Its block `back` calls the whole model once more, which calls `twice` again."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.last = nn.Linear(32, 32)
        self.back = Back(self)

    def forward(self, x: torch.Tensor, depth: int = 1) -> torch.Tensor:
        x = torch.sin(self.twice(x))
        return self.last(self.back(x, depth)) if depth else x


class Back(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return torch.tanh(self.second(torch.sin(self.first(self.model[0](x, depth - 1)))))


def test_a_region_that_calls_the_whole_model(engine):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return CallsTheModel()

    profile = autoac.profile(make(), X)
    plan = autoac.solve(profile, 10**9, engine=engine, regions=["twice", "back"], policies=EVERYTHING)
    assert any(region.wrapped for region in plan.regions)
    model = plan.apply(make())
    expected = gradients(make())
    for _ in range(3):  # a second run does not change whose turn it is in the next step
        assert_gradients(model, expected)


# -- inference mode ----------------------------------------------------------------------------------------------------


class LooksWithoutGradients(nn.Module):
    """A frozen part that runs in inference mode; its batch norm and its dropout leave traces."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1))
        self.normed = nn.InstanceNorm1d(8, track_running_stats=True)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            found = self.frozen(x).mul_(2)
            found.view(-1)[:4].add_(1)
            found += self.normed(x.reshape(16, 8, 16)).reshape(64, 32)
        return torch.sin(torch.tanh(self.linear(F.gelu(torch.sin(x))) + found.clone()))


def looking() -> nn.Module:
    return nn.Sequential(
        LooksWithoutGradients(), nn.Sequential(nn.Linear(32, 32), nn.GELU()), nn.Linear(32, 32)
    )


@feature("`torch.inference_mode` inside a region", "replay")
def test_inference_mode():
    assert_exact(Case(looking, mean_square, ("0",)), "replay")


@feature("`torch.inference_mode` inside a region", "sac", cell="left alone, `plan.why` says it")
def test_inference_mode_is_left_alone():
    case = Case(looking, mean_square, ("0", "1"))
    plan = assert_exact(case, "sac")[0.0]
    assert (
        "no region       the model itself: it makes or is given tensors of inference mode" in plan.explain()
    )
    assert "0: is no region: it makes or is given tensors of inference mode" in plan.why("0")
    assert {call.fqn for call in plan.record.profile.calls if call.grad and call.once} == {"", "0"}


class Shifts(nn.Module):
    """Reads what it is given only by an op that saves nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.linear = nn.Parameter(torch.ones(32)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(torch.sin(x * self.shift) + given))


class GivesResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shifts() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            given = torch.cos(x)
        for layer in self.layers:
            x = layer(x, given)
        return x


def test_results_of_inference_mode_given_to_a_region():
    case = Case(GivesResults, mean_square, ("layers.0", "layers.1", "layers.2.linear"))
    assert_exact(case, "replay")
    plan = autoac.solve(case.profile(), 10**9, engine="sac", regions=case.regions)
    assert [region.fqn for region in plan.regions] == ["layers.2.linear"]
    assert "tensors of inference mode, which selective checkpointing cannot save" in plan.why("layers.0")


# -- cached parametrizations -------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        parametrize.register_parametrization(self.first, "weight", Symmetric())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class CachesInside(Parametrized):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return super().forward(torch.sin(super().forward(x)))


class CachesOutside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Parametrized() for _ in range(2))
        self.rest = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return self.rest(x)


@feature("`parametrize.cached` inside a region")
def test_cached_parametrizations_inside_a_region(engine):
    case = Case(
        lambda: nn.Sequential(CachesInside(), CachesInside(), nn.Linear(32, 32)), mean_square, ("0", "1")
    )
    assert_exact(case, engine)


@feature("`parametrize.cached` around regions", "replay")
def test_cached_parametrizations_around_regions():
    assert_exact(Case(CachesOutside, mean_square, "layers.*"), "replay")


def test_cached_parametrizations_that_only_the_loop_enters(monkeypatch):
    """Such a region recomputes nothing, and the plan says so; gradients are equal."""
    expected, model = CachesOutside(), CachesOutside()
    model.load_state_dict(expected.state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(parametrize, "cached", contextlib.nullcontext)
        profile = autoac.profile(model, X)
    budget = least_bytes(profile, "sac", ["layers.*"])
    plan = autoac.solve(profile, budget, engine="sac", regions=["layers.*"])
    assert all(region.wrapped for region in plan.regions)
    plan.apply(model)
    cause = r"within torch.nn.utils.parametrize.cached\(\), and the plan was made without"
    with pytest.warns(UserWarning, match=cause):
        loss = mean_square(model)
    loss.backward()
    mean_square(expected).backward()
    assert {name.split("#")[0] for name in plan.is_not_followed.regions} == {"layers.0", "layers.1"}
    found, right = ([p.grad for p in one.parameters() if p.grad is not None] for one in (model, expected))
    assert len(found) == len(right) == 12
    assert all(map(torch.equal, found, right))


@feature("`parametrize.cached` around regions", "sac", cell="left alone, `plan.why` says it")
def test_cached_parametrizations_around_regions_are_left_alone():
    plan = assert_exact(Case(CachesOutside, mean_square, ("layers.0", "layers.1", "rest")), "sac")[0.0]
    assert "'layers.0': it reads cached parametrizations" in plan.explain()
    assert [region.fqn for region in plan.regions if region.wrapped] == ["rest"]


# -- saved tensors that are read twice ---------------------------------------------------------------------------------


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, torch.sin(x))
        return torch.sin(x) * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * (ctx.saved_tensors[0].cos() * ctx.saved_tensors[0] + ctx.saved_tensors[1])


class WithTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.sin(ReadsTwice.apply(torch.tanh(self.first(x)))))


TWICE = Case(
    lambda: nn.Sequential(WithTwo(), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))),
    mean_square,
    ("0", "1"),
)


@feature("`ctx.saved_tensors` read twice in one backward", "replay")
def test_saved_tensors_that_are_read_twice():
    assert_exact(TWICE, "replay")


@feature("`ctx.saved_tensors` read twice in one backward", "sac", cell="left alone, `plan.why` says it")
def test_modules_whose_saved_tensors_are_read_twice_are_left_alone():
    """By torch's checkpoint the first planned step would be refused."""
    plan = assert_exact(TWICE, "sac")[0.0]
    assert "a backward in it reads `ctx.saved_tensors` twice" in plan.why("0")
    assert [region.fqn for region in plan.regions if region.wrapped] == ["1"]


class HoldsOfInference(nn.Module):
    places: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        with torch.inference_mode():
            self.register_buffer("places", torch.linspace(0, 1, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sin(self.linear(x)) + self.places)


@feature("a buffer made in inference mode")
def test_a_buffer_made_in_inference_mode(engine):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(HoldsOfInference(), HoldsOfInference(), nn.Linear(32, 32))

    plan = autoac.solve(
        autoac.profile(make(), X), 10**9, engine=engine, regions=["0", "1"], policies=EVERYTHING
    )
    assert_gradients(plan.apply(make()), gradients(make()))


# -- modules inside of such a module -----------------------------------------------------------------------------------


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5  # autograd saves no tensor for it


class Doubles(nn.Module):
    """What the second part is given is written in place before its code could run again."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(*(self.block() for _ in range(3))) for _ in range(3))

    @staticmethod
    def block() -> nn.Module:
        return nn.Sequential(Halves(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.parts[0](x) * 1.0
        z = self.parts[1](y)
        y.mul_(2.0)
        return self.parts[2](z) + y


def test_regions_are_chosen_inside_of_a_module_that_cannot_be_one():
    profile = Case(Doubles, mean_square, ("parts.*",)).profile()
    coarsest = [profile.calls[call].fqn for call in partitions(profile, "sac")[0]]
    assert "parts.1" not in coarsest
    assert {"parts.1.1", "parts.1.2"} <= set(coarsest)
    assert_exact(Case(Doubles, mean_square, coarsest), "sac", (0.0, 0.5))


# -- what is recorded of it --------------------------------------------------------------------------------------------


def test_what_is_recorded_of_it_is_in_files(tmp_path):
    profile = Case(looking, mean_square, ("0",)).profile()
    assert {call.once for call in profile.calls} == {"", INFERENCE}
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
