"""A plan made beforehand, and the loop's types: autocast here and there, gradient scaling, bfloat16 throughout.

Gradients are equal to the bit whatever the loop does. The budget holds and the prediction is exact, or autoac says
which line to change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

import autoac
from autoac.measure import measure_peak, unique_storage_bytes
from tests.small_models import Blocks, batch, make

pytestmark = pytest.mark.usefixtures("one_thread")

SHARE = 0.85
"""The budget, of the peak without a plan of the step that is planned for."""

Around = Literal["nothing", "forward", "forward and loss", "forward in a step without", "step", "loop"]
"""What autocast is around; "step" and "loop" have backward in it."""


@dataclass(frozen=True)
class Loop:
    """Training steps of a model.

    Args:
        around: what autocast is around.
        scaler: scales the loss.
    """

    x: torch.Tensor
    around: Around = "nothing"
    dtype: torch.dtype = torch.bfloat16
    scaler: torch.amp.GradScaler | None = None

    def autocast(self, *around: Around) -> Any:
        """Autocast, if it is around one of these; else no context at all, for an outer one keeps casts of weights."""
        return torch.autocast("cpu", self.dtype) if self.around in around else contextlib.nullcontext()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def step(self, model: torch.nn.Module) -> None:
        """One training step."""
        without = torch.autocast("cpu", enabled=False)
        with without if self.around == "forward in a step without" else self.autocast("step"):
            with self.autocast("forward", "forward and loss", "forward in a step without"):
                output = model(self.x)
                loss = None if self.around == "forward" else mean_square(output)
            loss = mean_square(output) if loss is None else loss
            self.scaled(loss).backward()

    def gradients(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Those of `run`."""
        torch.manual_seed(3)
        found = []
        with self.autocast("loop"):
            for _ in range(2):
                self.step(model)
                found += [p.grad for p in model.parameters() if p.grad is not None]
                model.zero_grad(set_to_none=True)
        return found

    def run(self, model: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
        """The gradients of two steps, and the peak of both in bytes, with what is there before them."""
        torch.manual_seed(3)
        gradients, peaks = [], []
        resident = unique_storage_bytes([*model.parameters(), *model.buffers(), self.x])
        with self.autocast("loop"):
            for _ in range(2):
                measured = measure_peak(lambda: self.step(model))
                peaks.append(resident + measured.peak_above_start_bytes)
                found = [p.grad for p in model.parameters() if p.grad is not None]
                resident += measured.end_above_start_bytes - unique_storage_bytes(
                    found
                )  # casts that are kept
                gradients += [gradient.clone() for gradient in found]
                del found
                model.zero_grad(set_to_none=True)
        return gradients, max(peaks)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def model_and_input(dtype: torch.dtype = torch.float32) -> tuple[Blocks, torch.Tensor]:
    return make(blocks=4).train().to(dtype), batch().to(dtype)


def planned(model: Blocks, loop: Loop, sample: Any, **options: Any) -> autoac.Plan:
    """A plan that recomputes, for less than the peak of the loop without one."""
    _, peak = loop.run(copy.deepcopy(model))
    plan = autoac.plan(model, sample, budget=int(SHARE * peak), **options)
    assert any(region.wrapped for region in plan.regions)
    return plan


def trained(model: Blocks, plan: autoac.Plan, loop: Loop) -> tuple[int, list[str]]:
    """The peak under the plan, and what was said. The gradients are held against those without a plan."""
    expected = loop.gradients(copy.deepcopy(model))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan.apply(model)
        gradients, peak = loop.run(model)
    assert len(gradients) == len(expected) == 2 * len(list(model.parameters()))
    assert all(map(torch.equal, gradients, expected))
    return peak, [str(warning.message) for warning in said]


def assert_kept(model: Blocks, plan: autoac.Plan, loop: Loop) -> None:
    """Within the budget, as predicted, and nothing is said."""
    peak, said = trained(model, plan, loop)
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=1e-3)
    assert not plan.is_not_followed
    assert not said


