"""Ways to go backward: several losses, accumulation, `torch.autograd.grad`, twice, through gradients, not at all."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from tests.blocks import Block, X
from tests.execute.exact.harness import (
    Case,
    assert_exact,
    assert_gradients_of_a_step,
    assert_nothing_active,
    assert_plan_exact,
    backward_from,
    nothing_leaks,
    plan_with,
    planned,
    plans,
    run,
)
from tests.features.feature import feature


class TwoHeads(nn.Module):
    """A trunk of two blocks, and two heads of one each."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(Block(), Block())
        self.heads = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.trunk(x)
        return [head(x).square().mean() for head in self.heads]


REGIONS = ("trunk.*", "heads.*")


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


def mean_square(model: nn.Module) -> torch.Tensor:
    return model(X).square().mean()


def case_of(backward, forward=mean_square, profiled_backward=None) -> Case:
    return Case(blocks, forward, ("0", "1"), backward=backward, profiled_backward=profiled_backward)


# -- several losses, several micro-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backward",
    [
        pytest.param(lambda losses: (losses[0] + 2 * losses[1]).backward(), id="sum"),
        pytest.param(lambda losses: torch.autograd.backward(losses), id="together"),
        pytest.param(lambda losses: losses[1].backward(), id="one of them"),
    ],
)
def test_several_losses(engine, backward):
    assert_exact(Case(TwoHeads, lambda model: model(X), REGIONS, backward=backward), engine)


def one_by_one(losses):
    losses[0].backward(retain_graph=True)
    losses[1].backward()


def test_several_losses_one_after_the_other():
    """Each backward goes through the trunk, which replays for each."""
    assert_exact(Case(TwoHeads, lambda model: model(X), REGIONS, backward=one_by_one), "replay")


def test_several_losses_one_after_the_other_are_refused_under_sac():
    """By the planner if the profiled step has them, otherwise by torch."""
    case = Case(TwoHeads, lambda model: model(X), REGIONS, backward=one_by_one)
    plan = plan_with(case, "sac", all_but_tanh)
    assert {region.name for region in plan.regions} == {"heads.0", "heads.1"}
    case = dataclasses.replace(case, profiled_backward=lambda losses: torch.stack(losses).sum().backward())
    plan = plan_with(case, "sac", all_but_tanh)
    with pytest.raises(RuntimeError, match="You are only allowed to backward once on any region"):
        run(case, plan)


def all_but_tanh(region: str, op: str, nth: int) -> bool:
    """A region of which something is saved gives it out once; one that is all recomputed allows for more."""
    return op != "aten.tanh.default"


@feature("gradient accumulation, several forwards before a backward")
def test_gradient_accumulation(engine):
    """Micro-batches one after the other into the same gradients."""

    def forward(model):
        losses = []
        for batch in X.split(32):
            loss = model(batch).square().mean() / 2
            loss.backward()
            losses.append(loss)
        return losses

    assert_exact(case_of(lambda losses: None, forward), engine)


@feature("gradient accumulation, several forwards before a backward")
def test_micro_batches_forward_before_backward(engine):
    """As in a pipeline: several forwards of a region are open at once, and come back in another order."""

    def backward(losses):
        for index in (1, 0, 2):
            losses[index].backward()

    def forward(model):
        return [model(X[k : k + 21]).square().mean() for k in (0, 21, 42)]

    assert_exact(case_of(backward, forward), engine)


# -- torch.autograd.grad -----------------------------------------------------------------------------------------------


def with_parameters(model):
    return mean_square(model), list(model.parameters())


@feature("`backward(inputs=)` and `torch.autograd.grad`")
@pytest.mark.parametrize("which", [slice(None), slice(0, 1), slice(-2, None), slice(3, 5)], ids=str)
def test_autograd_grad(engine, which):
    def backward(result):
        loss, parameters = result
        return torch.autograd.grad(loss, parameters[which])

    assert_exact(case_of(backward, with_parameters), engine)


def test_gradient_of_the_input_only(engine):
    def forward(model):
        x = X.clone().requires_grad_()
        return model(x).square().mean(), x

    def backward(result):
        loss, x = result
        return torch.autograd.grad(loss, x)

    assert_exact(case_of(backward, forward), engine)


@feature("`backward(inputs=)` and `torch.autograd.grad`")
@pytest.mark.parametrize("which", [slice(0, 2), slice(-2, None)], ids=str)
def test_backward_into_some_parameters(engine, which):
    assert_exact(case_of(lambda r: r[0].backward(inputs=r[1][which]), with_parameters), engine)


