"""Hold a training step with a plan to the contract: equal to the bit, within the budget, the peak as predicted.

Nothing of autoac's own verification is used here: the steps, the ruler and what a step leaves behind are the tests'.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import autoac
from autoac.measure import measure_peak, unique_storage_bytes
from autoac.plans import Plan
from autoac_solver.records.profile import VARYING, Profile
from tests.real_models import RealModel

TOLERANCE = 1e-3
"""Of the predicted peak, against the measured one."""

ANOTHER, PROFILED = 8, 7
"""Seeds of a first step, which also warms up, and of a second one, which draws what the profiled step drew: where
layers are dropped at random, another step takes another path and other memory."""


@dataclass(frozen=True)
class Subject:
    """A model with what all checks of it share."""

    real: RealModel
    profile: Profile
    expected: Steps


@dataclass(frozen=True)
class Steps:
    """What two steps leave behind, and what the second one takes."""

    peak_bytes: int
    left: dict[str, torch.Tensor | None]

    def differences(self, other: Steps) -> list[str]:
        """Names of what is not equal to the bit."""
        if self.left.keys() != other.left.keys():
            return sorted(self.left.keys() ^ other.left.keys())
        return [name for name, value in self.left.items() if not same_bits(value, other.left[name])]


def subject(real: RealModel) -> Subject:
    """The model with its profile, and what its steps do without a plan."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries', about configurations as small as these
        seed(PROFILED)
        profile = autoac.profile(real.model, real.sample, loss=real.loss)
        return Subject(real, profile, two_steps(real, None))


def faults(
    model: Subject,
    engine: str,
    fractions: Sequence[float],
) -> list[str]:
    """What breaks the contract, in words.

    Args:
        fractions: budgets, as the way from the least feasible one (0) to the peak with nothing recomputed (1).
    """
    least = least_feasible_bytes(model.profile, engine)
    ample = autoac.solve(model.profile, 10**12, engine=engine).predicted_peak_bytes
    if least >= ample:
        return [f"no plan saves anything: {least} bytes, {ample} with nothing recomputed"]
    found = []
    for fraction in fractions:
        budget = least + int(fraction * (ample - least))
        plan = autoac.solve(model.profile, budget, engine=engine)
        try:
            steps = two_steps(model.real, plan)
        except RuntimeError as error:
            found.append(f"{engine} at {fraction} (budget {budget}): {error!s:.200}")
            continue
        peaks = f"budget {budget}, predicted {plan.predicted_peak_bytes}, measured {steps.peak_bytes}"
        case = f"{engine} at {fraction} ({peaks})"
        if different := steps.differences(model.expected):
            found.append(f"{case}: {different[0]} and {len(different) - 1} others differ")
        if not plan.predicted_peak_bytes <= budget or not steps.peak_bytes <= budget:
            found.append(f"{case}: over the budget")
        off = steps.peak_bytes - plan.predicted_peak_bytes
        # A step that varies is planned for with all of its layers called, which these two may not do.
        lower = off < 0 and VARYING in model.profile.facts
        if abs(off) > TOLERANCE * plan.predicted_peak_bytes and not lower:
            found.append(f"{case}: the prediction is off")
        if any(region.wrapped for region in plan.regions) == (fraction == 1.0):
            found.append(f"{case}: something is recomputed at an ample budget only")
    return found


def least_feasible_bytes(profile: Profile, engine: str) -> int:
    """The least budget that any plan keeps."""
    try:
        return autoac.solve(profile, 1, engine=engine).predicted_peak_bytes
    except autoac.InfeasibleBudgetError as error:
        return error.minimum_bytes


def two_steps(real: RealModel, plan: Plan | None) -> Steps:
    """A copy of the model takes two steps, of which the second is measured."""
    real = replace(real, model=_copied(real.model))
    model = real.model if plan is None else plan.apply(real.model)
    seed(ANOTHER)
    left = _left("the first step's", model, train(real))
    left = {name: None if value is None else value.clone() for name, value in left.items()}
    model.zero_grad(set_to_none=True)
    resident = unique_storage_bytes([*real.tensors(), *_of_last_step(model)])
    seed(PROFILED)
    measured = measure_peak(lambda: train(real))
    left |= _left("the second step's", model, measured.result)
    return Steps(resident + measured.peak_above_start_bytes, left)


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """A copy, also of a model that keeps something of its last step: torch copies leaves only."""
    return copy.deepcopy(model, {id(kept): kept.detach().clone() for kept in _of_last_step(model)})


def _of_last_step(model: torch.nn.Module) -> list[torch.Tensor]:
    """What modules have put into their attributes, such as a recurrent state."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return [value for value in values if isinstance(value, torch.Tensor) and not value.is_leaf]


def _left(whose: str, model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    left: dict[str, torch.Tensor | None] = {f"{whose} loss": loss}
    left |= {f"{whose} gradient of {name}": p.grad for name, p in model.named_parameters()}
    left |= {f"{whose} buffer {name}": buffer for name, buffer in model.named_buffers()}
    left[f"{whose} random state of torch"] = torch.get_rng_state()
    left[f"{whose} random state of numpy"] = torch.from_numpy(np.random.get_state()[1].copy())  # type: ignore[index]
    left[f"{whose} random state of Python"] = torch.tensor(random.getstate()[1], dtype=torch.int64)
    return left


def seed(number: int) -> None:
    """Seed torch's, numpy's and Python's random numbers."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def train(real: RealModel) -> torch.Tensor:
    """A step as it is profiled: the output is alive until backward is over."""
    output: Any = real.model(**real.sample) if isinstance(real.sample, dict) else real.model(*real.sample)
    loss = real.loss(output)
    loss.backward()
    return loss.detach()


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
