"""Policies: what they match and how they stack, and constraints and hints in the program against exhaustive search."""

import dataclasses
import math
import random
from typing import Any

import pytest

from autoac_solver import (
    InfeasibleBudgetError,
    Simulator,
    minimum_peak,
    simulate,
    solve,
    violations,
)
from autoac_solver.build.stacking import stacked
from autoac_solver.problem.problem import RECOMPUTE, SAVE, DecisionGroup, Literal, save_or_recompute
from autoac_solver.records.errors import PolicyConflictError, PolicyError
from autoac_solver.records.policies import (
    REPEAT_COLLECTIVES,
    SAVE_COLLECTIVES,
    SAVE_TOP_K,
    AppliedPolicy,
    Matcher,
    Policy,
    never_recompute,
)
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage
from tests.solver import reference
from tests.solver.generators import random_problem, with_policies
from tests.solver.optimise.test_ilp import two_values

# -- the program -------------------------------------------------------------------------------------------------------


def with_groups(*groups: DecisionGroup):
    return dataclasses.replace(two_values(), groups=groups)


def test_what_must_be_recomputed_is_even_where_it_need_not():
    problem = with_groups(save_or_recompute(0, 1.0), save_or_recompute(0, 3.0, must_recompute="wanted"))
    solution = solve(problem, 10**12, gap=0)
    assert (solution.decisions, solution.extra_s, solution.status) == ((False, True), 3.0, "optimal")
    assert violations(problem, (False, False)) == ["group 1 takes option 0, which is refused: wanted"]
    assert minimum_peak(problem).decisions == (True, True)


def test_a_hint_turns_the_decision_and_the_time_stays_true():
    assert solve(two_values(), 170, gap=0).decisions == (True, False)
    hinted = with_groups(save_or_recompute(0, 1.0).hinted(2.5), save_or_recompute(0, 3.0))
    solution = solve(hinted, 170, gap=0)
    assert solution.decisions == (False, True)  # 3 s are less than 1 s and 2.5 s of hint
    assert (solution.extra_s, solution.hint_s) == (3.0, 0.0)
    assert (solution.bound_s, solution.gap) == pytest.approx((3.0, 0.0))
    weak = solve(with_groups(save_or_recompute(0, 1.0).hinted(1.5), save_or_recompute(0, 3.0)), 170, gap=0)
    assert (weak.decisions, weak.extra_s, weak.hint_s) == ((True, False), 1.0, 1.5)
    assert weak.bound_s == pytest.approx(2.5)


def test_a_hint_to_recompute_counts_against_keeping():
    small = solve(
        with_groups(save_or_recompute(0, 1.0).hinted(-0.5), save_or_recompute(0, 3.0)), 10**12, gap=0
    )
    assert (small.decisions, small.extra_s, small.hint_s) == ((False, False), 0.0, 0.5)
    large = solve(
        with_groups(save_or_recompute(0, 1.0).hinted(-1.5), save_or_recompute(0, 3.0)), 10**12, gap=0
    )
    assert (large.decisions, large.extra_s, large.hint_s) == ((True, False), 1.0, 0.0)
    assert large.bound_s == pytest.approx(1.0)


def test_what_nothing_can_be_is_refused():
    problem = with_groups(
        save_or_recompute(0, 1.0, must_recompute="wanted", requires=(1,)),
        save_or_recompute(0, 3.0, must_save="fixed"),
    )
    for search in (minimum_peak, lambda problem: solve(problem, 10**12)):
        with pytest.raises(ValueError, match="group 0 has no option left: wanted"):
            search(problem)
    with pytest.raises(ValueError, match="hint_s=inf is no duration"):
        solve(with_groups(save_or_recompute(0, 1.0).hinted(math.inf), save_or_recompute(0, 3.0)), 10**12)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize("seed", range(150))
