"""The fastest of several choices of regions, without solving each of them to the end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoac_solver.optimise.ilp import RuledOut
from autoac_solver.plan import choices as choices_file
from autoac_solver.plan.choices import Choice, Choices
from autoac_solver.plan.partitions import partitions
from autoac_solver.plan.sweep import sweep
from autoac_solver.problem.solution import Solution
from autoac_solver.records.errors import InfeasibleBudgetError, NoPlanInTimeError, PolicyError
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import Profile
from tests.solver.show.page.synthetic import decoder_profile

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
GAP = 1e-3


@functools.cache
def profile(name: str) -> Profile:
    return Profile.load(PROFILES / f"{name}-cpu.json")


@pytest.mark.parametrize("name", ["gpt-8-blocks", "unet-3-levels"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.8])
def test_no_choice_has_a_plan_that_is_faster_by_more_than_the_gap(name: str, share: float) -> None:
    calls = partitions(profile(name))
    choices = Choices(profile(name), calls, "replay")
    with pytest.raises(InfeasibleBudgetError) as caught:
        choices.best(1, 60, GAP)
    kept = [False] * len(choices[0].built.problem.groups)
    least, most = caught.value.minimum_bytes, choices[0].prepared.simulator.simulate(kept).peak_bytes
    limit = least + int(share * (most - least))
    best = choices.best(limit, 60, GAP)[1]
    assert best.peak_bytes <= limit
    assert best.status == "optimal"
    for one in calls:
        try:
            alone = Choices(profile(name), [one], "replay").best(limit, 60, GAP)[1]
        except InfeasibleBudgetError:
            continue
        assert best.objective_s <= alone.objective_s + GAP * profile(name).step_s
        assert best.bound_s <= alone.objective_s * (1 + 1e-9)  # which is said of all choices


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_more_memory_never_leads_to_a_slower_plan(engine: str) -> None:
    """Each limit by itself, in a model of more than a thousand groups: all choices are looked at here, too."""
    layers = decoder_profile(30, helpers=0, backward=2)
    calls = partitions(layers, engine)
    with pytest.raises(InfeasibleBudgetError) as caught:
        Choices(layers, calls, engine).best(1, 1e9, GAP)
    least = caught.value.minimum_bytes
    most = Choices(layers, calls, engine).best(10**15, 1e9, GAP)[1].peak_bytes
    found = [
        Choices(layers, calls, engine).best(least + (most - least) * part // 8, 1e9, GAP) for part in range(9)
    ]
    for (_, tighter), (_, looser) in itertools.pairwise(found):
        assert looser.objective_s <= tighter.objective_s + GAP * layers.step_s
    # Few layers are recomputed as a whole, and where there is more memory the parts of many.
    assert len(found[0][0].calls) < len(found[-2][0].calls)
    assert len(found[0][0].built.problem.groups) > 1000


def test_what_a_further_choice_would_need_is_not_looked_for() -> None:
    """It fits nothing there; what it would need takes long to find, and is no answer where another choice fits."""
    layers = decoder_profile(10, helpers=0, backward=2)
    *_, whole_model = partitions(layers)
    choice = Choice(layers, whole_model, "replay")
    with pytest.raises(RuledOut):
        choice.solve(layers.resident_bytes + 1, GAP, 60, rough=True, find_minimum=False)
    with pytest.raises(RuledOut):
        choice.solve(layers.resident_bytes, GAP, 60, rough=True, find_minimum=False)
    with pytest.raises(InfeasibleBudgetError) as caught:
        choice.solve(layers.resident_bytes, GAP, 60)
    assert choice.solve(caught.value.minimum_bytes, GAP, 60).peak_bytes == caught.value.minimum_bytes


class Clock:
    """Stands still but for what is added to it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(choices_file, "time", clock)
    return clock


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[tuple[int, float, bool]]:
    """Regions, seconds that were left, and roughness of each call of the solver, which takes 40 s by the clock."""
    solved = []
    solve = Choice.solve

    def slow(self: Choice, limit: int, gap: float, time_limit_s: float, rough=False, find_minimum=True):
        solved.append((len(self.calls), time_limit_s, rough))
        clock.now_s += 40
        return solve(self, limit, gap, 60, rough, find_minimum)

    monkeypatch.setattr(Choice, "solve", slow)
    return solved


