"""What makes no sense to `autoac.plan` and its kin is said in a sentence, before the model is run."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import autoac
from autoac.api.choosing import engine_for
from autoac.step.modules import select_modules
from autoac_solver.records.errors import PolicyError, ProfilingError
from tests.small_models import Blocks, batch, make

MODEL = make()


def not_run() -> Blocks:
    """A model that must not be run."""
    model = make()
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    return model


REGIONS = [
    (5, ValueError, "regions is a int; it takes names or globs of modules (\"layers.*\"), several of these, or a "
     "predicate (fqn, module) -> bool. A module's name is what model.named_modules() calls it."),
    ([3], ValueError, "regions holds a int; it takes"),
    (MODEL.blocks[0], ValueError, "regions is a Block; it takes names or globs"),
    (nn.Sequential(nn.ReLU()), ValueError, "regions is a Sequential; it takes"),
    ([MODEL.blocks[0]], ValueError, "regions holds a Block; it takes"),
    ("nope.*", ProfilingError, "regions='nope.*' matches no module. Modules of this model are: 'blocks', "),
    (["blocks.0", "blocks.0.up"], ProfilingError, "region 'blocks.0.up' is inside region 'blocks.0': choose one"),
    (["blocks.0.*", "blocks.*"], ProfilingError, "region 'blocks.0.norm' is inside region 'blocks.0': choose one"),
    (["blocks", "head"], ProfilingError, "regions='blocks' chooses no module that is called"),
]  # fmt: skip

POLICIES = [
    (None, "policies= is a NoneType; it takes autoac.Policy objects"),
    ("MUST_SAVE", "policies= is a str; it takes"),
    ([3], "policies= holds a int; it takes"),
    (autoac.Policy("MUST_SAVE", module="layers.*"), '"layers.*") is about no module of this model. Modules are: '),
]  # fmt: skip


@pytest.mark.parametrize(("regions", "kind", "text"), REGIONS)
def test_regions_that_are_none(regions: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        autoac.plan(not_run(), batch(), "1GB", regions=regions)


@pytest.mark.parametrize(("policies", "text"), POLICIES)
def test_policies_that_are_none(policies: Any, text: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(text)):
        autoac.plan(not_run(), batch(), "1GB", policies=policies)


@pytest.mark.parametrize(
    "options", [{"time_limit_s": None}, {"gap": "x"}, {"gap": -1}, {"time_limit_s": math.nan}]
)
def test_what_is_no_limit_for_the_solver(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="it takes a number of at least 0"):
        autoac.plan(not_run(), batch(), "1GB", **options)


def test_optional_policies_and_ones_that_are_handed_over_once() -> None:
    policies = iter([autoac.Policy("MUST_SAVE", module="layers.*", optional=True),
                     autoac.Policy("MUST_SAVE", module="blocks.*.up")])  # fmt: skip
    plan = autoac.plan(make(), batch(), "1GB", policies=policies)
    assert [applied.values for applied in plan.record.policies] == [0, 3]


def test_a_glob_may_find_modules_that_the_step_does_not_call() -> None:
    model = make()
    model.blocks.append(nn.Linear(1, 1))  # type: ignore[attr-defined]
    model.forward = lambda x: model.head(model.blocks[1](model.blocks[0](x)))  # type: ignore[method-assign]
    plan = autoac.plan(model, batch(), "1GB", regions="blocks.*")
    assert [region.name for region in plan.regions] == ["blocks.0", "blocks.1"]
    with pytest.raises(
        ProfilingError, match=r"'blocks\.3' matches no module. Modules of the profiled step are"
    ):
        autoac.plan(model, batch(), "1GB", regions="blocks.3")


def test_predicates_may_find_modules_that_are_never_called() -> None:
    assert select_modules(make(), lambda name, _: name in ("blocks", "head")) == ["head"]


def test_solve_and_tradeoff_take_globs_and_one_budget() -> None:
    profile = autoac.profile(make(), batch())
    names = ["blocks.0", "blocks.1", "blocks.2"]
    assert [region.name for region in autoac.solve(profile, "1GB", regions=["blocks.*"]).regions] == names
    curve = autoac.tradeoff(profile, "1GB", regions="blocks.*")
    assert [region.name for region in curve.plans[0].regions] == names
    with pytest.raises(PolicyError, match="policies= is a NoneType"):
        autoac.solve(profile, "1GB", policies=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (MODEL, "make(4) returned a Blocks; make must return (model, sample) or (model, sample, loss)."),
        ((MODEL,), "make(4) returned a tuple of 1; make must return"),
        (torch.zeros(2, 2), "make(4) returned a Tensor; make must return"),
    ],
)
def test_what_make_must_return(made: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        autoac.batch_tradeoff(lambda _: made, "4MB", [4])


def test_a_loop_takes_sac_for_a_model_that_is_compiled_or_holds_one():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    compiled: Any = torch.compile(layers)
    held = nn.ModuleDict({"net": compiled})  # as a LightningModule does
    assert engine_for(held, "auto") == engine_for(compiled, "auto")
    assert engine_for(held, "auto") == ("sac", "auto: the model is compiled")
    assert engine_for(layers, "auto") == ("replay", "auto: eager mode")
    layers[0].compile()  # half of it is not most of it
    assert engine_for(layers, "auto") == ("replay", "auto: eager mode")
