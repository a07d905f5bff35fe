"""Models as people train them, held to the contract: equal to the bit, within the budget, the peak as predicted.

Nothing of autoac's own verification is used here: the step, the ruler and what a step leaves behind are the test's.
"""

import copy
import functools
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import autoac
from autoac.measure import measure_peak, unique_storage_bytes
from autoac.plans import Plan
from autoac_solver.profile import Profile
from tests import real_models
from tests.real_models import RealModel

FRACTIONS = (0.0, 0.25, 0.5, 1.0)
"""Budgets: the way from the least feasible one (0) to the peak with nothing recomputed (1)."""

TOLERANCE = 1e-3
"""Of the predicted peak, against the measured one."""

SEED = 7


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Subject:
    """A model with what all of its tests share."""

    real: RealModel
    profile: Profile
    expected: "Step"


@dataclass(frozen=True)
class Step:
    """What a step takes and leaves behind."""

    peak_bytes: int
    left: dict[str, torch.Tensor | None]

    def differences(self, other: "Step") -> list[str]:
        """Names of what is not equal to the bit."""
        assert self.left.keys() == other.left.keys()
        return [name for name, value in self.left.items() if not same_bits(value, other.left[name])]


@functools.lru_cache(maxsize=1)  # tests come model by model
def subject(name: str) -> Subject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries', about configurations as small as these
        real = real_models.make(name)
        profile = autoac.profile(real.model, real.sample, loss=real.loss)
        return Subject(real, profile, second_step(real, None))


def second_step(real: RealModel, plan: Plan | None) -> Step:
    """A copy of the model takes a step to warm up and another one, which is measured."""
    real = replace(real, model=copy.deepcopy(real.model))
    model = real.model if plan is None else plan.apply(real.model)
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    train(real)
    model.zero_grad(set_to_none=True)
    resident = unique_storage_bytes(real.tensors())
    measured = measure_peak(lambda: train(real))
    left: dict[str, torch.Tensor | None] = {"the loss": measured.result}
    left |= {f"the gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    left |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    left["torch's random state"] = torch.get_rng_state()
    left["numpy's random state"] = torch.from_numpy(np.random.get_state()[1].copy())  # type: ignore[index]
    return Step(resident + measured.peak_above_start_bytes, left)


def train(real: RealModel) -> torch.Tensor:
    """A step as it is profiled: the output is alive until backward is over."""
    output = real.model(**real.sample) if isinstance(real.sample, dict) else real.model(*real.sample)
    loss = real.loss(output)
    loss.backward()
    return loss.detach()


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def least_feasible_bytes(profile: Profile, engine: str) -> int:
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine=engine)
    return caught.value.minimum_bytes


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("name", real_models.ALL)
def test_exact_and_within_the_budget(name: str, engine: str):
    model = subject(name)
    least = least_feasible_bytes(model.profile, engine)
    ample = autoac.solve(model.profile, 10**12, engine=engine).predicted_peak_bytes
    assert least < ample
    faults = []
    for fraction in FRACTIONS:
        budget = least + int(fraction * (ample - least))
        plan = autoac.solve(model.profile, budget, engine=engine)
        step = second_step(model.real, plan)
        case = f"at {fraction} (budget {budget}, predicted {plan.predicted_peak_bytes}, measured {step.peak_bytes})"
        if different := step.differences(model.expected):
            faults.append(f"{case}: {different[0]} and {len(different) - 1} others differ")
        if not plan.predicted_peak_bytes <= budget or not step.peak_bytes <= budget:
            faults.append(f"{case}: over the budget")
        if abs(step.peak_bytes - plan.predicted_peak_bytes) > TOLERANCE * plan.predicted_peak_bytes:
            faults.append(f"{case}: the prediction is off")
        if any(region.wrapped for region in plan.regions) == (fraction == 1.0):
            faults.append(f"{case}: something is recomputed at an ample budget only")
    assert not faults


def test_unplanned_peak_is_predicted():
    """`unplanned_peak_bytes`, which users compare with, is the peak without any plan."""
    for name in ("gpt2", "cnn_with_skips"):
        model = subject(name)
        plan = autoac.solve(model.profile, 10**12)
        assert plan.record.unplanned_peak_bytes == pytest.approx(model.expected.peak_bytes, rel=TOLERANCE)
