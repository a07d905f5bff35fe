"""Plans for several sizes take turns on one model: bits, bytes, and who is asked."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.measure import measure_peak
from autoac.step.carried import planned
from tests.small_models import WIDTH, Blocks, make

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = (64, 16, 40)  # as they are given
ENGINES = ("replay", "sac")


@pytest.fixture(scope="module", params=ENGINES)
def made(request: pytest.FixtureRequest) -> tuple[Blocks, autoac.Buckets]:
    torch.manual_seed(0)
    model = make(blocks=4).train()
    samples = [torch.randn(size, WIDTH) for size in SIZES]
    profile = autoac.profile(model, samples[0])
    full, least = profile.peak_bytes, profile.least_peak_bytes
    budget = least + (full - least) // 3
    return model, autoac.plan_buckets(model, samples, budget, engine=request.param)


def training(model: Blocks, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Weights after a step with each size."""
    model = copy.deepcopy(model)
    return trained(model, sizes)


def trained(model: Blocks, sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for size in sizes:
        model(torch.randn(size, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_smaller_batches_recompute_less(made: tuple[Blocks, autoac.Buckets]):
    _, buckets = made
    table = buckets.samples
    assert list(table["elements"]) == [size * WIDTH for size in sorted(SIZES)]
    assert (table["peak_bytes"] <= buckets.budget_bytes).all()
    assert table["overhead"].is_monotonic_increasing
    assert table["regions"].iloc[0] == 0
    assert table["regions"].iloc[-1] > 0
    assert buckets.predicted_peak_bytes == table["peak_bytes"].max()


def test_weights_are_equal_and_nothing_is_left(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    sizes = (64, 10, 16, 40, 17, 64, 33, 64)
    expected = training(model, sizes)
    model = copy.deepcopy(model)
    before = [{**module.__dict__} for module in model.modules()]
    with buckets.applied(model):
        found = trained(model, sizes)
    assert all(map(torch.equal, expected, found))
    for module, attributes in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == attributes.keys()
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_each_call_takes_what_its_plan_says(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    with buckets.applied(model):
        for size in (*SIZES, *SIZES):
            x = torch.randn(size, WIDTH)
            plan = buckets.plan_for(x)

            def step(x: torch.Tensor = x) -> None:
                output = model(x)  # alive until backward is over
                output.mean().backward()

            model.zero_grad(set_to_none=True)
            taken = measure_peak(step)
            assert plan.resident_bytes + taken.peak_above_start_bytes == plan.predicted_peak_bytes
            assert not plan.is_not_followed
    model.zero_grad(set_to_none=True)


def test_between_two_sizes_the_larger_is_taken(made: tuple[Blocks, autoac.Buckets]):
    _, buckets = made
    taken = {size: buckets.plan_for(torch.empty(size, WIDTH)) for size in (1, 16, 17, 40, 41, 64, 65)}
    small, middle, large = buckets.plans
    assert list(taken.values()) == [small, small, middle, middle, large, large, large]


def test_what_is_larger_than_all_warns_once(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    with buckets.applied(model):
        model(torch.randn(16, WIDTH)).mean().backward()
        with pytest.warns(UserWarning, match="may take more than the planned peak of"):
            model(torch.randn(65, WIDTH)).mean().backward()
        model(torch.randn(16, WIDTH)).mean().backward()
        model(torch.randn(66, WIDTH)).mean().backward()  # said already; warnings are errors here
    model.zero_grad(set_to_none=True)


def test_only_training_calls_change_the_plan(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    with buckets.applied(model):
        output = model(torch.randn(64, WIDTH))
        with torch.no_grad():
            model(torch.randn(16, WIDTH))
        output.mean().backward()
        assert buckets.verify(model, torch.randn(40, WIDTH)).equal
        assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)


def test_two_calls_before_one_backward_warn(made: tuple[Blocks, autoac.Buckets]):
    """Each under the plan for its size."""
    model, buckets = made
    with buckets.applied(model):
        first = model(torch.randn(16, WIDTH))
        with pytest.warns(UserWarning, match="again before the backward of its previous call"):
            second = model(torch.randn(64, WIDTH))
        (first.mean() + second.mean()).backward()
    model.zero_grad(set_to_none=True)


def test_plans_made_in_eval_mode_take_turns_in_it():
    model = make(blocks=2).eval()
    samples = [torch.randn(size, WIDTH) for size in (16, 64)]
    least = autoac.profile(model, samples[1]).least_peak_bytes
    buckets = autoac.plan_buckets(model, samples, least)
    assert list(buckets.samples["regions"] > 0) == [False, True]
    with buckets.applied(model):
        for size, is_recomputing in ((64, True), (16, False), (64, True)):
            model(torch.randn(size, WIDTH)).mean().backward()
            model.zero_grad(set_to_none=True)
            assert any(planned(module) for module in model.modules()) is is_recomputing


def test_samples_with_as_many_elements_have_one_plan():
    """Which holds for the one with the higher peak."""
    model = make(blocks=2)
    few, many = torch.randn(16, WIDTH), torch.randn(4, 16, WIDTH)
    buckets = autoac.plan_buckets(model, [few, many, many.reshape(64, WIDTH)], 10**9)
    assert list(buckets.samples["elements"]) == [16 * WIDTH, 64 * WIDTH, 64 * WIDTH]
    assert buckets.samples["fits"].all()
    largest = buckets.plans[-1]
    (other,) = largest.record.others
    tight = autoac.Plan(dataclasses.replace(largest.record, others=(dataclasses.replace(other, fits=False),)))
    with autoac.Buckets([buckets.plans[0], tight]).applied(model):
        model(torch.randn(16, WIDTH))
        with pytest.warns(UserWarning, match="a sample that was given for its plan, which does not fit"):
            model(many if other.sample == "float32[4,16,16]" else many.reshape(64, WIDTH))


def test_copies_train_by_themselves(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    with buckets.applied(model):
        deep, shallow = copy.deepcopy(model), copy.copy(model)
        shallow._parameters = dict(shallow._parameters)
        shallow._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
        for parameter in shallow.parameters():
            parameter.data.zero_()
        x = torch.randn(16, WIDTH)
        outputs = []
        for one in (model, deep, shallow):
            torch.manual_seed(0)
            outputs.append(one(x))
        assert torch.equal(outputs[0], outputs[1])
        assert not outputs[2].any()
        deep(torch.randn(64, WIDTH)).mean().backward()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_has_one_owner(made: tuple[Blocks, autoac.Buckets]):
    model, buckets = made
    with pytest.raises(autoac.PlanMismatchError, match="nothing to remove"):
        buckets.remove(model)
    with buckets.applied(model):
        with pytest.raises(autoac.PlanMismatchError, match="call remove"):
            buckets.apply(model)
        with pytest.raises(autoac.ProfilingError, match="remove"):
            autoac.auto(model, 10**9)
    with buckets.plans[-1].applied(model), pytest.raises(autoac.PlanMismatchError, match="call remove"):
        buckets.apply(model)
    other = make(blocks=2)
    with pytest.raises(autoac.PlanMismatchError):
        buckets.apply(other)
    assert "forward" not in other.__dict__


def test_a_forward_over_ours_is_left_alone(made: tuple[Blocks, autoac.Buckets]):
    """As a library does that wraps the model's forward later."""
    model, buckets = copy.deepcopy(made[0]), made[1]
    sizes = (64, 16, 40)
    expected = training(model, sizes)
    buckets.apply(model)
    below = model.forward
    model.forward = lambda *args, **kwargs: below(*args, **kwargs)
    assert all(map(torch.equal, expected, trained(model, sizes)))


def test_saved_plans_are_buckets_again(made: tuple[Blocks, autoac.Buckets], tmp_path: Any):
    _, buckets = made
    paths = [tmp_path / f"{index}.json" for index in range(len(buckets.plans))]
    for plan, path in zip(buckets.plans, paths, strict=True):
        plan.save(path)
    again = autoac.Buckets(map(autoac.Plan.load, reversed(paths)))
    assert again.samples.equals(buckets.samples)


def test_plans_that_cannot_take_turns_are_refused(made: tuple[Blocks, autoac.Buckets]):
    _, buckets = made
    with pytest.raises(ValueError, match="no plan"):
        autoac.Buckets([])
    profile = buckets.plans[0].record.profile
    engine = next(name for name in ENGINES if name != buckets.plans[0].engine)
    with pytest.raises(ValueError, match="different engines"):
        autoac.Buckets([*buckets.plans, autoac.solve(profile, 10**9, engine=engine)])
    model = make(blocks=2)
    x = torch.randn(8, WIDTH)
    with pytest.raises(ValueError, match="callable"):
        autoac.plan_buckets(model, [lambda: model(x).mean().backward()], 10**9)
    with pytest.raises(ValueError, match="compile"):
        autoac.plan_buckets(model, [x], 10**9, engine="compile")
    with pytest.raises(ValueError, match="sizes that take turns reserve more"):
        autoac.plan_buckets(model, [x], 10**9, budget_of="reserved")
    with pytest.raises(autoac.InfeasibleBudgetError):
        autoac.plan_buckets(model, [torch.randn(4, WIDTH), x], 1000)


def test_a_compiled_model_has_no_turns(made: tuple[Blocks, autoac.Buckets]):
    """Its code is traced under one plan."""
    compiled: Any = torch.compile(make(blocks=2))
    with pytest.raises(ValueError, match="cannot take turns in a model that is compiled as a whole"):
        autoac.plan_buckets(compiled, [torch.randn(4, WIDTH), torch.randn(8, WIDTH)], 10**9)
    compiled = torch.compile(copy.deepcopy(made[0]))
    with pytest.raises(ValueError, match="cannot take turns in a model that is compiled as a whole"):
        made[1].apply(compiled)


def test_no_other_plan_is_put_on_beside_them(made: tuple[Blocks, autoac.Buckets]):
    """Also while the one for a small batch is on, which recomputes nothing."""
    model, buckets = copy.deepcopy(made[0]), made[1]
    buckets.apply(model)
    trained(model, (16,))
    with pytest.raises(autoac.PlanMismatchError, match="plans for several sizes are on this model"):
        buckets.plans[0].apply(model)
    trained(model, (64,))
    buckets.remove(model)


def test_arguments_that_can_be_read_once_are_for_all_sizes():
    model = make(blocks=2)
    samples = [torch.randn(4, WIDTH), torch.randn(8, WIDTH)]
    policies = (autoac.Policy("MUST_SAVE", op="aten.relu") for _ in range(1))
    buckets = autoac.plan_buckets(model, samples, 10**9, policies=policies, regions=iter(["blocks.0"]))
    for plan in buckets.plans:
        assert len(plan.record.policies) == 1
        assert {region.fqn for region in plan.record.regions} == {"blocks.0"}
    with pytest.raises(ValueError, match="Samples is given a Tensor"):
        autoac.plan_buckets(model, samples[0], 10**9)


def test_of_samples_with_as_many_elements_the_largest_step_is_planned_for():
    """Sixteen rows of attention over 4 columns need less than 4 rows over 16."""

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                y = block(x[..., None])
                x = (y @ y.transpose(-1, -2)).tanh().mean(-1)
            return x

    model, wide, long = Attends(), torch.randn(64, 4), torch.randn(4, 64)
    for samples in ([wide, long], [long, wide]):
        [plan] = autoac.plan_buckets(model, samples, 10**9).plans
        assert plan.record.profile.sample == "float32[4,64]"