def test_equals_exhaustive_search(seed: int, solver: str):
    """Least time and hints together, least peak, and what is refused."""
    rng = random.Random(1000 + seed)
    problem = with_policies(rng, random_problem(rng))
    simulator = Simulator(problem)
    choices = reference.all_choices(problem, lambda decisions: simulator.simulate(decisions).peak_bytes)
    if not choices:
        with pytest.raises(ValueError, match="has no option left"):
            minimum_peak(problem, solver=solver)
        return
    minimum_bytes = min(choice.peak_bytes for choice in choices)
    least = minimum_peak(problem, solver=solver)
    assert (least.status, least.peak_bytes) == ("optimal", minimum_bytes)
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(problem, minimum_bytes - 1, solver=solver)
    assert (caught.value.minimum_bytes, caught.value.proven) == (minimum_bytes, True)
    for budget_bytes in (minimum_bytes, rng.choice(choices).peak_bytes, 10**15):
        feasible = [choice for choice in choices if choice.peak_bytes <= budget_bytes]
        solution = solve(problem, budget_bytes, gap=0, solver=solver)
        best_s = min(choice.objective_s for choice in feasible)
        assert solution.status == "optimal"
        assert solution.objective_s == pytest.approx(best_s, rel=1e-9, abs=1e-9)
        assert solution.bound_s <= best_s * (1 + 1e-9) + 1e-12
        assert solution.extra_s == pytest.approx(reference.extra_s(problem, solution.decisions))
        assert solution.hint_s == pytest.approx(reference.hint_s(problem, solution.decisions))
        assert simulate(problem, solution.decisions).peak_bytes == solution.peak_bytes <= budget_bytes
        assert not violations(problem, solution.decisions)


# -- what a policy says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SAVE",), r"decision='SAVE' of a policy: possible are MUST_SAVE, MUST_RECOMPUTE, PREFER_SAVE"),
        (("MUST_CPU_OFFLOAD",), "decision='MUST_CPU_OFFLOAD'"),
        ((None,), "decision='None'"),
        (("MUST_SAVE", {}), r'names no op, module or region; op="\*" means every op'),
        (("PREFER_SAVE", {"op": "*", "weight": -1}), "weight=-1 .* finite number of at least 0"),
        (("PREFER_SAVE", {"op": "*", "weight": math.nan}), "weight=nan"),
        (("PREFER_SAVE", {"op": "*", "weight": "heavy"}), "weight='heavy'"),
        (("PREFER_SAVE", {"module": "a", "code": True}), "goes with MUST_SAVE and module= alone"),
        (("MUST_SAVE", {"module": "a", "op": "b", "code": True}), "goes with MUST_SAVE and module= alone"),
    ],
)
def test_refused_policies(arguments: Any, message: str):
    decision, *rest = arguments
    keywords: dict[str, Any] = rest[0] if rest else {"op": "*"}
    with pytest.raises(PolicyError, match=message):
        Policy(decision, **keywords)


def test_in_words():
    assert repr(Policy("MUST_SAVE", op="aten.mm")) == 'Policy("MUST_SAVE", op="aten.mm")'
    policy = Policy("PREFER_SAVE", op=["aten.mm", "aten.bmm"], module="layers.*", weight=2)
    assert repr(policy) == 'Policy("PREFER_SAVE", op=("aten.mm", "aten.bmm"), module="layers.*", weight=2)'
    assert str(SAVE_TOP_K) == "SAVE_TOP_K"
    assert repr(never_recompute("router")) == 'Policy("MUST_SAVE", module="router", code=True)'


