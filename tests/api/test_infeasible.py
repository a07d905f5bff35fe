"""What an infeasible budget's error advises."""

import pytest
import torch
from torch import nn

import autoac
from autoac_solver.plan.recorded import report


def suggestions(model: nn.Module, engine: str = "sac") -> tuple[str, ...]:
    profile = autoac.profile(model, torch.randn(64, 16))
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        autoac.solve(profile, 1, engine=engine)
    return tuple(caught.value.suggestions)


@pytest.mark.parametrize(
    ("is_compiled", "advice"), [(False, "compute it in chunks"), (True, "engine='replay'")]
)
def test_what_an_op_or_compiled_code_takes_has_other_remedies(is_compiled: bool, advice: str):
    holders = [("Temp", "", 900), ("Parameter", "", 100)]
    assert advice in report.suggestions(holders, False, is_compiled=is_compiled)[-1]


def test_what_the_optimizer_takes_has_its_own_remedy():
    holders = [("Temp", "", 900), ("Parameter", "", 100)]
    (advice,) = report.suggestions(holders, False, "optimizer.step, after backward", is_compiled=True)
    assert "fused=True, or foreach=False" in advice


def test_layers_side_by_side_are_to_be_grouped():
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
    flat = nn.Sequential(*(layer for group in layers for layer in group))
    (advice,) = (text for text in suggestions(flat) if "side by side" in text)
    assert advice.startswith("the model is a Sequential of 12 layers side by side")
    assert not any("side by side" in text for text in suggestions(nn.Sequential(*layers)))
    assert not any(
        "side by side" in text for text in suggestions(flat, "replay")
    )  # which has parts as regions
    (advice,) = (text for text in suggestions(nn.Sequential(flat)) if "side by side" in text)
    assert advice.startswith("'0' is a Sequential of 12 layers")
