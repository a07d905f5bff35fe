"""`autoac.auto` where several optimizers' steps belong together, as in GANs: all of them keep to the budget."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.automatic import Auto
from autoac.automatic.cycle import Cycle
from autoac_solver.plan.planning import least_budget_bytes
from tests.small_models import BATCH, WIDTH, make

pytestmark = pytest.mark.usefixtures("one_thread")

ENOUGH = 10**9
LOOPS = {
    "alternating": {},
    "two steps of the critic, all cleared": {"critics": 2, "clearing": True},
    "the other is frozen": {"freezing": True},
}


class Adversarial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = make(blocks=2), make(blocks=3)

    def forward(self, real: torch.Tensor, noise: torch.Tensor, trains_critic: bool) -> torch.Tensor:
        made = self.generator(noise)
        if trains_critic:
            return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made.detach())).mean()
        return F.softplus(-self.critic(made)).mean()


def trained(
    budget: int | None, critics: int = 1, freezing: bool = False, clearing: bool = False, steps: int = 5
) -> tuple[Adversarial, Auto | None]:
    torch.manual_seed(0)
    model = Adversarial().train()
    optimizers = {
        True: torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.9),
        False: torch.optim.Adam(model.generator.parameters()),
    }
    handle = None if budget is None else autoac.auto(model, budget, measure=True)
    for _ in range(steps):
        for trains_critic in (True,) * critics + (False,):
            real, noise = torch.randn(2, BATCH, WIDTH)
            if freezing:
                model.critic.requires_grad_(trains_critic)
                model.generator.requires_grad_(not trains_critic)
            (model if clearing else optimizers[trains_critic]).zero_grad()
            model(real, noise, trains_critic).backward()
            optimizers[trains_critic].step()
    return model, handle


def assert_trained_as(without: nn.Module, model: nn.Module, handle: Auto | None) -> autoac.Plan:
    """The same weights, under a plan that recomputes and is followed; returns it."""
    for name, value in model.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]), name
    assert handle is not None
    assert handle.plan is not None
    assert any(region.wrapped for region in handle.plan.regions)
    assert not handle.plan.is_not_followed
    return handle.plan


@pytest.mark.parametrize("loop", LOOPS)
def test_all_steps_are_planned_for_as_one(loop: str):
    without, _ = trained(None, **LOOPS[loop])
    _, ample = trained(ENOUGH, **LOOPS[loop], steps=4)
    assert ample is not None
    assert ample.plan is not None
    profile = ample.plan.record.profile
    assert sum(call.fqn == "" for call in profile.calls) == LOOPS[loop].get("critics", 1) + 1
    least = least_budget_bytes(profile)
    budget = int(least + 0.3 * (ample.plan.record.unplanned_peak_bytes - least))
    model, handle = trained(budget, **LOOPS[loop])
    plan = assert_trained_as(without, model, handle)
    assert handle is not None
    assert handle.measured_peak_bytes == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert plan.predicted_peak_bytes <= budget
    handle.remove()


def test_a_warm_up_of_one_optimizer_does_not_end_in_an_error():
    """A budget that was right for its steps: those of both take more under any plan, and training goes on."""

    def warmed_up(budget: int) -> Auto:
        torch.manual_seed(0)
        model = Adversarial().train()
        critic = torch.optim.SGD(model.critic.parameters(), lr=0.1)
        generator = torch.optim.Adam(model.generator.parameters())
        handle = autoac.auto(model, budget)
        for step in range(34):
            real, noise = torch.randn(2, BATCH, WIDTH)
            for optimizer in (critic,) if step < 26 else (critic, generator):
                optimizer.zero_grad()
                model(real, noise, optimizer is critic).backward()
                optimizer.step()
            if step == 4 and budget == ENOUGH:
                break
        return handle

    ample = warmed_up(ENOUGH)
    assert ample.plan is not None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle = warmed_up(least_budget_bytes(ample.plan.record.profile, "replay"))
    assert handle.plan is not None
    assert handle.plan.budget_bytes > least_budget_bytes(ample.plan.record.profile, "replay")
    assert [str(one.message).partition(" unlike")[0] for one in told] == ["a step of this loop"]


class Parts(nn.Module):
    """Called for one of its parts at a time, with batches of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = make(blocks=2), make(blocks=3)

    def forward(self, noise: torch.Tensor | None = None, x: torch.Tensor | None = None) -> torch.Tensor:
        return self.generator(noise).repeat(2, 1) if x is None else self.critic(x)


