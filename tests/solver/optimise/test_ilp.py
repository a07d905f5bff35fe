"""Small problems: by hand, and against exhaustive search judged by the simulator."""

import dataclasses
import random

import pytest

from autoac_solver import (
    ALWAYS,
    Extension,
    InfeasibleBudgetError,
    Lifetime,
    NoPlanInTimeError,
    Problem,
    RegionCost,
    Simulator,
    minimum_peak,
    save_or_recompute,
    simulate,
    solve,
    violations,
)
from autoac_solver.optimise.greedy import Greedy
from autoac_solver.problem.problem import Resource, when_recomputed, when_saved
from tests.solver.exhaustive import assert_agrees_with_exhaustive_search, budgets_around
from tests.solver.generators import random_problem, with_resources


def two_values(wrap_s: float = 0.0) -> Problem:
    """Two values of 10 and 20 bytes that take 1 s and 3 s, and a loss of 50 bytes, over 100 resident bytes."""
    return Problem(
        n_positions=6,
        resident_bytes=100,
        step_s=10.0,
        groups=(save_or_recompute(0, 1.0), save_or_recompute(0, 3.0)),
        regions=(RegionCost(wrap_s),),
        lifetimes=(
            Lifetime(10, 0, 1, ALWAYS, (Extension(6, when_saved(0)),)),
            Lifetime(10, 3, 6, when_recomputed(0)),
            Lifetime(20, 1, 2, ALWAYS, (Extension(5, when_saved(1)),)),
            Lifetime(20, 4, 5, when_recomputed(1)),
            Lifetime(50, 2, 3),
        ),
    )


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(
    ("budget_bytes", "recomputed", "peak_bytes", "extra_s"),
    [
        (10**12, (False, False), 180, 0.0),
        (180, (False, False), 180, 0.0),
        (179, (True, False), 170, 1.0),
        (170, (True, False), 170, 1.0),
        (169, (False, True), 160, 3.0),
        (160, (False, True), 160, 3.0),
        (159, (True, True), 150, 4.0),
        (150, (True, True), 150, 4.0),
    ],
)
def test_two_values_by_hand(solver, budget_bytes, recomputed, peak_bytes, extra_s):
    solution = solve(two_values(), budget_bytes, gap=0, solver=solver)
    assert solution.decisions == recomputed
    assert solution.status == "optimal"
    assert solution.peak_bytes == peak_bytes
    assert solution.extra_s == solution.bound_s == extra_s
    assert solution.gap == 0
    assert solve(two_values(wrap_s=0.5), budget_bytes, gap=0, solver=solver).extra_s == extra_s + 0.5 * (
        extra_s > 0
    )


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_one_byte_less_than_possible(solver):
    with pytest.raises(
        InfeasibleBudgetError, match=r"budget of 149 bytes .* 150 bytes .* Ask for budget=150 or"
    ) as caught:
        solve(two_values(), 149, solver=solver)
    error = caught.value
    assert (error.budget_bytes, error.minimum_bytes, error.proven) == (149, 150, True)
    assert error.bound_bytes == 150
    assert error.decisions == (True, True)
    assert error.peak_position == 2


def test_a_budget_below_what_is_always_alive_needs_no_time():
    with pytest.raises(InfeasibleBudgetError, match="the least possible peak is 150 bytes"):
        solve(two_values(), 149, time_limit_s=0)
    kept, again = Lifetime(10, 1, 2, when_saved(0)), Lifetime(20, 2, 3, when_recomputed(0))
    problem = dataclasses.replace(two_values(), lifetimes=(Lifetime(5, 0, 1), kept, again))
    with pytest.raises(
        InfeasibleBudgetError,
        match=r"fits a budget of 104 bytes .* every plan's peak is 105 bytes .* found is 110 bytes .* budget=110 or",
    ) as caught:
        solve(problem, 104, time_limit_s=0)
    assert (caught.value.proven, caught.value.bound_bytes) == (False, 105)
    with pytest.raises(NoPlanInTimeError):
        solve(problem, 105, time_limit_s=0)
    with pytest.raises(InfeasibleBudgetError, match="the least possible peak is 110 bytes"):
        solve(problem, 105)


