"""Hold a random model's step with plans against its step without: what a step leaves behind, its peak, its leaks.

A *case* is a model, a budget and an engine, with a plan that recomputes something. Budgets for which the plan is one
that was tried before, or recomputes nothing, are run as well, but not counted.
"""

from __future__ import annotations

import contextlib
import random
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import autoac
from autoac.measure import Measurement, measure_peak
from autoac.plans import Plan
from autoac_solver.records.errors import ProfilingError
from autoac_solver.records.profile import Op, Profile
from tests.execute.exact.harness import assert_nothing_active, differences, nothing_leaks
from tests.fuzz.models import Model, ModelSpec, build, is_opaque, loss_of, sample_of
from tests.fuzz.opaque import SCRATCH

ENGINES = ("replay", "sac")
FRACTIONS = (0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)
"""Budgets, between the least feasible one (0) and the peak without a plan (1)."""
MEASURED = 0.2
"""Share of the plans whose peak is measured: the ruler on CPU is a profiler, and slow."""
PEAK_TOLERANCE_BYTES = 64
"""Numbers that autograd saves for backward are tensors of 8 bytes, of which neither modes nor hooks see anything."""

GAP = 0.05
TIME_LIMIT_S = 20.0


def check_model(
    spec: ModelSpec, tally: Counter[str], measured: float = MEASURED, engines: Sequence[str] = ENGINES
) -> None:
    """Plan a model at several budgets, and compare steps to the bit.

    Args:
        tally: counts what was seen: "models", "cases", "measured", the steps under plans that recompute something
            ("planned steps", and "planned steps, opaque" of models with opaque functions), and why something was left
            out.
        measured: share of the plans whose peak is measured.
        engines: to plan for.
    """
    expected = reference(spec, tally)
    if expected is None:
        return
    expected_of_other = reference(spec, tally, other_draw(spec))
    with _unchanged(spec) as model:
        profile = with_given_times(autoac.profile(model, sample_of(spec), loss=loss_of))
    tally["models"] += 1
    dice = random.Random(spec.seed)
    for engine in engines:
        tried = set()
        for plan in plans_for(spec, profile, engine, tally):
            if decisions_of(plan) in tried:
                continue
            tried.add(decisions_of(plan))
            try:
                check_plan(spec, plan, expected, expected_of_other, tally)
            except RuntimeError as error:
                if not _is_refused(plan, error):
                    raise
                tally[f"refused, {engine}"] += 1
                continue
            tally["cases"] += plan_recomputes(plan)
            tally[f"cases, {engine}"] += plan_recomputes(plan)
            if dice.random() < measured:
                check_peak(spec, plan, tally)


def with_given_times(profile: Profile) -> Profile:
    """The profile with times that are no measurements, so that its plans are the same wherever the tests run."""

    def timed(op: Op) -> Op:
        return replace(op, time_s=(1 + zlib.crc32(op.name.encode()) % 10) * 1e-5, rerun_s=0.0)

    return replace(profile, tape=tuple(map(timed, profile.tape)), views_s=0.0, costs={})


def other_draw(spec: ModelSpec) -> ModelSpec:
    """Another sample and other random numbers, for a step of the same model."""
    return replace(spec, seed=spec.seed + 1)


def reference(spec: ModelSpec, tally: Counter[str], draw: ModelSpec | None = None) -> dict[str, Any] | None:
    """What a step without a plan leaves behind; None where there is nothing to hold a plan against."""
    try:
        expected = step(build(spec), spec if draw is None else draw)
    except RuntimeError as error:  # it writes in place what autograd has saved, say
        tally[f"refused by torch: {str(error)[:50]}"] += 1
        return None
    # Where everything is NaN, a wrong gradient is not seen.
    if not all(value.isfinite().all() for name, value in expected.items() if value is not None):
        tally["not finite"] += 1
        return None
    return expected