def test_no_choice_is_begun_after_the_time_limit(solved: list[tuple[int, float, bool]]) -> None:
    calls = partitions(profile("gpt-8-blocks"))
    assert len(calls) > 2
    most = Choices(profile("gpt-8-blocks"), calls, "replay").best(10**12, 1e9, GAP)[1].peak_bytes
    solved.clear()
    choices = Choices(profile("gpt-8-blocks"), calls, "replay")
    solution = choices.best(int(0.6 * most), 60, GAP)[1]
    assert [seconds for _, seconds, _ in solved] == [60, 10]
    assert len(choices._made) == 2
    assert solution.peak_bytes <= 0.6 * most
    assert solution.status == "feasible"
    assert solution.gap > GAP
    assert solution.bound_s == 0  # nothing is known of the choices that were not looked at


def test_out_of_time_the_least_budget_is_not_called_proven(solved: list[tuple[int, float, bool]]) -> None:
    calls = partitions(profile("gpt-8-blocks"))
    for time_limit_s, proven in ((30, False), (1e9, True)):
        with pytest.raises(InfeasibleBudgetError) as caught:
            Choices(profile("gpt-8-blocks"), calls, "replay").best(1, time_limit_s, GAP)
        assert caught.value.proven is proven
        assert caught.value.bound_bytes == (caught.value.minimum_bytes if proven else 0)


def test_a_choice_that_cannot_need_less_is_not_solved(solved: list[tuple[int, float, bool]]) -> None:
    calls = partitions(profile("gpt-8-blocks"))
    choices = Choices(profile("gpt-8-blocks"), calls, "replay")
    with pytest.raises(InfeasibleBudgetError) as caught:
        choices.best(1, 1e9, GAP)
    least = caught.value.minimum_bytes
    floors = [choice.prepared.memory.floor_bytes for choice in choices.built]
    assert len(floors) == len(calls)
    assert len(solved) == 1 + sum(floor < least for floor in floors[1:]) < len(calls)


