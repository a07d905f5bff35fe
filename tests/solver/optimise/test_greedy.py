"""The greedy choice: by hand, and what must hold of it on random problems."""

import random

import pytest

from autoac_solver import (
    ALWAYS,
    Extension,
    Lifetime,
    Problem,
    RegionCost,
    Simulator,
    save_or_recompute,
    solve,
    violations,
)
from autoac_solver.optimise.greedy import Greedy
from autoac_solver.problem.problem import (
    Action,
    Condition,
    DecisionGroup,
    Literal,
    Option,
    when_recomputed,
    when_saved,
)
from tests.solver import reference
from tests.solver.generators import random_problem, with_resources


def values(*sizes_and_times: tuple[int, float], wrap_s: float = 0.0) -> Problem:
    """Values that are all alive at the loss if they are kept, and nothing else is: a knapsack."""
    n = len(sizes_and_times)
    lifetimes = []
    for group, (size, _) in enumerate(sizes_and_times):
        again = n + 1 + group
        lifetimes.append(Lifetime(size, n, n, ALWAYS, (Extension(n + 1, when_saved(group)),), group))
        lifetimes.append(Lifetime(size, again, again + 1, when_recomputed(group), storage=group))
    groups = tuple(save_or_recompute(0, time_s) for _, time_s in sizes_and_times)
    return Problem(2 * n + 1, 1000, 20.0, groups, (RegionCost(wrap_s),), tuple(lifetimes))


@pytest.mark.parametrize(
    ("budget_bytes", "recomputed"),
    [
        # 7 s for 60 bytes are kept before 5 s for 50 bytes.
        (1160, (False, False, False)),
        (1159, (False, False, True)),
        (1110, (False, False, True)),
        (1109, (False, True, True)),
        (1060, (False, True, True)),
        (1059, None),
    ],
)
def test_most_seconds_per_byte_first(budget_bytes: int, recomputed: tuple[bool, ...] | None) -> None:
    plan = Greedy(Simulator(values((60, 7.0), (50, 5.0), (50, 5.0)))).plan(budget_bytes)
    assert (None if plan is None else tuple(plan)) == recomputed


def test_where_the_integer_program_is_worth_it() -> None:
    """A knapsack of 100 bytes: greedy keeps 60 bytes and 7 s, the optimum two times 50 bytes and 5 s."""
    problem = values((60, 7.0), (50, 5.0), (50, 5.0))
    greedy = Greedy(Simulator(problem)).plan(1100)
    assert greedy is not None
    assert Simulator(problem).extra_s(greedy) == 10.0
    assert solve(problem, 1100, gap=0).extra_s == 7.0


@pytest.mark.parametrize("seed", range(150))
def test_greedy_is_permitted_within_the_budget_and_no_better_than_the_best(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    if seed % 3 == 0:
        problem = with_resources(rng, problem)
    assert assert_sound(problem) >= 1 or problem.resources  # The largest peak is a budget for everything.


def test_groups_of_several_options() -> None:
    """Sound, and mostly a plan, though what an option requires may rule out where the search begins."""
    met = []
    for seed in range(100):
        rng = random.Random(seed)
        met.append(assert_sound(random_problem(rng, n_groups=rng.randint(1, 6), most_options=4)))
    assert sum(found >= 1 for found in met) >= 60


def assert_sound(problem: Problem) -> int:
    """Hold greedy plans at three budgets against all choices; how many budgets have one."""
    simulator = Simulator(problem)
    choices = reference.all_choices(problem, lambda decisions: simulator.simulate(decisions).peak_bytes)
    if not choices:
        assert Greedy(simulator).plan(10**15) is None
        return 0
    peaks = sorted({choice.peak_bytes for choice in choices})
    met = 0
    for budget_bytes in (peaks[0], peaks[len(peaks) // 2], peaks[-1]):
        plan = Greedy(simulator).plan(budget_bytes)
        if plan is None:
            continue
        met += 1
        assert violations(problem, plan) == []
        assert reference.permitted(problem, plan.tolist())
        assert max(reference.live_bytes(problem, plan.tolist())) <= budget_bytes
        best_s = min(choice.extra_s for choice in choices if choice.peak_bytes <= budget_bytes)
        assert simulator.extra_s(plan) >= best_s - 1e-9
    return met


def test_the_option_of_most_seconds_per_byte_first() -> None:
    """Three points of a compiled region and of another one: 8 s for 10 bytes before 6 s for 20."""
    times_and_bytes = [[(0.0, 40), (6.0, 20), (14.0, 10)], [(0.0, 30), (6.0, 10)]]
    groups, lifetimes = [], []
    for index, points in enumerate(times_and_bytes):
        groups.append(DecisionGroup(index, tuple(Option(Action.COMPILED, time_s) for time_s, _ in points)))
        lifetimes += [
            Lifetime(size, 0, 1, Condition((Literal(index, option),)))
            for option, (_, size) in enumerate(points)
        ]
    problem = Problem(1, 0, 20.0, tuple(groups), (RegionCost(), RegionCost()), tuple(lifetimes))
    greedy = Greedy(Simulator(problem))
    for budget_bytes, expected in ((20, (2, 1)), (30, (1, 1)), (50, (0, 1)), (69, (0, 1)), (70, (0, 0))):
        plan = greedy.plan(budget_bytes)
        assert plan is not None
        assert tuple(plan) == expected
    assert greedy.plan(19) is None


def test_what_requires_a_kept_value_is_kept_with_it() -> None:
    """DecisionGroup 1 requires group 0: group 0 is kept only together with group 1."""
    base = values((10, 1.0), (10, 2.0), (15, 3.0))
    groups = (base.groups[0], save_or_recompute(0, 2.0, requires=(0,)), base.groups[2])
    problem = Problem(base.n_positions, 1000, 20.0, groups, base.regions, base.lifetimes)
    # First group 1, 2 s for 10 bytes, then group 2, 3 s for 15, then group 0 with group 1, 3 s for 20.
    greedy = Greedy(Simulator(problem))
    for budget_bytes, recomputed in (
        (1015, (True, False, True)),
        (1020, (False, False, True)),
        (1025, (True, False, False)),
        (1035, (False, False, False)),
    ):
        plan = greedy.plan(budget_bytes)
        assert plan is not None
        assert tuple(plan) == recomputed