def plans_for(spec: ModelSpec, profile: Profile, engine: str, tally: Counter[str]) -> Iterator[Plan]:
    """Plans for several budgets, the least feasible one first."""
    regions = sorted({f"stages.{i % len(spec.stages)}" for i in spec.order}) if spec.names_given else None

    def solve(budget: int) -> Plan:
        return autoac.solve(
            profile, budget, engine=engine, regions=regions, gap=GAP, time_limit_s=TIME_LIMIT_S
        )

    least = profile.resident_bytes
    try:
        solve(least)
    except autoac.InfeasibleBudgetError as error:
        least = error.minimum_bytes
    except ProfilingError:  # no region has anything to recompute
        tally["nothing to plan"] += 1
        return
    tight = solve(least)
    assert tight.predicted_peak_bytes == least
    most = tight.record.unplanned_peak_bytes
    if least >= most:
        tally["nothing to gain"] += 1
        yield tight
        return
    for fraction in FRACTIONS:
        budget = least + int(fraction * (most - least))
        plan = solve(budget)
        assert plan.predicted_peak_bytes <= budget
        if fraction == FRACTIONS[-1]:
            assert decisions_of(solve(budget)) == decisions_of(plan), "the same profile gave another plan"
        yield plan


def decisions_of(plan: Plan) -> Any:
    """What tells plans apart."""
    return tuple((region.name, region.wrapped, region.steps) for region in plan.regions)


def plan_recomputes(plan: Plan) -> bool:
    """Whether the plan recomputes anything."""
    return any(region.wrapped for region in plan.regions)


# -- steps -------------------------------------------------------------------------------------------------------------


