"""Code that torch does not see overwrites a value after its last reader in forward: backward must still see that."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

import autoac
from tests.execute.exact.harness import Case, assert_exact, decisions
from tests.silent.test_first_step import hidden_noise

X = torch.linspace(-1, 1, 64 * 64).reshape(64, 64)
ENGINES = pytest.mark.parametrize("engine", ["replay", "sac"])


def halve(tensor: torch.Tensor) -> None:
    if type(tensor.detach()) is torch.Tensor:  # a fake one has no memory
        tensor.detach().numpy()[...] *= np.float32(0.5)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(64, 64), nn.Linear(64, 64), nn.Tanh()

    def rest(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.tanh(self.second(torch.sin(torch.tanh(x)))))


class AtTheEnd(Layers):
    """Autograd has saved the value, and nothing reads it after the write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.rest(hidden.sum(-1, keepdim=True) * x)
        halve(hidden)
        return out


class OfAChild(Layers):
    """The value is one that a child has saved and returned; the write is the parent's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(x))
        out = self.rest(hidden)
        halve(hidden)
        return out


class ReadUnsaved(Layers):
    """Autograd has not saved the value, but what was computed from it would be computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        out = self.rest(hidden * 0.5 + 1.0)
        halve(hidden)
        return out


class Large(OfAChild):
    """Not recorded lean, for it holds a module with modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1))


KINDS = pytest.mark.parametrize("kind", [AtTheEnd, OfAChild, ReadUnsaved, Large])


class Filled(Layers):
    """The write comes before any reader, into what an op has made and what autograd has saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.first(x))
        halve(hidden)
        return self.rest(hidden)


class Twice(Layers):
    """Written before it is read, and once more afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(x)
        halve(hidden.add_(1.0))
        out = self.rest(hidden * self.first(x))
        halve(hidden)
        return out


def case_of(kind: type[Layers]) -> Case:
    return Case(
        lambda: nn.Sequential(kind(), kind()), lambda model: model(X).square().mean(), regions=("0", "1")
    )


@ENGINES
@KINDS
def test_profiling_finds_it(kind: type[Layers], engine: str):
    case = case_of(kind)
    profile = case.profile()
    overwritten = "aten.addmm.default" if kind is ReadUnsaved else "aten.tanh.default"
    assert [note for note in profile.notes if note.startswith(overwritten) and "is overwritten by" in note]
    assert [note for note in profile.notes if "has read what is overwritten afterwards" in note]
    if engine == "sac":  # whose second run would write once more
        assert "a second time" in autoac.solve(profile, 10**12, engine="sac", regions=["0", "1"]).why("0")
        return
    made = assert_exact(case, engine, (0.0, 0.5))
    assert any(decisions(made[0.0], "aten.sin.default"))


def trained(case: Case, budget: int | None, engine: str) -> list[torch.Tensor]:
    """The gradients of three steps of a loop, under `autoac.auto` for a budget."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = None if budget is None else autoac.auto(model, budget, engine=engine)
    found: list[torch.Tensor] = []
    try:
        for _ in range(3):
            optimizer.zero_grad()
            case.forward(model).backward()
            found.extend(parameter.grad.clone() for parameter in model.parameters())
            optimizer.step()
    finally:
        if handle is not None:
            handle.remove()
    return found


@ENGINES
@pytest.mark.parametrize("kind", [AtTheEnd, OfAChild, ReadUnsaved, Large, Filled, Twice])
def test_the_steps_of_a_loop_are_right(kind: type[Layers], engine: str):
    """The recorded one, too, which keeps the value though it recomputes all others."""
    case = case_of(kind)
    with pytest.raises(autoac.InfeasibleBudgetError) as least:
        trained(case, 1000, engine)
    found = trained(case, least.value.minimum_bytes, engine)
    assert all(map(torch.equal, found, trained(case, None, engine)))


class Stateful(Layers):
    """An op of a library that draws random numbers which nothing sets back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(hidden_noise(self.first(x)))


class BetweenParts(Layers):
    """Overwritten is what a part has read that is recomputed while a step is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Tanh())
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(64, 64)) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.cos(self.first(x))
        out = self.part(hidden)
        halve(hidden)
        for part in self.parts:
            out = part(out)
        return out


@pytest.mark.parametrize(
    ("kind", "op"),
    [(Stateful, "hidden_noise.default in '1'"), (BetweenParts, "aten.addmm.default in '1.part.0'")],
)
def test_a_recorded_step_that_would_be_wrong_is_refused(kind: type[Layers], op: str):
    with pytest.raises(RuntimeError, match=rf"{op} gave other bits .* autoac\.plan"):
        trained(case_of(kind), 10**9, "replay")


def test_what_is_compared_later_takes_no_memory():
    """A value that nothing holds any more is gone when the next op has run."""
    alive: list[bool] = []

    class Dropping(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x))
            storage = weakref.ref(hidden.untyped_storage())
            out = hidden + 1.0
            del hidden
            out = self.rest(out * 2.0)
            alive.append(storage() is not None)
            return out

    case_of(Dropping).profile()
    with pytest.raises(autoac.InfeasibleBudgetError):
        trained(case_of(Dropping), 1000, "replay")
    assert alive.count(False) == 2 * 3
    assert alive.count(True) == 0
