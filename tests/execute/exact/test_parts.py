"""Regions that are parts of one module's call: layers side by side in one forward."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac_solver.records.names import PART
from tests.execute.exact.harness import differences, recomputes

X = torch.linspace(-1, 1, 256 * 64).reshape(256, 64)
IMAGES = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
LAYERS = 12


def perceptron() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(64, 64), nn.GELU())))


class Inline(nn.Module):
    """Layers in a list, with everything between them in the model's own forward."""

    def __init__(self, dropout: float = 0.0, inplace: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(LAYERS))
        self.dropout, self.inplace = dropout, inplace

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = F.relu(norm(layer(x)), inplace=self.inplace)
            x = torch.tanh(F.dropout(h, self.dropout, self.training)) + 0.5 * h
        return x


def convolutions() -> nn.Module:
    channels = [3, 8, 8, 8, 8, 8, 8]
    layers = [
        layer
        for a, b in itertools.pairwise(channels)
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


MODELS = {
    "perceptron": (perceptron, X),
    "inline": (Inline, X),
    "inline, dropout": (lambda: Inline(0.1), X),
    "inline, in place": (lambda: Inline(0.1, inplace=True), X),
    "convolutions": (convolutions, IMAGES),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    build, sample = MODELS[name]
    return build(), sample


def steps(
    model: nn.Module, x: torch.Tensor, calls: int = 1, count: int = 2
) -> dict[str, torch.Tensor | None]:
    """What some training steps leave behind."""
    torch.manual_seed(1)
    left: dict[str, torch.Tensor | None] = {}
    for step in range(count):
        model.zero_grad(set_to_none=True)
        for call in range(calls):
            loss = model(x).square().mean()
            loss.backward()
            left[f"loss {step} {call}"] = loss.detach()
        left |= {f"gradient of {name} {step}": p.grad for name, p in model.named_parameters()}
        left |= {f"{name} {step}": buffer.clone() for name, buffer in model.named_buffers()}
    left["random state"] = torch.get_rng_state()
    return left


def has_parts(plan: autoac.Plan) -> bool:
    return any(region.wrapped and PART in region.fqn for region in plan.regions)


@pytest.mark.parametrize("name", MODELS)
def test_exact_at_three_budgets(name: str):
    model, x = made(name)
    expected = steps(copy.deepcopy(model), x)
    profile = autoac.profile(model, x)
    least = profile.least_peak_bytes
    seen = []
    for share in (0.0, 0.3, 0.6):
        plan = autoac.solve(profile, least + int(share * (profile.peak_bytes - least)))
        planned = plan.apply(copy.deepcopy(model))
        assert not differences(steps(planned, x), expected)
        assert not plan.is_not_followed
        report = plan.verify(model, x)
        assert report.ok
        assert report.measured_peak_bytes == report.predicted_peak_bytes
        seen.append(has_parts(plan))
    assert any(seen)


class Around(nn.Module):
    """Another module between ops of its own that autograd saves nothing of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2.0) + 1.0


@pytest.mark.parametrize("around", [0, 2])
def test_a_flat_model_takes_half_the_memory(around: int):
    """Each layer's input is the output of the one before it, so that single layers as regions give nothing back."""
    model, x = made("perceptron")
    for _ in range(around):
        model = Around(model)
    profile = autoac.profile(model, x)
    above = profile.peak_bytes - profile.resident_bytes
    assert profile.least_peak_bytes - profile.resident_bytes < 0.5 * above
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.GELU))]
    with pytest.raises(autoac.InfeasibleBudgetError):
        autoac.solve(profile, int(0.9 * profile.peak_bytes), regions=layers)


@pytest.mark.parametrize("aborted", [False, True], ids=["whole steps", "a step that is aborted"])
def test_micro_batches(aborted: bool):
    """Each call of the model has its own parts; a step that ends early does not shift them."""
    model, x = made("perceptron")

    def whole() -> None:
        for _ in range(3):
            model(x).square().mean().backward()

    profile = autoac.profile(model, whole)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    expected = steps(copy.deepcopy(model), x, calls=3)
    planned = plan.apply(copy.deepcopy(model))
    assert has_parts(plan)
    if aborted:
        planned(x).square().mean().backward()
    assert not differences(steps(planned, x, calls=3), expected)
    assert not plan.is_not_followed


@pytest.mark.filterwarnings("ignore:module '' was replaced after the plan was applied")  # see `plain`
def test_copies_run_their_own_weights():
    model, x = made("inline")
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    plan.apply(model)
    for copied in (copy.deepcopy(model), copy.copy(model)):
        layers = copy.deepcopy(model.get_submodule("layers"))
        copied.layers = layers
        with torch.no_grad():
            next(layers.parameters()).mul_(2)
        plain = copy.deepcopy(copied)
        for module in plain.modules():
            for key in [key for key in module.__dict__ if key == "forward" or key.startswith("_autoac")]:
                del module.__dict__[key]
        assert not differences(steps(copied, x), steps(plain, x))
    plan.remove(model)
    assert not [key for module in model.modules() for key in module.__dict__ if "autoac" in key]


