"""Loops that hold the model's output until the next one replaces it."""

from types import SimpleNamespace

import torch

import autoac
from autoac.measure import measure_peak
from autoac_solver.records.format import format_bytes

WORDS = "still holds the model's output"


class Model(torch.nn.Module):
    """Its peak is in forward if the loop holds the output: a large part of that is not the loss's."""

    def __init__(self):
        super().__init__()
        blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
        self.layers = torch.nn.Sequential(*blocks)

    def forward(self, x):
        x = self.layers(x)
        with torch.no_grad():
            states = x.repeat(1, 40)
        return SimpleNamespace(loss=x.square().mean(), states=states)


def peaks(model, x, holds: bool) -> list[int]:
    held = []

    def step():
        held[:] = [model(x)]
        held[0].loss.backward()
        model.zero_grad()
        if not holds:
            held.clear()

    found = []
    for _ in range(3):
        start = sum(p.nbytes for p in model.parameters()) + x.nbytes + sum(one.states.nbytes for one in held)
        found.append(start + measure_peak(step, "cpu").peak_above_start_bytes)
    return found


def test_a_note_on_loops_that_hold_the_output():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(256, 64)
    profile = autoac.profile(model, x)
    plan = autoac.solve(profile, budget=profile.least_peak_bytes)
    [note] = [note for note in plan.notes if WORDS in note]
    with plan.applied(model):
        assert max(peaks(model, x, holds=False)) == plan.budget_bytes
        held = max(peaks(model, x, holds=True))
    assert held > plan.budget_bytes
    assert f"takes {format_bytes(held)}," in note

    output = model(x).states.nbytes
    advised = autoac.solve(profile, budget=profile.least_peak_bytes + output, headroom=output)
    assert WORDS not in " ".join(advised.notes)
    with advised.applied(model):
        assert max(peaks(model, x, holds=True)) <= advised.budget_bytes
