"""A loop with accelerate's `Accelerator` under `autoac.auto`: weights to the bit as without, the peak as predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import autoac  # noqa: E402
from autoac.automatic import Auto  # noqa: E402
from tests.integrations.test_transformers import (  # noqa: E402
    ENOUGH,
    assert_same_weights,
    texts,
    tight,
    tiny,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread", "fresh_accelerator"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "accumulation": {"gradient_accumulation_steps": 2},
}


def trained(
    budget: int | None, steps: int = 4, before: bool = False, pass_optimizer: bool = False, **settings: Any
) -> tuple[torch.nn.Module, Auto | None]:
    """The model after a few steps from always the same start, and the handle.

    Args:
        before: `autoac.auto` comes before `prepare`, not after it.
        pass_optimizer: accelerate's optimizer is given to it.
    """
    transformers.set_seed(0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model = tiny().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rounds = settings.get("gradient_accumulation_steps", 1)
    loader = torch.utils.data.DataLoader(texts(4 * rounds * steps), batch_size=4)  # type: ignore[arg-type]
    handle = None
    if budget is not None and before:
        handle = autoac.auto(model, budget, measure=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if budget is not None and not before:
        handle = autoac.auto(model, budget, measure=True, optimizer=optimizer if pass_optimizer else None)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return model, handle


def check(without: torch.nn.Module, budget: int, **options: Any) -> None:
    model, handle = trained(budget, **options)
    assert_same_weights(without, model)
    assert handle is not None
    assert handle.plan is not None
    assert any(region.wrapped for region in handle.plan.regions)
    assert not handle.plan.is_not_followed
    assert handle.measured_peak_bytes is not None
    assert handle.measured_peak_bytes <= budget
    assert handle.measured_peak_bytes == handle.plan.predicted_peak_bytes


@pytest.mark.parametrize("setting", SETTINGS)
def test_trains_as_without_within_the_budget(setting: str):
    without, _ = trained(None, **SETTINGS[setting])
    _, ample = trained(ENOUGH, **SETTINGS[setting])
    assert ample is not None
    assert ample.plan is not None
    assert ample.measured_peak_bytes == ample.plan.predicted_peak_bytes
    check(without, tight(ample.plan), **SETTINGS[setting])


def test_before_prepare_and_with_its_optimizer():
    without, _ = trained(None)
    _, ample = trained(ENOUGH, steps=2)
    assert ample is not None
    budget = tight(ample.plan)
    check(without, budget, before=True)
    check(without, budget, pass_optimizer=True)