@functools.cache
def planned_for(around: Around, engine: Any) -> autoac.Plan:
    """A plan that was made under the loop's autocast."""
    model, x = model_and_input()
    with torch.autocast("cpu", torch.bfloat16, enabled=around != "nothing"):
        return planned(model, Loop(x, around), x, loss=mean_square, engine=engine)


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("around", ["forward", "forward and loss"])
def test_around_both(around: Around, engine: Any):
    model, x = model_and_input()
    assert_kept(model, planned_for("forward", engine), Loop(x, around))


@pytest.mark.parametrize("around", ["forward", "forward and loss", "step", "loop"])
def test_around_the_loop_only_is_told(around: Around):
    model, x = model_and_input()
    _, said = trained(model, planned_for("nothing", "replay"), Loop(x, around))
    assert len(said) == 1
    assert re.search(
        r"called under autocast .*: with torch\.autocast\(\.\.\.\): plan = autoac\.plan", said[0]
    )


def test_around_the_plan_only_is_told():
    model, x = model_and_input()
    _, said = trained(model, planned_for("forward", "replay"), Loop(x))
    assert len(said) == 1
    assert re.search(r"without autocast, .*: with torch\.autocast\(\.\.\.\): plan = autoac\.plan", said[0])


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("around", ["forward in a step without", "step", "loop"])
def test_backward_inside_autocast_is_told(around: Around, engine: Any):
    """Autocast keeps its casts of weights until it ends."""
    model, x = model_and_input()
    plan = planned_for("forward", engine)
    peak, said = trained(model, plan, Loop(x, around))
    assert peak > 1.01 * plan.predicted_peak_bytes  # or there is nothing to tell
    assert len(said) == 1
    assert re.search(
        r"End autocast before loss\.backward\(\), or .* autoac\.plan\(model, step, \.\.\.\)", said[0]
    )
    plan.remove(model)
    assert not model._forward_hooks


def test_backward_under_autocast_is_planned_as_a_function():
    model, x = model_and_input()
    loop = Loop(x, "step")
    assert_kept(model, planned(model, loop, lambda: loop.step(model)), loop)


# -- gradient scaling --------------------------------------------------------------------------------------------------


def scaling(x: torch.Tensor) -> Loop:
    return Loop(x, "forward and loss", torch.float16, torch.amp.GradScaler("cpu", init_scale=2.0**8))


def test_scaled_loss_is_given_to_the_plan():
    model, x = model_and_input()
    loop = scaling(x)
    with loop.autocast("forward and loss"):
        plan = planned(model, loop, x, loss=lambda output: loop.scaled(mean_square(output)))
    assert_kept(model, plan, loop)


def test_step_with_scaling_is_planned_as_a_function():
    model, x = model_and_input()
    loop = scaling(x)
    assert_kept(model, planned(model, loop, lambda: loop.step(model)), loop)


def test_scaling_that_was_not_planned_for_takes_a_number_more():
    """The scaled loss, beside the loss: the loop's own four bytes."""
    model, x = model_and_input()
    loop = scaling(x)
    with loop.autocast("forward and loss"):
        plan = planned(model, loop, x, loss=mean_square)
    peak, said = trained(model, plan, loop)
    assert 0 <= peak - plan.predicted_peak_bytes <= 4
    assert not said
    assert any("for another loop pass a callable sample" in note for note in plan.record.profile.notes)


# -- bfloat16 throughout -----------------------------------------------------------------------------------------------


@pytest.fixture
def bfloat16_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16_by_default")
def test_default_type():
    model, x = make(blocks=4).train(), torch.ones(64, 16).normal_()
    assert {tensor.dtype for tensor in (*model.parameters(), x)} == {torch.bfloat16}
    loop = Loop(x)
    assert_kept(model, planned(model, loop, x, loss=mean_square), loop)


@pytest.mark.parametrize("around", ["nothing", "forward and loss"])
def test_model_in_bfloat16(around: Around):
    """Autocast has nothing to do then but for the ops that it runs in full precision."""
    model, x = model_and_input(torch.bfloat16)
    loop = Loop(x, around)
    with loop.autocast("forward and loss"):
        plan = planned(model, loop, x, loss=mean_square)
    assert_kept(model, plan, loop)