@pytest.fixture
def slowly_built(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[int]:
    """The regions of each choice built, which takes 10 s by the clock; solving takes none."""
    built = []
    build = Choice.__init__

    def slow(self: Choice, profile: Profile, calls: Sequence[int], *rest: Any) -> None:
        built.append(len(calls))
        clock.now_s += 10
        build(self, profile, calls, *rest)

    monkeypatch.setattr(Choice, "__init__", slow)
    return built


@pytest.mark.parametrize(("time_limit_s", "built"), [(1, 1), (29, 1), (30, 2), (39, 2), (40, 3), (60, 3)])
def test_no_choice_is_built_that_would_not_be_ready_in_time(
    slowly_built: list[int], clock: Clock, time_limit_s: float, built: int
) -> None:
    """What building takes is known from the choices before, and as much again is left for solving."""
    calls = partitions(profile("gpt-8-blocks"))
    assert len(calls) == 3
    choices = Choices(profile("gpt-8-blocks"), calls, "replay")
    most = Choices(profile("gpt-8-blocks"), calls, "replay").best(10**12, 1e9, GAP)[1].peak_bytes
    slowly_built.clear()
    clock.now_s = 0.0
    solution = choices.best(int(0.6 * most), time_limit_s, GAP)[1]
    assert len(slowly_built) == built
    assert clock.now_s == 10 * built <= max(10, time_limit_s)
    assert solution.status == ("optimal" if built == 3 else "feasible")
    # Those that are there cost nothing to look at, even after a time limit that leaves none to be built.
    assert [len(choice.calls) for choice in choices._made] == slowly_built
    again = choices.best(int(0.6 * most), 9, GAP)[1]
    assert len(slowly_built) == built
    assert again.status == solution.status


@pytest.mark.parametrize(("time_limit_s", "built"), [(19, 1), (20, 2), (30, 3)])
def test_while_there_is_no_plan_a_further_choice_is_built_if_it_is_ready_in_time(
    slowly_built: list[int], clock: Clock, time_limit_s: float, built: int
) -> None:
    calls = partitions(profile("gpt-8-blocks"))
    with pytest.raises(InfeasibleBudgetError) as caught:
        Choices(profile("gpt-8-blocks"), calls, "replay").best(1, time_limit_s, GAP)
    assert len(slowly_built) == built
    assert clock.now_s == 10 * built
    assert caught.value.proven is (built == 3)


@pytest.mark.parametrize(("time_limit_s", "is_told"), [(10, False), (29, False), (30, True)])
def test_what_policies_cost_is_not_looked_for_without_the_time(
    slowly_built: list[int], clock: Clock, time_limit_s: float, is_told: bool
) -> None:
    calls = partitions(profile("gpt-8-blocks"))[:1]
    policies = (Policy("MUST_SAVE", op="aten.gelu.default"),)
    with pytest.raises(InfeasibleBudgetError) as caught:
        Choices(profile("gpt-8-blocks"), calls, "replay", policies).best(1, time_limit_s, GAP)
    assert (caught.value.minimum_without_policies_bytes > 0) is is_told
    assert clock.now_s <= max(10, time_limit_s)


def scripted(monkeypatch: pytest.MonkeyPatch, answers: Mapping[int, list[Any]], clock: Clock) -> Choices:
    """The recorded GPT's choices, with given answers of the solver to each, by their place; each takes a second."""
    choices = Choices(profile("gpt-8-blocks"), partitions(profile("gpt-8-blocks")), "replay")
    left = {choices[index].calls: list(given) for index, given in answers.items()}

    def solve(self: Choice, limit: int, gap: float, time_limit_s: float, rough=False, find_minimum=True):
        clock.now_s += 1
        answer = left[self.calls].pop(0)
        if isinstance(answer, Exception):
            raise answer
        objective_s, bound_s = (share * self.built.problem.step_s for share in answer)
        recomputed = (False,) * len(self.built.problem.groups)
        return Solution(recomputed, "feasible", 0, objective_s, 0.0, 0.0, "", 0, 0.0).bounded(
            bound_s, gap, self.built.problem.step_s
        )

    monkeypatch.setattr(Choice, "solve", solve)
    return choices


TOO_LATE = NoPlanInTimeError("")


@pytest.mark.parametrize(
    ("time_limit_s", "answers", "expected"),
    [
        # Both are solved to the gap; the second has the lower bound.
        (
            60,
            {0: [(0.2, 0.19), (0.2, 0.1995)], 1: [(0.25, 0.18), (0.2003, 0.1993)], 2: [RuledOut()]},
            (0.2, 0.1993, "optimal"),
        ),
        # The second cannot be much faster, so it is left as it is.
        (60, {0: [(0.2, 0.1999)], 1: [(0.25, 0.1995)], 2: [RuledOut()]}, (0.2, 0.1995, "optimal")),
        # The last one costs next to nothing.
        (60, {0: [(0.2, 0.2)], 1: [(0.0005, 0.0004)], 2: []}, (0.0005, 0.0, "optimal")),
        # In the third nothing was found in time.
        (60, {0: [(0.2, 0.2)], 1: [RuledOut()], 2: [TOO_LATE]}, (0.2, 0.0, "feasible")),
        # Time is up after three rough answers; the second could be faster.
        (2.5, {0: [(0.2, 0.19)], 1: [(0.3, 0.1)], 2: [(0.4, 0.195)]}, (0.2, 0.1, "feasible")),
        (2.5, {0: [(0.2, 0.2)], 1: [(0.3, 0.2)], 2: [(0.4, 0.195)]}, (0.2, 0.195, "feasible")),
    ],
)
def test_bound_and_status_are_of_all_choices(monkeypatch, clock, time_limit_s, answers, expected) -> None:
    choices = scripted(monkeypatch, answers, clock)
    solution = choices.best(0, time_limit_s, GAP)[1]
    step_s = profile("gpt-8-blocks").step_s
    objective, bound, status = expected
    assert solution.objective_s == pytest.approx(objective * step_s)
    assert solution.bound_s == pytest.approx(bound * step_s)
    assert solution.gap == pytest.approx(objective - bound)
    assert solution.status == status


@pytest.mark.parametrize("second", [True, False])
def test_the_least_budget_is_proven_if_it_is_for_each_choice(monkeypatch, clock, second: bool) -> None:
    """One that is not proven may be below that of all others."""
    gb = 10**9  # far above what is alive whatever is decided
    found = ((100 * gb, True), (120 * gb, second), (110 * gb, True))
    errors = [InfeasibleBudgetError(10, *least, (), 0) for least in found]
    choices = scripted(monkeypatch, {index: [error] for index, error in enumerate(errors)}, clock)
    monkeypatch.setattr(choices, "_described", lambda choice, error, time_limit_s: error)
    with pytest.raises(InfeasibleBudgetError) as caught:
        choices.best(10, 60, GAP)
    assert (caught.value.minimum_bytes, caught.value.proven) == (100 * gb, second)
    assert caught.value.bound_bytes == (100 * gb if second else 0)
    caught.value.leave(7)
    assert errors[0].minimum_bytes == 100 * gb  # it is kept for further budgets


def test_a_plan_taken_over_from_a_smaller_budget_claims_no_more(monkeypatch, clock) -> None:
    """The second choice finds nothing in time for the larger budget, though it has the faster plan."""
    answers = {0: [(0.2, 0.2), (0.1, 0.1)], 1: [(0.05, 0.05), TOO_LATE, (0.05, 0.05)], 2: [RuledOut()] * 2}
    choices = scripted(monkeypatch, answers, clock)
    (tighter, looser), _ = sweep(choices, [10**10, 2 * 10**10], 60, GAP, lambda *_: None)
    assert (tighter.calls, tighter.solution.status) == (choices[1].calls, "optimal")
    assert (looser.calls, looser.solution.objective_s) == (tighter.calls, tighter.solution.objective_s)
    assert (looser.solution.bound_s, looser.solution.status) == (0.0, "feasible")


def test_a_plan_taken_over_may_be_faster_than_the_bound_of_another_choice(monkeypatch, clock) -> None:
    """By a rounding error."""
    answers = {
        0: [(0.2, 0.2), (0.05001, 0.05001)],
        1: [(0.05, 0.05), RuledOut(), (0.05, 0.05)],
        2: [RuledOut()] * 2,
    }
    choices = scripted(monkeypatch, answers, clock)
    _, looser = sweep(choices, [10**10, 2 * 10**10], 60, GAP, lambda *_: None)[0]
    assert looser.solution.bound_s == looser.solution.objective_s
    assert (looser.solution.gap, looser.solution.status) == (0.0, "optimal")


def test_what_was_proved_for_a_larger_budget_holds_for_a_smaller_one(monkeypatch, clock) -> None:
    """In the first search there was no time for the third choice."""
    answers = {0: [(0.2, 0.2), (0.1, 0.1995 - 0.1)], 1: [RuledOut()] * 2, 2: [TOO_LATE, RuledOut()]}
    choices = scripted(monkeypatch, answers, clock)
    tighter, looser = sweep(choices, [10**10, 2 * 10**10], 60, GAP, lambda *_: None)[0]
    step_s = profile("gpt-8-blocks").step_s
    assert looser.solution.bound_s == pytest.approx(0.0995 * step_s)
    assert tighter.solution.bound_s == looser.solution.bound_s
    assert tighter.solution.gap == pytest.approx(0.1005)
    assert (tighter.solution.status, looser.solution.status) == ("feasible", "optimal")


@pytest.mark.parametrize("refused", [{0}, {1}, {2}, {0, 1}, {0, 2}, {0, 1, 2}])
def test_choices_under_which_policies_cannot_be_followed_are_left_out(monkeypatch, refused: set[int]) -> None:
    calls = partitions(profile("gpt-8-blocks"))
    build = Choice.__init__

    def picky(self: Choice, profile: Profile, calls_: Sequence[int], *rest: Any) -> None:
        if (place := calls.index(tuple(calls_))) in refused:
            raise PolicyError(f"not with choice {place}")
        build(self, profile, calls_, *rest)

    monkeypatch.setattr(Choice, "__init__", picky)
    choices = Choices(profile("gpt-8-blocks"), calls, "replay")
    if len(refused) == len(calls):
        with pytest.raises(PolicyError, match="not with choice 0"):
            choices.best(10**12, 60, GAP)
        return
    with pytest.raises(InfeasibleBudgetError) as caught:
        choices.best(1, 60, GAP)
    assert caught.value.proven
    allowed = [part for place, part in enumerate(calls) if place not in refused]
    assert [choices[index].calls for index in range(len(choices))] == allowed
    assert choices.best(caught.value.minimum_bytes, 60, GAP)[1].status == "optimal"


@pytest.mark.parametrize("proven", [True, False])
def test_only_a_proven_least_budget_is_told_without_policies(monkeypatch, clock, proven: bool) -> None:
    choices = scripted(monkeypatch, {}, clock)

    def infeasible(*_: Any) -> None:
        raise InfeasibleBudgetError(1, 100, proven)

    monkeypatch.setattr(Choices, "best", infeasible)
    assert choices._least_without_policies(60) == (100 if proven else 0)


@pytest.mark.parametrize(("proven", "note"), [(True, "infeasible"), (False, "no plan found in time")])
def test_a_budget_is_called_infeasible_if_it_is_proven(monkeypatch, clock, proven: bool, note: str) -> None:
    errors = [InfeasibleBudgetError(10, 100, proven), RuledOut(), RuledOut()]
    answers = {0: [errors[0], (0.1, 0.1)], 1: errors[1:2] * 2, 2: errors[2:] * 2}
    choices = scripted(monkeypatch, answers, clock)
    monkeypatch.setattr(choices, "_described", lambda choice, error, time_limit_s: error)
    found, notes = sweep(choices, [10**10, 2 * 10**10], 60, GAP, lambda *_: None)
    assert len(found) == 1
    assert notes == (f"10 GB = 9.313 GiB: {note}",)
