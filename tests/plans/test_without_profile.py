"""A plan's programs are complete: the profile in its file is for explanations, and `apply` does not read it."""

from __future__ import annotations

import ast
import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoac
from autoac.plans import Plan
from autoac_solver.records.names import PART
from tests.small_models import WIDTH, Blocks, assert_same, batch, least_bytes, step

EXECUTE = Path(autoac.__file__).parent / "execute"


class Unread:
    """In place of a profile; reading anything of it fails."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"apply reads {name} of the profile")


def without_profile(plan: Plan) -> Plan:
    return Plan(dataclasses.replace(plan.record, profile=Unread()))


class Flat(nn.Sequential):
    """Its regions are parts of its own call."""

    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))


class Classes(nn.Module):
    """Its cross entropy is lean, and computed over chunks of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.classes = Blocks(), nn.Linear(WIDTH, 16384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.classes(self.blocks(x)), torch.arange(len(x)))


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "replay": (Blocks, "replay"),
    "sac": (Blocks, "sac"),
    "several calls": (lambda: Blocks(rounds=2), "replay"),
    "parts": (Flat, "replay"),
    "loss": (Classes, "replay"),
    "loss, sac": (Classes, "sac"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_apply_reads_no_profile(name: str, mode: Literal["real", "fake"], tmp_path: Path):
    build, engine = CASES[name]
    model = build()
    profile = autoac.profile(model, batch(), loss=lambda output: output.square().mean(), mode=mode)
    autoac.solve(profile, least_bytes(profile, engine), engine=engine).save(tmp_path / "plan.json")
    plan = without_profile(Plan.load(tmp_path / "plan.json"))
    assert any(region.wrapped for region in plan.regions)
    assert plan.record.chunked_losses == isinstance(model, Classes)
    if name == "parts":
        assert all(PART in region.fqn for region in plan.regions)

    planned = plan.apply(copy.deepcopy(model))
    for _ in range(2):  # on fake tensors nothing was compared, so the first step does
        assert_same(step(planned), step(model))
    plan.remove(planned)
    assert_same(step(planned), step(model))
    plan.apply(planned).zero_grad()
    with pytest.warns(UserWarning, match="the model is called with"):
        planned(torch.cat([batch(), batch()]))


def test_nothing_that_carries_out_a_plan_reads_a_profile():
    """Also where the test above does not come, such as compiled regions."""
    read = [
        f"{path.relative_to(EXECUTE)}:{node.lineno}"
        for path in sorted(EXECUTE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "profile"
    ]
    assert not read
