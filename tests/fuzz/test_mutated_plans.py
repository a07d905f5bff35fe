"""A plan that was changed behind our back trains right, or not at all."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import autoac
from autoac.plans import Plan
from autoac_solver.records.errors import AutoacError, ProfileError
from tests.execute.exact.harness import assert_nothing_active, differences
from tests.fuzz.check import ENGINES, plans_for, reference, step, with_given_times
from tests.fuzz.models import ModelSpec, build, loss_of, sample_of
from tests.fuzz.mutations import mutated
from tests.fuzz.run import run_examples

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated"),
    pytest.mark.filterwarnings("ignore:the plan is not followed"),
]

MODELS, MUTATIONS = 40, 12


def check_mutations(spec: ModelSpec, tally: Counter[str], folder: Path) -> None:
    expected = reference(spec, tally)
    if expected is None:
        return
    profile = with_given_times(autoac.profile(build(spec), sample_of(spec), loss=loss_of))
    modules = [name for name, _ in build(spec).named_modules()]
    dice = random.Random(spec.seed)
    for engine in ENGINES:
        plan = next(iter(plans_for(spec, profile, engine, tally)), None)
        for _ in range(MUTATIONS if plan is not None and plan.regions else 0):
            assert plan is not None
            what, record = mutated(plan.record, modules, dice)
            tally["mutations"] += 1
            outcome = _outcome(spec, Plan(record), expected)
            tally[outcome] += 1
            assert outcome != "wrong", f"{engine}, {what}: trained wrong without a word"
            record.save(folder / "plan.json")
            try:
                loaded = Plan.load(folder / "plan.json")
            except ProfileError:
                tally["refused when loaded"] += 1
            else:
                assert loaded.regions == record.regions


def _outcome(spec: ModelSpec, plan: Plan, expected: dict[str, Any]) -> str:
    model = build(spec)
    attributes = [list(vars(module)) for module in model.modules()]
    try:
        plan.apply(model)
    except (AutoacError, IndexError):
        assert [list(vars(module)) for module in model.modules()] == attributes
        return "refused when applied"
    try:
        found = step(model, spec)
    except RuntimeError:
        assert_nothing_active()
        return "refused by the engine"
    assert_nothing_active()
    return "wrong" if differences(found, expected) else "right"


@pytest.mark.slow
def test_mutated_plans(tmp_path: Path):
    tally: Counter[str] = Counter()
    run_examples(lambda spec: check_mutations(spec, tally, tmp_path), MODELS, seed=77)
    assert tally["mutations"] >= 500, dict(tally)
    assert min(tally["right"], tally["refused by the engine"], tally["refused when loaded"]) > 5, dict(tally)