def test_gradient_with_respect_to_a_value_between_regions(engine):
    def forward(model):
        middle = model[0](X)
        return model[1](middle).square().mean(), middle

    def backward(result):
        loss, middle = result
        (gradient,) = torch.autograd.grad(loss, middle)
        return gradient

    assert_exact(case_of(backward, forward), engine)


def test_gradient_of_an_output_with_given_gradient(engine):
    def backward(result):
        result[0].backward(torch.cos(X))

    assert_exact(case_of(backward, lambda model: [model(X)]), engine)


class Forces(nn.Module):
    """Differentiates what it computes, and uses the gradient as a value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        energy = torch.tanh(self.linear(torch.cos(x)))
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.linear(at).sin().sum(), at)
        return torch.sigmoid(torch.sin(energy * force))


@feature("backward inside a region's forward", "replay")
def test_gradient_inside_forward():
    """That backward replays what is recorded so far, the rest waits for the step's. Sac could do only one of them."""
    assert_exact(Case(lambda: nn.Sequential(Forces(), Forces()), mean_square, regions=("0", "1")), "replay")


@feature("backward inside a region's forward", "sac", cell="such regions are left untouched")
def test_gradient_inside_forward_under_sac():
    """The planner leaves these regions alone, and says so if there are no others."""
    case = Case(lambda: nn.Sequential(Forces(), Block()), mean_square, regions=("0", "1"))
    plan = plan_with(case, "sac", lambda region, op, nth: True)
    assert [region.name for region in plan.regions] == ["1"]
    assert_plan_exact(case, plan)


# -- twice, and through gradients --------------------------------------------------------------------------------------


def twice(loss):
    loss.backward(retain_graph=True)
    (3 * loss).backward()


def three_times(loss):
    for _ in range(3):
        loss.backward(retain_graph=True)


@feature("`retain_graph` and a second backward", "replay")
@pytest.mark.parametrize("backward", [twice, three_times])
def test_second_backward(backward):
    assert_exact(case_of(backward, profiled_backward=backward_from), "replay")


class Apart(nn.Module):
    """Results that share nothing but their input, so a graph for each."""

    def __init__(self, count):
        super().__init__()
        self.sides = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(count))

    def forward(self, x):
        return [side(x).square().mean() for side in self.sides]


def freed_then_retained(losses):
    last, first, second = losses
    last.backward()
    first.backward()
    for _ in range(2):
        second.backward(retain_graph=True)
    second.backward()


@feature("`retain_graph` and a second backward", "replay")
def test_retained_backward_after_one_that_freed_its_part():
    """The first backward replays the region for both graphs, and drops its records."""
    case = Case(
        lambda: nn.ModuleList([Apart(1), Apart(2)]),
        lambda model: [*model[0](X), *model[1](X)],
        ("0", "1"),
        backward=freed_then_retained,
    )
    plan = assert_exact(case, "replay")[0.0]
    recomputed = plan.decisions.query("decision == 'recompute'")
    assert "1" in set(recomputed["region"])


@feature("second backward over a freed graph", cell="refused")
def test_second_backward_without_the_graph(engine):
    """As without a plan: refused, and the first one is unharmed."""
    case = case_of(backward_from)
    plan = plans(case, engine, [0.0])[0.0]
    model = planned(case, plan)
    loss = mean_square(model)
    loss.backward()
    assert_gradients_of_a_step(model, case)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@feature("`retain_graph` and a second backward", "sac", cell="refused where a value is saved")
def test_second_backward_is_refused_under_sac():
    plan = plan_with(case_of(backward_from), "sac", all_but_tanh)
    with pytest.raises(RuntimeError, match="You are only allowed to backward once on any region"):
        run(case_of(twice), plan)


def gradient_penalty(result):
    loss, parameters = result
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in gradients)
    (loss + 0.1 * penalty).backward()
    return penalty


@pytest.mark.filterwarnings("ignore:this step goes backward with create_graph=True")
@feature("double backward (`create_graph`)", "replay")
def test_double_backward():
    """The gradient's graph goes on through what was recomputed."""
    assert_exact(case_of(gradient_penalty, with_parameters, profiled_backward=backward_from), "replay")


@pytest.mark.filterwarnings("ignore:this step goes backward with create_graph=True")
@feature("double backward (`create_graph`)", "sac", cell="refused where a value is saved")
def test_double_backward_is_refused_under_sac():
    plan = plan_with(case_of(backward_from, with_parameters), "sac", all_but_tanh)
    with pytest.raises(RuntimeError, match="You are only allowed to backward once on any region"):
        run(case_of(gradient_penalty, with_parameters), plan)