def test_a_saved_plan_is_the_same(tmp_path):
    model, x = made("inline, dropout")
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    plan.save(tmp_path / "plan.json")
    loaded = autoac.Plan.load(tmp_path / "plan.json")
    assert loaded.record == plan.record
    assert has_parts(loaded)
    assert recomputes(loaded)
    expected = steps(copy.deepcopy(model), x)
    assert not differences(steps(loaded.apply(copy.deepcopy(model)), x), expected)


def test_other_ops_than_planned_are_exact_and_told():
    model, x = made("inline")
    assert isinstance(model, Inline)
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    other = copy.deepcopy(model)
    other.dropout = model.dropout = 0.2
    expected = steps(other, x)
    plan.apply(model)
    with pytest.warns(
        UserWarning, match="followed: the model itself ran ops that the profiled step did not run"
    ):
        found = steps(model, x)
    assert not differences(found, expected)
    assert plan.is_not_followed
    assert plan.is_not_followed.peak_bytes >= plan.predicted_peak_bytes


class Doubling(nn.Module):
    """Reads one tensor in all its parts, and may write it in place after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.doubles = nn.ModuleList(nn.Linear(64, 64) for _ in range(LAYERS)), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.layers[0](x)  # autograd saves what is computed from it, not itself
        for index, layer in enumerate(self.layers):
            x = F.gelu(layer((early + float(index)) * 1.0)) + x
        if self.doubles:
            early.detach().mul_(2.0)
        return x + early


def test_an_unplanned_write_to_what_an_earlier_part_reads():
    torch.manual_seed(0)
    plain = Doubling()
    profile = autoac.profile(plain, X)
    plan = autoac.solve(profile, profile.least_peak_bytes)
    assert sum(PART in region.name for region in plan.regions) > 1
    planned = plan.apply(copy.deepcopy(plain))
    plain.doubles = planned.doubles = True
    with pytest.warns(
        UserWarning, match="followed: the model itself ran ops that the profiled step did not run"
    ):
        got = steps(planned, X)
    assert not differences(got, steps(plain, X))


def test_two_backwards_through_one_graph():
    model, x = made("perceptron")
    profile = autoac.profile(model, x)
    plain = copy.deepcopy(model)
    autoac.solve(profile, profile.least_peak_bytes).apply(model)
    for each in (model, plain):
        loss = each(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    found, expected = ({n: p.grad for n, p in each.named_parameters()} for each in (model, plain))
    assert not differences(found, expected)


def test_the_first_step_of_a_plan_from_fake_tensors_is_checked():
    """Every part compares what it recomputes."""
    model, x = made("inline")
    plain = copy.deepcopy(model)
    profile = autoac.profile(model, x, mode="fake")
    plan = autoac.solve(profile, profile.least_peak_bytes)
    assert has_parts(plan)
    assert not differences(steps(plan.apply(model), x), steps(plain, x))


def test_what_a_module_is_to_the_plan():
    model, x = made("perceptron")
    plan = autoac.plan(model, x, budget=autoac.profile(model, x).least_peak_bytes)
    assert "lies around the regions" in plan.why("")
    inside = plan.why("3")
    part = next(region.name for region in plan.regions if region.wrapped)
    assert plan.why(part).startswith(f"part {part!r} of the model itself, from aten.addmm.default of '")
    assert "values are recomputed" in plan.why(part)
    with pytest.raises(autoac.ProfilingError, match="Parts of a call are chosen by the planner"):
        autoac.solve(plan.record.profile, plan.budget_bytes, regions=[part])
    assert inside.startswith("3: lies in part ':")
    assert "of the model itself, whose values are decided on one by one" in inside


class Turning(nn.Module):
    """With fewer rows, the first op is another one and a later one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(perceptron().children())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin() if len(x) < len(X) else x.cos()
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index % 8 == 3 and len(x) == len(X):
                x = x * 1.0
        return x


def test_another_sample_with_other_ops_has_the_same_parts():
    """Where its call leaves the planned one, parts begin at the same ops, by their names and numbers."""
    torch.manual_seed(0)
    model, fewer = Turning(), X[:192]
    profile = autoac.profile(model, X)
    plan = autoac.plan(model, autoac.Samples([X, fewer]), profile.least_peak_bytes)
    assert has_parts(plan)
    assert list(plan.samples["fits"]) == [True, True]
    with pytest.warns(UserWarning, match="the plan is not followed: the model itself ran ops"):
        report = plan.verify(model, fewer)
    assert report.equal
    assert report.measured_peak_bytes == plan.samples["peak_bytes"].iloc[1]
    assert report.measured_peak_bytes < 0.85 * report.unplanned_peak_bytes