def test_the_least_peak_of_a_long_loop_takes_few_programs():
    """Each of 300 ops holds a byte less than the one before it, so there is one local peak at a time."""
    count = 300
    rounds = []
    problem = Problem(
        n_positions=count + 1,
        resident_bytes=0,
        step_s=10.0,
        groups=tuple(save_or_recompute(0, 1.0) for _ in range(2 * count)),
        regions=(RegionCost(),),
        lifetimes=(
            Lifetime(1000, 0, count + 1),
            *(Lifetime(count - op, op, op + 1, when_saved(op)) for op in range(count)),
            *(Lifetime(5, count, count + 1, when_recomputed(count + op)) for op in range(count)),
        ),
    )
    least = minimum_peak(problem, progress=rounds.append)
    assert (least.status, least.peak_bytes) == ("optimal", 1000)
    assert len(rounds) < count / 4


def test_minimum_peak_by_hand():
    solution = minimum_peak(two_values())
    assert (solution.status, solution.peak_bytes, solution.extra_s) == ("optimal", 150, 4.0)
    assert solution.bound_s == 0


def test_the_asked_gap_is_enough():
    # Of 10 s of step, 30 % are 3 s: recomputing both is within that of the bound, 1 s would do.
    start = (True, True)
    solution = solve(two_values(), 170, gap=0.3, start=start)
    assert solution.status == "optimal"
    assert solution.extra_s - solution.bound_s <= 3.0
    assert solve(two_values(), 170, gap=0, start=start).decisions == (True, False)


def test_nothing_to_decide():
    problem = Problem(2, 5, 0.0, (), (), (Lifetime(3, 0, 1),))
    assert solve(problem, 8).decisions == ()
    assert minimum_peak(problem).peak_bytes == 8
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(problem, 7)
    assert caught.value.minimum_bytes == 8


def test_nothing_alive():
    problem = Problem(1, 0, 1.0, (save_or_recompute(0, 1.0),), (RegionCost(),), ())
    assert solve(problem, 0).peak_bytes == 0
    assert minimum_peak(problem).peak_bytes == 0


def test_what_it_must_save_is_not_recomputed_even_if_that_would_fit():
    problem = two_values()
    fixed = Problem(
        **{
            **fields_of(problem),
            "groups": (save_or_recompute(0, 1.0, must_save="fixed"), save_or_recompute(0, 3.0)),
        }
    )
    assert solve(fixed, 170, gap=0).decisions == (False, True)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(fixed, 159)
    assert caught.value.minimum_bytes == 160


def test_what_is_decided_alike_is_paid_for_together():
    tied = Problem(
        **{
            **fields_of(two_values()),
            "groups": (save_or_recompute(0, 1.0, same_as=1), save_or_recompute(0, 3.0)),
        }
    )
    assert solve(tied, 170, gap=0).extra_s == 4.0


def fields_of(problem: Problem) -> dict:
    return {name: getattr(problem, name) for name in Problem.__dataclass_fields__}


@pytest.mark.parametrize("seed", range(300))
def test_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    assert_agrees_with_exhaustive_search(random_problem(rng), budgets_around(rng), "highs")


