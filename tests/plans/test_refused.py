"""Modules that `plan.refused` lists: those that a reader could expect to be regions, and that cannot be."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch import nn

import autoac
from autoac.plans import Plan
from autoac_solver.plan.recorded.programs import with_regions
from tests.small_models import WIDTH, Block, batch, make

pytestmark = pytest.mark.usefixtures("one_thread")

OFF = "it runs with gradients off, so autograd saves nothing in it"
NOT_NEEDED = "backward needs nothing that autograd saves in it"


class Frozen(nn.Module):
    """A frozen encoder without gradients, one that autograd sees, and layers that have nothing to recompute."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).requires_grad_(False)
        self.block = nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.flatten = nn.Flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            encoded = self.encoder(x)
        return self.flatten(self.block(encoded + self.stem(x)))


def test_frozen_modules_are_listed_and_layers_without_effect_are_not():
    plan = autoac.plan(Frozen(), batch(), "100GB", regions=["block"])
    assert plan.refused == {"encoder": OFF, "stem": NOT_NEEDED}
    assert f"no region       'encoder': {OFF}" in plan.explain()
    for name, reason in (*plan.refused.items(), ("flatten", "it runs no op")):
        assert plan.why(name) == f"{name}: is no region: {reason}"


def test_the_regions_say_why_every_other_module_is_none():
    model = Frozen()
    plan = autoac.plan(model, batch(), "100GB", regions=["block"])
    others = plan.regions.others
    assert others.keys() == {name for name, _ in model.named_modules()} - {"block"}
    assert all(plan.why(name) == f"{name or 'the model itself'}: {why}" for name, why in others.items())
    assert plan.regions == plan.record.regions
    assert plan.regions.refused == plan.refused
    assert pickle.loads(pickle.dumps(plan.regions)).others == others
    lines = str(plan.regions).splitlines()
    assert lines[0] == "regions: 1, wrapped: 0"
    assert lines[2].split() == ["block", "3", "0", "left", "untouched"]
    assert lines[3:] == ["No region at any budget:", f"'encoder': {OFF}", f"'stem': {NOT_NEEDED}"]
    assert OFF in plan.regions._repr_html_()


def test_calls_that_are_treated_alike_share_a_line():
    plan = autoac.plan(make(rounds=6), batch(), "100GB", regions=["blocks.*"])
    alike = (
        "blocks.0, blocks.0#1, blocks.0#2, blocks.0#3 and 2 more: is a region in which nothing is recomputed"
    )
    assert plan.why("blocks.0").startswith(alike)
    assert "\n" not in plan.why("blocks.0")
    inside = "lies in region 'blocks.0', whose values are decided on one by one"
    assert plan.regions.others["blocks.0.up"] == inside


def test_the_regions_say_why_values_must_be_saved():
    policy = autoac.Policy("MUST_SAVE", op="aten.gelu*")
    plan = autoac.plan(Frozen(), batch(), "100GB", regions=["block"], policies=[policy])
    [value] = plan.regions.must_save.itertuples(index=False)
    assert (value.region, value.op, value.reason) == ("block", "aten.gelu.default", "a policy says so")
    assert str(plan.regions).splitlines()[-2:] == ["Must be saved:", "1 values: a policy says so"]
    assert "a policy says so" in plan.regions._repr_html_()
    changed = dataclasses.replace(plan.record.regions[0], wrapped=True)
    other = Plan(with_regions(plan.record, [changed]))
    assert "Must be saved" not in str(other.regions)
    assert "a policy says so" not in other.regions._repr_html_()
    with pytest.raises(autoac.ProfileError):
        _ = other.regions.must_save


class Twice(nn.Module):
    """A teacher's pass without gradients through a module that is trained as well."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(0.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.block(x)
        return self.head(self.block(x)) - target


def test_a_module_that_runs_with_gradients_as_well_is_not_listed():
    assert autoac.plan(Twice(), batch(), "100GB", regions=["head"]).refused == {}
    assert autoac.plan(Twice(), batch(), "100GB", regions=["block"]).refused == {}


def test_what_surrounds_a_region_is_not_listed():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Block(0.0), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return self.head(self.inner(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = Around()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.outer(x)

    assert autoac.plan(Model(), batch(), "100GB", regions=["outer.inner"]).refused == {}