def test_as_data_and_back():
    applied = AppliedPolicy(
        Policy("PREFER_SAVE", op="aten.mm", region=("a", "b"), weight=0.25, name="mine"), 7, 3
    )
    assert AppliedPolicy.from_data(applied.as_data()) == applied
    for change in ({"values": True}, {"followed": 8}, {"policy": {}}, {"values": "7"}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            AppliedPolicy.from_data({**applied.as_data(), **change})
    for change in ({"decision": "RUN"}, {"op": [1]}, {"weight": math.inf}, {"optional": 1}, {"name": None}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Policy.from_data({**applied.policy.as_data(), **change})


# -- what it is about --------------------------------------------------------------------------------------------------


def profile_of(ops: list[tuple[str, int]], calls: list[tuple[str, int]]) -> Profile:
    """Ops by name and module call, calls by name and parent; each op reads the one before, autograd saves all."""
    tape = tuple(
        Op(name, 10 * i + 5, module, False, 1.0, (i - 1,) if i else (), (), (i,))
        for i, (name, module) in enumerate(ops)
    )
    end = 10 * len(ops)
    tail = Op("aten.ones_like.default", end + 50, -1, True, 1.0, (), (), (len(ops),))
    storages = tuple(Storage(100, op.tick, op.tick + 11, "Activation") for op in tape)
    saved = tuple(
        Saved(i, op.module, op.tick + 1, end + 60 + i, end + 70 + i, end + 70 + i)
        for i, op in enumerate(tape)
    )
    spans: dict[int, list[int]] = {}
    for i, (_, module) in enumerate(ops):
        while module >= 0:
            spans.setdefault(module, []).append(i)
            module = calls[module][1]
    counts: dict[str, int] = {}
    rows = []
    for index, (name, parent) in enumerate(calls):
        first, last = min(spans[index]), max(spans[index])
        rows.append(ModuleCall(name, counts.get(name, 0), parent, "M", True, 10 * first, 10 * last + 9))
        counts[name] = counts.get(name, 0) + 1
    extra = Storage(100, end + 50, end + 90, "Temp")
    return Profile(
        "M", "", "", "cpu", 0, "", end + 100, (*tape, tail), (*storages, extra), saved, tuple(rows)
    )


OPS = [
    ("aten.mm.default", 1),
    ("aten.add.Tensor", 1),
    ("aten.relu.default", 2),
    ("aten.addmm.default", 3),
    ("aten.mm.default", 4),
    ("aten.sum.default", -1),
]
CALLS = [("", -1), ("blocks.0", 0), ("blocks.0.act", 1), ("blocks.1", 0), ("blocks.0", 0)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"op": "aten.mm"}, [0, 4]),
        ({"op": "aten.mm.default"}, [0, 4]),
        ({"op": "aten.add"}, [1]),
        ({"op": "aten.add*"}, [1, 3]),
        ({"op": ["aten.relu", "aten.sum"]}, [2, 5]),
        ({"module": "blocks.0"}, [0, 1, 2, 4]),
        ({"module": "blocks.0.*"}, [2]),
        ({"module": "blocks.*", "op": "*mm*"}, [0, 3, 4]),
        ({"region": "blocks.0"}, [0, 1, 2, 4]),
        ({"region": "blocks.0#1"}, [4]),
        ({"region": "blocks.[1-9]"}, [3]),
        ({"op": "*", "module": "", "region": "*"}, [0, 1, 2, 3, 4]),
        ({"module": ""}, [0, 1, 2, 3, 4]),
    ],
)
def test_what_it_is_about(arguments: Any, expected: list[int]):
    profile, region_of = profile_of(OPS, CALLS), [1, 1, 1, 3, 4, -1]
    matcher = Matcher(profile, (1, 3, 4))
    policy = Policy("MUST_SAVE", **arguments)
    assert [i for i in range(6) if matcher.fits(policy, profile.tape[i], region_of[i])] == expected


REGIONS = (1, 3, 4)


def test_constraints_and_hints_reach_their_groups():
    policies = (
        Policy("MUST_SAVE", op="aten.mm", region="blocks.0#1"),
        Policy("MUST_RECOMPUTE", op="aten.relu"),
        Policy("PREFER_SAVE", op="aten.add*", weight=0.5),
        Policy("PREFER_SAVE", op="aten.addmm", weight=2),
        Policy("PREFER_RECOMPUTE", module="blocks.*", weight=1),
    )
    stack = stacked(profile_of(OPS, CALLS), REGIONS, "replay", policies)
    groups = stack.built.problem.groups
    assert [group.must_save for group in groups] == [False, False, False, False, True]
    assert [group.must_not_save for group in groups] == [False, False, True, False, False]
    shares = [hint_of(group) / group.options[RECOMPUTE].time_s for group in groups]
    assert shares == pytest.approx([-1, 0.5 - 1, 0, 0.5 + 2 - 1, 0])  # they add up, and a MUST outweighs them
    assert stack.groups == tuple(map(frozenset, ((4,), (2,), (1, 3), (3,), (0, 1, 2, 3, 4))))
    applied = stack.applied((True, False, True, False, False))
    assert [(a.values, a.followed) for a in applied] == [(1, 1), (1, 1), (2, 2), (1, 1), (5, 2)]
    reversed_groups = stacked(profile_of(OPS, CALLS), REGIONS, "replay", policies[::-1]).built.problem.groups
    assert [group.hinted(0) for group in reversed_groups] == [group.hinted(0) for group in groups]
    assert list(map(hint_of, reversed_groups)) == pytest.approx(list(map(hint_of, groups)))