@pytest.mark.parametrize(
    ("seed", "solver"), [(seed, "highs") for seed in range(200)] + [(seed, "cbc") for seed in range(20)]
)
def test_groups_of_several_options_equal_exhaustive_search(seed, solver):
    """A third option, and more, that may require anything of other groups."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_groups=rng.randint(1, 6), most_options=4)
    assert_agrees_with_exhaustive_search(problem, budgets_around(rng), solver)


@pytest.mark.parametrize(
    ("seed", "solver"), [(seed, "highs") for seed in range(150)] + [(seed, "cbc") for seed in range(20)]
)
def test_limits_of_other_memory_equal_exhaustive_search(seed, solver):
    """Decisions keep to the limit of the host's memory, say, whatever the device's budget; or none can."""
    rng = random.Random(seed)
    problem = random_problem(rng, n_groups=rng.randint(1, 6), most_options=rng.choice((2, 3)))
    assert_agrees_with_exhaustive_search(with_resources(rng, problem), budgets_around(rng), solver)


def test_a_limit_that_the_solver_overlooks_is_kept():
    """Two values that exceed the host's limit together by a byte of a terabyte, less than the solver's tolerance."""
    terabyte = 10**12
    groups = tuple(save_or_recompute(0, 1.0) for _ in range(2))
    moved = tuple(Lifetime(terabyte + group, 0, 1, when_recomputed(group)) for group in range(2))
    kept = tuple(Lifetime(100, 0, 1, when_saved(group)) for group in range(2))
    one = Problem(1, 0, 1.0, groups, (RegionCost(),), kept, resources=(Resource("host", terabyte, moved),))
    within = dataclasses.replace(one, resources=(Resource("host", 2 * terabyte + 1, moved),))
    above = dataclasses.replace(one, resources=(Resource("host", 2 * terabyte, moved),))
    assert minimum_peak(within).peak_bytes == 0
    assert minimum_peak(above).peak_bytes == minimum_peak(one).peak_bytes == 100
    assert "2000000000001 bytes of host, and 2000000000000 are allowed" in violations(above, (1, 1))
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(above, 0)
    assert (caught.value.minimum_bytes, caught.value.proven) == (100, True)
    assert Greedy(Simulator(above)).plan(0) is None


@pytest.mark.parametrize(
    ("seed", "solver"), [(seed, "highs") for seed in range(150)] + [(seed, "cbc") for seed in range(20)]
)
def test_with_equal_regions_equals_exhaustive_search(seed, solver):
    """The relaxation is split by how many of them are wrapped."""
    rng = random.Random(seed)
    problem = random_problem(rng)
    wrap_s = rng.uniform(0, 3)
    regions = tuple(RegionCost(wrap_s) for _ in problem.regions)
    assert_agrees_with_exhaustive_search(
        dataclasses.replace(problem, regions=regions), budgets_around(rng), solver
    )


@pytest.mark.parametrize("seed", range(60))
def test_cbc_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    assert_agrees_with_exhaustive_search(random_problem(rng), budgets_around(rng), "cbc")


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("seed", range(5))
def test_single_bytes_decide_among_terabytes(seed, solver):
    """Budgets that differ by a millionth of what any solver tolerates."""
    rng = random.Random(seed)
    sizes = [10**12 + rng.randint(0, 40) for _ in range(7)]
    problem = Problem(
        n_positions=3,
        resident_bytes=0,
        step_s=10.0,
        groups=tuple(save_or_recompute(0, rng.uniform(1, 1.01)) for _ in sizes),
        regions=(RegionCost(),),
        lifetimes=(
            *(Lifetime(size, 0, 3, when_saved(group)) for group, size in enumerate(sizes)),
            *(Lifetime(size // 7 * 3, 1, 2, when_recomputed(group)) for group, size in enumerate(sizes)),
        ),
    )

    def budgets(choices, minimum_bytes):
        return [
            peak - less for peak in rng.sample(sorted({c.peak_bytes for c in choices}), 6) for less in (0, 1)
        ]

    assert_agrees_with_exhaustive_search(problem, budgets, solver)


@pytest.mark.parametrize("seed", range(20))
def test_carrying_the_start_along_makes_the_curve_monotone(seed):
    problem = random_problem(random.Random(seed), n_groups=10)
    least, most = minimum_peak(problem), simulate(problem, [False] * 10).peak_bytes
    budgets = [least.peak_bytes + (most - least.peak_bytes) * k // 10 for k in range(11)]
    start, last_s = least.decisions, float("inf")
    for budget_bytes in budgets:
        solution = solve(problem, budget_bytes, gap=0.2, start=start)
        assert solution.extra_s <= last_s
        start, last_s = solution.decisions, solution.extra_s


def test_a_start_that_does_not_fit_is_ignored():
    assert solve(two_values(), 160, gap=0, start=(True, False)).decisions == (False, True)


def test_a_start_of_another_problem_is_refused():
    with pytest.raises(ValueError, match="start has 1 decisions, the problem 2 groups"):
        solve(two_values(), 160, start=(True,))


def test_an_unknown_solver_is_refused():
    with pytest.raises(ValueError, match=r"solver='gurobi': choose .auto., .highs. or .cbc."):
        solve(two_values(), 160, solver="gurobi")