def trained_by_parts(budget: int | None, steps: int = 6) -> tuple[Parts, Auto | None]:
    torch.manual_seed(0)
    model = Parts().train()
    for_critic = torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.9)
    for_generator = torch.optim.Adam(model.generator.parameters())
    handle = None if budget is None else autoac.auto(model, budget, measure=True)
    for _ in range(steps):
        made = model(noise=torch.randn(BATCH, WIDTH)).detach()  # nothing goes backward from this call
        loss = model(x=made).mean() - model(x=torch.randn(2 * BATCH, WIDTH)).mean()
        for_critic.zero_grad()
        loss.backward()
        for_critic.step()
        loss = -model(x=model(noise=torch.randn(BATCH, WIDTH))).mean()
        for_generator.zero_grad()
        loss.backward()
        for_generator.step()
    return model, handle


def test_a_call_whose_output_is_detached_shifts_no_decisions():
    """The recorded step begins after it; the plan's calls were taken for those before, and warned of as too large."""
    without, _ = trained_by_parts(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*in the recorded step it had.*")
        _, ample = trained_by_parts(ENOUGH)
        assert ample is not None
        assert ample.plan is not None
        profile = ample.plan.record.profile
        assert profile.call_elements == tuple(n * BATCH * WIDTH for n in (2, 2, 1, 2))
        least = least_budget_bytes(profile)
        budget = int(least + 0.3 * (ample.plan.record.unplanned_peak_bytes - least))
        model, handle = trained_by_parts(budget)
    assert_trained_as(without, model, handle)
    assert handle is not None
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    handle.remove()


class Named:
    """In place of an optimizer."""


def begins(cycle: Cycle, optimizers: str, each_has_its_own: bool = False) -> list[int]:
    """The numbers of the optimizers' steps before which a step of the loop begins.

    Args:
        each_has_its_own: other parameters are trained where another optimizer steps.
    """
    known = {name: Named() for name in set(optimizers)}
    found = []
    for number, name in enumerate(optimizers):
        if cycle.may_begin():
            cycle.begins()
            found.append(number)
        cycle.has_stepped = False
        cycle.count(known[name], name if each_has_its_own else "")
    return found


def a_cycle() -> Cycle:
    """Of a model that has gradients all the time."""
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1)).backward()
    return Cycle(model)


def test_where_steps_begin():
    assert begins(a_cycle(), "aaaa") == [0, 1, 2, 3]
    assert begins(a_cycle(), "abababab") == [0, 1, 2, 4, 6]
    assert begins(a_cycle(), "aaabaaabaaab") == [0, 1, 2, 3, 4, 8]


def test_another_optimizer_from_then_on_ends_each_step():
    assert begins(a_cycle(), "aabbb") == [0, 1, 2, 3, 4]


def test_phases_of_training():
    assert begins(a_cycle(), "aaabbbaaabbb", each_has_its_own=True) == list(range(12))
    assert begins(a_cycle(), "aaabbbaaabbb") == [0, 1, 2, 3, 4, 5, 6, 10, 11]
    gan = "aaabaaabaaab", "aaabbaaabb"
    assert begins(a_cycle(), gan[0], each_has_its_own=True) == [0, 1, 2, 3, 4, 8]
    assert begins(a_cycle(), gan[1], each_has_its_own=True) == begins(a_cycle(), gan[1])


def test_too_many_steps_are_not_taken_as_one():
    cycle = a_cycle()
    assert begins(cycle, "ab" + "a" * 20) == [0, 1, 2, *range(15, 22)]
    assert cycle.is_too_long
    assert cycle.is_one