def hint_of(group: DecisionGroup) -> float:
    """Seconds for keeping (negative) or for recomputing."""
    return group.options[RECOMPUTE].hint_s - group.options[SAVE].hint_s


def test_what_only_others_read_is_bound_to_them():
    """Under replay it is kept for nobody but them."""
    profile = profile_of(OPS, CALLS)
    profile = dataclasses.replace(profile, saved=tuple(s for s in profile.saved if s.storage != 0))
    policy = Policy("MUST_RECOMPUTE", op="aten.mm", region="blocks.0")
    groups = stacked(profile, (1,), "replay", (policy,)).built.problem.groups
    assert not any(group.must_not_save for group in groups)
    assert [group.options[RECOMPUTE].requires for group in groups] == [(), (Literal(0, RECOMPUTE),), ()]
    assert stacked(profile, (1,), "sac", (policy,)).built.problem.groups[0].must_not_save


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            Policy("MUST_SAVE", op="aten.mn"),
            r'op="aten.mn"\) is about nothing .* its ops are .*aten.mm.default',
        ),
        (Policy("PREFER_SAVE", module="block.0"), "its modules are .*'blocks.0'"),
        (Policy("MUST_SAVE", region="act"), "its regions are .*'blocks.0#1'"),
        (Policy("MUST_RECOMPUTE", op="aten.sum"), "what it is about is in no region of the plan"),
    ],
)
def test_about_nothing(policy: Policy, message: str):
    with pytest.raises(PolicyError, match=message):
        stacked(profile_of(OPS, CALLS), REGIONS, "replay", (policy,))


def test_ready_made_ones_need_not_match():
    stack = stacked(profile_of(OPS, CALLS), REGIONS, "replay", (SAVE_COLLECTIVES, SAVE_TOP_K))
    assert stack.groups == (frozenset(), frozenset())


# -- clashes -----------------------------------------------------------------------------------------------------------


def clash(profile: Profile, regions: tuple[int, ...], engine: str, *policies: Policy) -> str:
    with pytest.raises(PolicyConflictError) as caught:
        stacked(profile, regions, engine, policies)
    return str(caught.value)


GATHER = "_c10d_functional.all_gather_into_tensor.default"


def gathering(rerun_s: float) -> Profile:
    profile = profile_of(
        [("aten.mm.default", 1), (GATHER, 1), ("aten.add.Tensor", 1)], [("", -1), ("layer", 0)]
    )
    tape = list(profile.tape)
    tape[1] = dataclasses.replace(tape[1], replayable=False, rerun_s=rerun_s, signature=0)
    return dataclasses.replace(profile, tape=tuple(tape), signatures=(f"{GATHER}(float32[25], 4, 4 ranks)",))


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_collective_runs_again_only_where_it_may(engine: str):
    profile = gathering(rerun_s=7.0)
    for policies in ((), (SAVE_COLLECTIVES, REPEAT_COLLECTIVES)):
        group = stacked(profile, [1], engine, policies).built.problem.groups[1]
        assert group.must_save
    assert (
        "unless a policy (REPEAT_COLLECTIVES)"
        in stacked(profile, [1], engine, ()).built.problem.groups[1].reason
    )
    stack = stacked(profile, [1], engine, [REPEAT_COLLECTIVES])
    group = stack.built.problem.groups[1]
    assert not group.must_save
    assert group.options[RECOMPUTE].time_s == pytest.approx(7.0, abs=1e-3)
    assert [one.followed for one in stack.applied([SAVE, RECOMPUTE, SAVE])] == [1]
    assert hint_of(group) == 0


