"""Problems with two clocks: what decisions add to the end of the step, prices, and plans against brute force."""

import dataclasses
import itertools
import random
from dataclasses import asdict

import pytest

from autoac_solver.build.build import build
from autoac_solver.build.engines.replay import ReplayCosts
from autoac_solver.build.engines.sac import SacCosts
from autoac_solver.optimise.ilp import solve
from autoac_solver.plan.planning import plan_profile
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.problem.problem import RECOMPUTE, Problem
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.errors import InfeasibleBudgetError
from autoac_solver.records.profile import Profile
from autoac_solver.show.explanation import explain
from tests.solver.profiles import two_blocks

BLOCKS = (1, 3)
"""The two blocks' module calls."""


def profile_with(host_s: float, device: float = 1.0, costs: float = 0.0) -> Profile:
    """Every launch takes `host_s`; the device's times are multiplied; every part of the bookkeeping takes `costs`."""
    replay, sac = (dict.fromkeys(asdict(kind()), costs) for kind in (ReplayCosts, SacCosts))
    profile = two_blocks({"replay": replay, "sac": sac})
    tape = [dataclasses.replace(op, host_s=host_s, time_s=device * op.time_s) for op in profile.tape]
    return dataclasses.replace(profile, tape=tuple(tape))


def random_profile(seed: int) -> Profile:
    dice = random.Random(seed)
    profile = profile_with(1.0, 1.0, dice.choice([0.0, 0.3, 2.0]))
    share = dice.choice([0.0, 0.0, 0.1, 0.3])  # of ops after which the host waits, for one of two reasons
    scale = dice.choice([0.2, 1.0, 4.0])
    tape = tuple(
        dataclasses.replace(
            op,
            host_s=dice.uniform(0.01, scale),
            time_s=dice.uniform(0, 2.0),
            waits=dice.random() < share,
            read_on_host=dice.random() < share,
        )
        for op in profile.tape
    )
    return dataclasses.replace(profile, tape=tape, views_s=dice.choice([0.0, 0.5]))


def added_s(problem: Problem, decisions: tuple[int, ...]) -> float:
    """What decisions add to the end of the step, by the recursion."""

    def end_s(chosen: tuple[int, ...]) -> float:
        launched = done = 0.0
        wrapped = {group.region for group, option in zip(problem.groups, chosen, strict=True) if option}
        for work in problem.work:
            holds = any((chosen[g] == option) is positive for g, option, positive in work.literals)
            if (work.literals and not holds) or (work.wrapped >= 0 and work.wrapped not in wrapped):
                continue
            launched += work.host_s
            done = max(done, launched) + work.device_s
            launched = max(launched, done) if work.waits else launched
        return max(launched, done)

    return end_s(decisions) - end_s((0,) * len(decisions))


def priced_s(problem: Problem, decisions: tuple[int, ...]) -> float:
    """What the integer program adds up."""
    taken = zip(problem.groups, decisions, strict=True)
    wrapped = {group.region for group, option in zip(problem.groups, decisions, strict=True) if option}
    total = sum(group.options[option].time_s for group, option in taken)
    return total + sum(problem.regions[region].wrap_s for region in wrapped)


def permitted(problem: Problem) -> list[tuple[int, ...]]:
    simulator = Simulator(problem)
    every = itertools.product(*(range(len(group.options)) for group in problem.groups))
    return [decisions for decisions in every if not simulator.violations(decisions)]


@pytest.mark.parametrize("engine", ["replay", "sac"])
@pytest.mark.parametrize("first", range(0, 100, 50))
def test_random_profiles(engine: str, first: int):
    """The simulator is the recursion, prices never promise more, and the solver's bound holds of all plans."""
    slower = 0
    for seed in range(first, first + 50):
        profile = random_profile(seed)
        problem = build(profile, BLOCKS, engine).problem
        assert problem.step_s == pytest.approx(profile.step_s)
        simulator = Simulator(problem)
        found = {}
        for decisions in permitted(problem):
            timeline = simulator.simulate(decisions)
            assert timeline.extra_s == pytest.approx(added_s(problem, decisions), abs=1e-9)
            assert priced_s(problem, decisions) <= timeline.extra_s + 1e-9
            found[decisions] = timeline
        for budget in sorted({timeline.peak_bytes for timeline in found.values()}):
            best_s = min(t.extra_s for t in found.values() if t.peak_bytes <= budget)
            solution = solve(problem, budget, gap=0.0)
            assert solution.peak_bytes <= budget
            assert solution.extra_s == pytest.approx(found[solution.decisions].extra_s)
            assert solution.bound_s - 1e-6 <= best_s <= solution.extra_s + 1e-9
            if solution.extra_s > best_s + 1e-6:
                assert solution.status != "optimal"
                slower += 1
    # With prices of the first path only, about one in 25.
    assert slower <= (1 if first == 50 else 0)


def test_bookkeeping_is_hidden_behind_a_busy_device():
    """The least budget has both blocks' first values recomputed, of 2 s each, with bookkeeping of 0.1 s for each op."""
    busy, idle = profile_with(0.001, 1.0, 0.1), profile_with(0.5, 0.01, 0.1)
    plans = {}
    for name, profile in (("busy", busy), ("idle", idle)):
        with pytest.raises(InfeasibleBudgetError) as caught:
            plan_profile(profile, 1, regions=["blocks.0", "blocks.1"])
        plans[name] = plan_profile(profile, caught.value.minimum_bytes, regions=["blocks.0", "blocks.1"])
    again = sum(option for option in step_of(plans["busy"]).options)
    assert again
    device_s = sum(
        group.options[RECOMPUTE].time_s
        for group, option in zip(
            step_of(plans["busy"]).built.problem.groups, step_of(plans["busy"]).options, strict=True
        )
        if option
    )
    # Forward's bookkeeping of the very first ops is before the device has anything to do.
    assert device_s <= plans["busy"].predicted_extra_s <= device_s + 0.5
    assert plans["idle"].predicted_extra_s > 10 * device_s * 0.01


def test_host_bound_steps_are_named():
    record = plan_profile(profile_with(3.0), 10_000)
    text = explain(record)
    assert (
        "host-bound      the device waits for the host in 48% of the step: a larger batch, torch.compile"
        in text
    )
    assert "host-bound" not in explain(plan_profile(profile_with(0.001), 10_000))
    assert "two clocks" in explain(plan_profile(profile_with(0.001), 10_000))
    assert "two clocks" not in explain(plan_profile(two_blocks(), 10_000))


def test_values_are_read_again_by_code_that_runs_again_only():
    """Replay repeats the op, whose result the host read in forward; waits of the op itself are repeated by both."""

    def waits(engine: str, again: bool, **waits: bool) -> set[bool]:
        profile = profile_with(1.0)
        tape = tuple(dataclasses.replace(op, **waits) for op in profile.tape)
        work = build(dataclasses.replace(profile, tape=tape), BLOCKS, engine).problem.work
        return {piece.waits for piece in work if piece.device_s and bool(piece.literals) is again}

    for engine in ("replay", "sac"):
        assert waits(engine, again=False) == waits(engine, again=True) == {False}
        assert waits(engine, again=False, waits=True) == {True}
        assert waits(engine, again=False, read_on_host=True) == {True}
        assert waits(engine, again=True, waits=True) == {True}
        assert waits(engine, again=True, read_on_host=True) == {engine == "sac"}


def test_a_step_with_one_clock_has_no_work():
    assert build(two_blocks(), BLOCKS, "replay").problem.work == ()
