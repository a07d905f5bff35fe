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


def test_gradients_that_are_cleared_late_are_named():
    """By a loop that clears those of the step before when forward is over, as Lightning does."""

    def steps(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            x = torch.ones(4, 512)
            loss = model(x).square().mean() + x.repeat(2000, 1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU())
    autoac.auto(model, 1)
    with pytest.raises(autoac.InfeasibleBudgetError) as caught:
        steps(model)
    (advice,) = (text for text in caught.value.suggestions if "gradients of the step before" in text)
    assert advice.endswith("are there until the loop clears them: do so before forward")


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