def test_a_collective_without_a_price_may_not_run_again():
    with pytest.raises(PolicyError, match=r"between 4 ranks is not known: .*\"ranks\": 4, \"bandwidth\""):
        stacked(gathering(rerun_s=0.0), [1], "replay", [REPEAT_COLLECTIVES])
    with pytest.raises(PolicyError, match=r"permits nothing: aten.mm.default is no functional collective"):
        stacked(gathering(rerun_s=7.0), [1], "replay", [Policy("MAY_RECOMPUTE", op="aten.mm")])


def test_two_musts_on_one_value():
    save, again = Policy("MUST_SAVE", op="aten.mm"), Policy("MUST_RECOMPUTE", module="blocks.0")
    for policies in ((save, again), (again, save)):
        message = clash(profile_of(OPS, CALLS), REGIONS, "replay", *policies)
        assert f"{again} and {save} clash over the value of aten.mm.default in module 'blocks.0'" in message


def test_two_musts_on_ops_that_write_one_value():
    profile = profile_of(OPS, CALLS)
    tape = list(profile.tape)
    tape[1] = dataclasses.replace(tape[1], name="aten.add_.Tensor", writes=(0,), creates=(), reads=(0,))
    profile = dataclasses.replace(profile, tape=tuple(tape))
    save, again = Policy("MUST_SAVE", op="aten.mm"), Policy("MUST_RECOMPUTE", op="aten.add_")
    assert f"{again} and {save} clash" in clash(profile, (1,), "replay", save, again)


def test_two_musts_through_a_chain():
    """The add reads the product before it is written once more: it can run again only if that does too."""
    profile = profile_of(OPS, CALLS)
    tape = list(profile.tape)
    tape[2] = dataclasses.replace(tape[2], name="aten.relu_.default", writes=(0,), creates=(), reads=(0,))
    profile = dataclasses.replace(profile, tape=tuple(tape))
    save, again = Policy("MUST_SAVE", op="aten.mm"), Policy("MUST_RECOMPUTE", op="aten.add")
    message = clash(profile, (1,), "replay", save, again)
    assert f"{again} and {save} clash over the value of aten.add.Tensor" in message
    assert "which cannot be recomputed without the value of aten.mm.default" in message


def test_a_must_against_a_values_nature():
    profile = profile_of(OPS, CALLS)
    tape = list(profile.tape)
    tape[0] = dataclasses.replace(tape[0], name="_c10d_functional.all_reduce.default", replayable=False)
    profile = dataclasses.replace(profile, tape=tuple(tape))
    message = clash(profile, (1,), "replay", Policy("MUST_RECOMPUTE", op="_c10d_functional.*"))
    assert (
        "the value's nature (_c10d_functional.all_reduce.default: a collective runs once, unless a policy"
        in message
    )


def test_one_random_state_ties_dropouts_under_sac():
    profile = profile_of(OPS, CALLS)
    tape = list(profile.tape)
    for index in (0, 2):
        tape[index] = dataclasses.replace(tape[index], name="aten.bernoulli.p", random_bytes=8)
    profile = dataclasses.replace(profile, tape=tuple(tape))
    save = Policy("MUST_SAVE", op="aten.bernoulli", module="blocks.0.act")
    again = Policy("MUST_RECOMPUTE", op="aten.bernoulli", module="blocks.0")
    assert f"{again} and {save} clash" in clash(profile, (1,), "sac", save, again)
    other = Policy("MUST_RECOMPUTE", op="aten.add")
    stack = stacked(profile, (1,), "sac", (save, other))
    assert [group.must_save for group in stack.built.problem.groups] == [True, False, True]


def test_code_that_must_not_run_again():
    """Under sac its whole region is kept, under replay its values."""
    profile = profile_of(OPS, CALLS)
    quiet = never_recompute("blocks.0.act")
    for engine, saved in (("replay", [False, False, True, False, False]), ("sac", [True] * 3 + [False] * 2)):
        groups = stacked(profile, REGIONS, engine, (quiet,)).built.problem.groups
        assert [group.must_save for group in groups] == saved
    again = Policy("MUST_RECOMPUTE", op="aten.add")
    assert f"{again} and {quiet} clash" in clash(profile, REGIONS, "sac", quiet, again)