@pytest.mark.filterwarnings("ignore:this step goes backward with create_graph=True")
def test_gradient_penalty_on_the_input():
    """As critics of GANs are trained."""

    def forward(model):
        x = X.clone().requires_grad_()
        return model(x).mean(), x

    def backward(result):
        loss, x = result
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        ((gradient.norm(2, dim=1) - 1).square().mean() + loss).backward()

    assert_exact(case_of(backward, forward, profiled_backward=backward_from), "replay")


# -- gradients off -----------------------------------------------------------------------------------------------------


@feature("`no_grad` and `inference_mode`")
def test_region_without_gradients(engine):
    """The same module with gradients on and off in one step, as a teacher of itself."""

    def forward(model):
        with torch.no_grad():
            teacher = model(X.flip(0))
        with torch.inference_mode():
            model(X)
        return (model(X) - teacher).square().mean()

    assert_exact(case_of(backward_from, forward), engine)


class SwitchesGradients(nn.Module):
    """A block without gradients inside of it, one with gradients inside of that, and a straight-through estimator."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        y = torch.tanh(self.first(x))
        with torch.no_grad():
            scale = torch.sigmoid(self.second(y)).sin()
            with torch.enable_grad():
                z = torch.sin(self.second(y))
            scale = scale * z.detach().exp()
        rounded = y + (torch.round(y * 8) / 8 - y).detach()
        return torch.sigmoid(z * scale) + torch.cos(rounded)


def test_gradients_switched_inside_a_region(engine):
    assert_exact(
        Case(
            lambda: nn.Sequential(SwitchesGradients(), SwitchesGradients()), mean_square, regions=("0", "1")
        ),
        engine,
    )


def test_evaluation_between_steps(engine):
    """Forwards without backward, and ones that are dropped, between the steps that train."""

    def forward(model):
        model.eval()
        with torch.no_grad():
            model(X)
        model(X)  # with gradients, and dropped
        model.train()
        return mean_square(model)

    assert_exact(case_of(backward_from, forward), engine)


def test_output_dropped_without_backward(engine):
    """Memory goes with the last reference to the output, in whatever order they are dropped."""
    case = case_of(backward_from)
    plan = plans(case, engine, [0.0])[0.0]
    with nothing_leaks():
        model = planned(case, plan)
        middle = model[0](X)
        end = model[1](middle)
        del middle
        del end
    assert_nothing_active()


# -- other people's hooks ----------------------------------------------------------------------------------------------


def test_hooks_on_tensors(engine):
    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            y = torch.tanh(self.linear(x))
            if y.requires_grad:
                y.register_hook(lambda gradient: gradient * 2)
            return torch.sin(y)

    assert_exact(Case(lambda: nn.Sequential(Hooked(), Hooked()), mean_square, regions=("0", "1")), engine)


def test_optimizer_in_backward(engine):
    """Parameters change as soon as their gradients are there, while the rest of backward still runs."""

    def build():
        model = blocks()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_descend)
        return model

    case = Case(build, mean_square, regions=("0", "1"))
    assert not torch.equal(
        run(case)["parameter 0.first.weight of step 0"], case.model().state_dict()["0.first.weight"]
    )
    assert_exact(case, engine)


def _descend(parameter):
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)


def test_saved_tensors_hooks_around_the_step(engine):
    """The user's own, for what the regions leave to autograd."""

    def forward(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda copy: copy):
            return mean_square(model)

    assert_exact(Case(blocks, forward, ("0", "1"), profiled=mean_square), engine)


class Checkpointed(nn.Module):
    """A model that checkpoints a part of itself already."""

    def __init__(self):
        super().__init__()
        self.inner, self.linear, self.checkpointing = Block(), nn.Linear(64, 64), True

    def forward(self, x):
        x = torch.sin(F.gelu(torch.tanh(self.linear(x))))
        if not self.checkpointing:
            return self.inner(x)
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@feature("the user's checkpoint inside a region")
def test_region_around_a_checkpoint_of_the_users_own(engine):
    case = Case(lambda: nn.Sequential(Checkpointed(), Checkpointed()), mean_square, regions=("0", "1"))
    assert_exact(case, engine)


@feature("a region inside the user's checkpoint")
def test_region_inside_a_checkpoint_of_the_users_own(engine):
    """Switched on after planning, as trainers do: the region runs again in backward, and is recorded again."""

    def without_checkpoints(model):
        for layer in model:
            layer.checkpointing = False
        return mean_square(model)

    case = Case(
        lambda: nn.Sequential(Checkpointed(), Checkpointed()),
        mean_square,
        regions=("*.inner",),
        profiled=without_checkpoints,
    )
    assert_exact(case, engine)
