"""What no profile has seen come out again as in forward is compared in the first planned step: right, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac.plans import Plan
from tests.execute.exact.harness import differences
from tests.silent.test_opaque import noisy

X = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)
NUMBERS = np.random.default_rng(0)
"""A generator that neither torch nor a plan knows."""
ENGINES = pytest.mark.parametrize("engine", ["replay", "sac"])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.second(torch.tanh(self.inner(torch.tanh(self.first(x))))))


class Plain(Layers):
    """Writes in place, statistics and random numbers: nothing of that is a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))
        self.register_buffer("variance", torch.ones(64))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(len(x), 128)
        wide[:, :64] = x * 2
        wide[:, 64:].copy_(x)
        wide = torch.relu_(wide + 0.5)
        hidden = F.dropout(wide[:, :64] + wide[:, 64:], 0.3)
        hidden += 1
        return F.batch_norm(hidden, self.mean, self.variance, training=True)  # type: ignore[arg-type]


class _Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        if type(out) is torch.Tensor:  # a fake one has no memory
            np.cos(x.numpy(), out=out.numpy())
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        return -gradients[0] * x.sin()


class Foreign(Layers):
    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return _Cosine.apply(x)


class Adding(Layers):
    """What it writes anew is right, what it adds to is not: engine sac must not run it on what was saved."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if type(x.detach()) is torch.Tensor:
            x.detach().numpy()[...] += np.float32(0.25)
        return x


class Late(Layers):
    """Writes at the end of its forward what autograd has saved: a second run stops before that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = torch.sin(self.second(torch.tanh(hidden)))
        if type(hidden.detach()) is torch.Tensor:
            hidden.detach().numpy()[...] *= np.float32(0.5)
        return out


class Noisy(Layers):
    """Draws from a generator that torch does not know: torch's checkpoint cannot set it back either."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return hidden_noise(x)


@torch.library.custom_op("autoac_silent::hidden_noise", mutates_args=())
def hidden_noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(NUMBERS.random(x.shape, np.float32))


@hidden_noise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


hidden_noise.register_autograd(lambda ctx, grad: grad)


class Masked(Layers):
    """Random numbers that nothing sets back, in a tensor that no op has made."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(NUMBERS.random(x.shape, np.float32))


REGIONS = ("0", "1")


def planned(kind: type[Layers], engine: str, saved: str = "") -> tuple[nn.Module, Plan]:
    """A model, and its plan for the least budget; `saved` is an op whose results it must save."""
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind())
    profile = autoac.profile(model, X, mode="fake")
    policies = [autoac.Policy("MUST_SAVE", op=saved)] if saved else []
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.solve(profile, 1000, engine=engine, policies=policies, regions=REGIONS)
    plan = autoac.solve(profile, least.value.minimum_bytes, engine=engine, policies=policies, regions=REGIONS)
    assert any(region.wrapped for region in plan.regions)
    return model, plan


def step(model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(X).square().mean()
    loss.backward()
    left = {"loss": loss.detach(), "state": torch.get_rng_state()}
    left |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
    return left | {name: buffer.clone() for name, buffer in model.named_buffers()}


def unchecked(model: nn.Module) -> int:
    """How many regions are still to be compared."""
    from autoac.step.carried import planned as carried

    regions = [carried(module) for module in model.modules()]
    return sum(program.unchecked for region in regions for program in getattr(region, "programs", ()))


@ENGINES
@pytest.mark.parametrize("saved", ["", "aten.tanh.default"])
def test_a_step_that_is_right_is_looked_at_once(engine: str, saved: str):
    model, plan = planned(Plain, engine, saved)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = step(model)
    model.load_state_dict(state)
    plan.apply(model)
    with torch.no_grad():
        model(X)
    model.load_state_dict(state)
    assert unchecked(model) == sum(region.wrapped for region in plan.regions)
    assert not differences(step(model), expected)
    if engine == "sac":  # whose second run is not over before autograd has all that it saved
        model.load_state_dict(state)
        assert not differences(step(model), expected)
    assert unchecked(model) == 0


def test_replay_does_not_look_again_at_what_a_real_profile_has_seen():
    model = nn.Sequential(Plain(), Plain())
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.plan(model, X, 1000, engine="replay")
    plan = autoac.plan(model, X, least.value.minimum_bytes, engine="replay")
    assert any(region.wrapped for region in plan.regions)
    assert unchecked(plan.apply(model)) == 0


@pytest.mark.parametrize(
    ("kind", "engine", "saved", "op"),
    [
        (Foreign, "replay", "", "aten.zeros_like.default"),
        (Adding, "replay", "", "aten.tanh.default"),
        (Late, "replay", "", "aten.tanh.default"),
        (Late, "sac", "", "aten.tanh.default"),
        (Noisy, "replay", "", "autoac_silent.hidden_noise.default"),
        (Adding, "sac", "aten.tanh.default", "aten.tanh.default"),
        (Noisy, "sac", "", "autoac_silent.hidden_noise.default"),
        (Masked, "sac", "", "a tensor that no op has made"),
    ],
)
def test_a_step_that_would_be_wrong_is_refused(kind: type[Layers], engine: str, saved: str, op: str):
    model, plan = planned(kind, engine, saved)
    plan.apply(model)
    # Where the process has other threads, sac compares what random ops draw first.
    drawn = f"{op} in region .* must draw its random numbers again for backward, and drew others"
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=f"{op} (gave|left|held) other bits .*when .* a second time|{drawn}"
        ):
            step(model)
    plan.remove(model)
    if kind not in (Noisy, Masked):  # their numbers are others in each step
        report = plan.verify(model, X)
        assert not report.equal


def test_what_the_error_says_helps():
    model, plan = planned(Foreign, "replay")
    expected = step(model)
    with pytest.raises(RuntimeError) as error:
        step(plan.apply(model))
    assert "policies=[autoac.Policy(\"MUST_SAVE\", op='aten.zeros_like.default', module=" in str(error.value)
    policies = [autoac.Policy("MUST_SAVE", op="aten.zeros_like.default", module=name) for name in "01"]
    plan.remove(model)
    mended = autoac.solve(plan.record.profile, plan.budget_bytes + 10**6, engine="replay", policies=policies)
    assert not differences(step(mended.apply(model)), expected)


def test_sac_looks_though_its_profile_was_real():
    """What was compared then is what an op makes again, and not what code between ops does."""
    model = nn.Sequential(Masked(), Masked())
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        autoac.plan(model, X, 1000, engine="sac")
    plan = autoac.plan(model, X, least.value.minimum_bytes, engine="sac")
    with pytest.raises(RuntimeError, match="a tensor that no op has made held other bits"):
        step(plan.apply(model))


def test_a_drawing_op_that_torch_can_set_back():
    class SetBack(Layers):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return noisy(x)

    model, plan = planned(SetBack, "replay")
    expected = step(model)
    assert not differences(step(plan.apply(model)), expected)