def step(model: Model, spec: ModelSpec) -> dict[str, Any]:
    """One training step, and what it leaves behind."""
    sample = sample_of(spec)
    _seed(spec)
    SCRATCH.zero_()
    outputs = model(**sample)
    loss = loss_of(outputs)
    loss.backward()
    left: dict[str, Any] = {"loss": loss.detach(), "scratch": SCRATCH.clone()} | _random_states()
    left |= {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    left |= {f"sample {name}": value for name, value in sample.items()}
    left |= {f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}
    left |= {f"parameter {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}
    left |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return left


def _seed(spec: ModelSpec) -> None:
    torch.manual_seed(spec.seed)
    np.random.seed(spec.seed)
    random.seed(spec.seed)


def _random_states() -> dict[str, torch.Tensor]:
    """The states of torch's, numpy's and Python's random numbers."""
    state: Any = np.random.get_state()
    return {
        "RNG": torch.get_rng_state(),
        "RNG of numpy": torch.tensor([*state[1].tolist(), state[2]]),
        "RNG of Python": torch.tensor(random.getstate()[1]),
    }


def check_plan(
    spec: ModelSpec,
    plan: Plan,
    expected: dict[str, Any],
    expected_of_other: dict[str, Any] | None,
    tally: Counter[str],
) -> None:
    """Steps with the plan are those without, nothing is left behind, and the plan can be taken off again.

    Args:
        expected: what a step leaves behind.
        expected_of_other: the same of a step with the other draw, which comes last; None to leave it out.
    """
    model = build(spec)
    attributes = [dict(vars(module)) for module in model.modules()]
    plan.apply(model)
    for number, (draw, wanted) in enumerate(
        [(spec, expected), (spec, expected), (other_draw(spec), expected_of_other)]
    ):
        if wanted is None:
            continue
        try:
            with _nothing_leaks_but_torchs(spec) if draw is spec else _another_path():
                found = step(model, draw)
        finally:
            assert_nothing_active()
        wrong = differences(found, wanted)
        assert not wrong, f"{plan.engine}, step {number}: {wrong}"
        if plan_recomputes(plan):
            tally["planned steps"] += 1
            tally["planned steps, opaque"] += is_opaque(spec)
        model.load_state_dict(build(spec).state_dict())
        model.zero_grad(set_to_none=True)
    plan.remove(model)
    assert [list(vars(module)) for module in model.modules()] == [list(names) for names in attributes]


@contextlib.contextmanager
def _another_path() -> Iterator[None]:
    """A model that branches on values may take another path than the profiled one, which is warned of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the plan is not followed")
        yield


def _is_refused(plan: Plan, error: RuntimeError) -> bool:
    """Whether engine sac refuses a step that takes another path than the profiled one, as its docs say."""
    return "its ops run in another order than the profiled ones" in str(error) and bool(plan.is_not_followed)


@contextlib.contextmanager
def _nothing_leaks_but_torchs(spec: ModelSpec) -> Iterator[None]:
    """As `nothing_leaks`, but for models whose steps leak without a plan: with a graph, all behind it is held."""
    done = False
    try:
        with nothing_leaks():
            yield
            done = True
    except AssertionError:
        if not done or not _leaks_without_a_plan(spec):
            raise


def _leaks_without_a_plan(spec: ModelSpec) -> bool:
    """Whether more than the gradients is alive after the step."""
    model = build(spec)
    step(model, spec)
    gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    return measure(spec, None).end_above_start_bytes > gradients


def check_peak(spec: ModelSpec, plan: Plan, tally: Counter[str]) -> None:
    """The measured peak is the predicted one, and so within the budget; no more is alive after the step than without.

    There are known exceptions, which are counted: see `test_found`.
    """
    with_plan, without = measure(spec, plan), measure(spec, None)
    peak = plan.resident_bytes + with_plan.peak_above_start_bytes
    tally["measured"] += 1
    plain = plan.resident_bytes + without.peak_above_start_bytes
    if plain > plan.record.unplanned_peak_bytes + PEAK_TOLERANCE_BYTES:
        # A tensor that was saved and then written from what it went into holds itself: torch's own cycle, in C++.
        tally["above the prediction without a plan"] += 1
        return
    above = peak > plan.predicted_peak_bytes + PEAK_TOLERANCE_BYTES
    if above and peak <= plan.predicted_peak_bytes + PEAK_TOLERANCE_BYTES + _held_by_itself(spec, plan):
        above = False
        tally["above the prediction without a plan"] += 1
    tally[f"above the prediction, {plan.engine}"] += above
    # Fewer where the step without a plan leaves a reference cycle, as torch's checkpoint does.
    assert with_plan.end_above_start_bytes <= without.end_above_start_bytes, (
        f"{plan.engine}: {with_plan.end_above_start_bytes} bytes more after the step, "
        f"{without.end_above_start_bytes} without a plan"
    )


def _held_by_itself(spec: ModelSpec, plan: Plan) -> int:
    """By how much the step without a plan has more alive in backward than is predicted, if not at its peak."""
    unplanned = autoac.solve(plan.record.profile, 2**40)
    predicted = unplanned.memory_timeline()
    measured = unplanned.measure_memory(build(spec), sample_of(spec), loss=loss_of)
    above = measured.to_numpy() - predicted["live_bytes"].to_numpy()
    return max(0, int(above[predicted["phase"] == "backward"].max()))


def measure(spec: ModelSpec, plan: Plan | None) -> Measurement[None]:
    """The second step's memory: the first one sets things up."""
    model, sample = build(spec), sample_of(spec)
    if plan is not None:
        plan.apply(model)

    def run() -> None:
        outputs = model(**sample)
        loss_of(outputs).backward()

    step(model, spec)
    model.load_state_dict(build(spec).state_dict())
    model.zero_grad(set_to_none=True)
    _seed(spec)
    return measure_peak(run)


@contextlib.contextmanager
def _unchanged(spec: ModelSpec) -> Iterator[Model]:
    """A model that is not changed in this context, nor the random state."""
    model, states = build(spec), _random_states()
    attributes = [dict(vars(module)) for module in model.modules()]
    yield model
    assert not differences(_random_states(), states)
    for module, before in zip(model.modules(), attributes, strict=True):
        assert {name: id(value) for name, value in vars(module).items()} == {
            n: id(v) for n, v in before.items()
        }
    for name, value in build(spec).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_nothing_active()
