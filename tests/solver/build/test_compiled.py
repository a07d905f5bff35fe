"""Compiled regions as decision groups, by hand and against exhaustive search."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from autoac_solver.build.build import build
from autoac_solver.plan.curve import Tradeoff
from autoac_solver.plan.partitions import blocks, partitions, whole
from autoac_solver.plan.planning import plan_budgets, plan_profile
from autoac_solver.plan.recorded.made import predicted_anew
from autoac_solver.plan.recorded.programs import with_regions
from autoac_solver.plan.recorded.step import step_of
from autoac_solver.problem.problem import Action, Problem
from autoac_solver.problem.simulator import simulate
from autoac_solver.problem.validate import validate
from autoac_solver.records.compiled import (
    CompiledPoint,
    CompiledRegion,
    CompiledTable,
    in_words,
    kept_ops,
    torchs_budget,
    undominated,
)
from autoac_solver.records.errors import InfeasibleBudgetError, PolicyError, ProfileError, ProfilingError
from autoac_solver.records.plan import PlanRecord
from autoac_solver.records.policies import Policy
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage
from autoac_solver.show.explanation import explain
from autoac_solver.show.page.content import page_content
from autoac_solver.show.refusals import why
from tests.solver.exhaustive import assert_agrees_with_exhaustive_search, budgets_around
from tests.solver.profiles import two_blocks

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = (1, 3)

FAST = CompiledPoint("torch:1", 100, 220, 30, 30, 2.0, 3.0)
MIDDLE = CompiledPoint("save:0", 50, 210, 50, 50, 2.0, 4.0)
SMALL = CompiledPoint("save:", 10, 200, 70, 70, 2.0, 6.0)


def compiled(
    profile: Profile, *points: CompiledPoint, calls: tuple[int, ...] = BLOCKS, unseen: int = 0
) -> Profile:
    return replace(profile, compiled=CompiledTable((CompiledRegion(calls, ("mm",), points),), unseen))


def test_memory_by_hand():
    """See `two_blocks` for the ops; a block's backward is where its saved tensors are unpacked and released."""
    profile = compiled(two_blocks(), SMALL, FAST)
    built = build(profile, BLOCKS, "compile")
    validate(built.problem)
    assert built.points == (("torch:1", "save:"),) * 2  # the fastest first
    small, fast = simulate(built.problem, [1, 1]), simulate(built.problem, [0, 0])
    forward, outputs = 1000 + 200, 40 + 10  # of block 0, which hands its output to block 1 and keeps 10
    assert small.live_bytes.tolist() == [
        *(forward, forward),
        *(forward + outputs,) * 2,
        1000 + 40 + 40 + 8 + 20,  # the loss: both outputs, its own, what both blocks keep
        *(1000 + 40 + 8 + 20 + 70,) * 2,
        1000 + 8 + 20 + 10 + 70,  # the gradient that block 1 hands on is there throughout block 0's backward
        1000 + 8 + 20 + 20,
    ]
    assert small.extra_s == 2 * 3.0
    assert fast.extra_s == 0
    assert fast.live_bytes[4] == small.live_bytes[4] + 2 * 90
    # Ops outside of the blocks: the loss, and a backward op after the last release.
    assert built.problem.step_s == 1 + 2 + 2 * 5.0


def test_an_output_that_is_kept_lives_to_its_regions_backward():
    held = replace(SMALL, holds_output=True)
    plain, holds = (
        simulate(build(compiled(two_blocks(), point), BLOCKS, "compile").problem, [0, 0])
        for point in (SMALL, held)
    )
    more = (holds.live_bytes - plain.live_bytes).tolist()
    assert more == [0, 0, 0, 0, 0, 40, 40, 40, 0]  # block 1's output while it goes back, then block 0's


@pytest.mark.parametrize(
    ("freed", "bytes_less"),
    [(49, [0, 0, 0, 0, 0, 0, 0, 20, 0]), (50, [0] * 9)],
    ids=["gone", "held by the step"],
)
def test_gradients_that_nobody_else_holds_are_freed_on_the_way(freed: int, bytes_less: list[int]):
    """The gradient that block 0 is given is made at tick 44; block 0's backward is over at 49."""
    profile = two_blocks()
    tape = (*profile.tape[:7], replace(profile.tape[7], reads=(7,)), profile.tape[8])
    storages = [replace(s, free=freed) if i == 7 else s for i, s in enumerate(profile.storage_table)]
    profile = replace(profile, tape=tape, storage_table=tuple(storages))
    assert (profile.tape[7].tick, profile.storage_table[7].alloc) == (48, 44)
    plain, sole = (
        simulate(build(compiled(profile, point), BLOCKS, "compile").problem, [0, 0])
        for point in (SMALL, replace(SMALL, sole_backward_bytes=30))
    )
    assert (plain.live_bytes - sole.live_bytes).tolist() == bytes_less


@pytest.mark.parametrize(
    ("outputs", "size", "more"),
    [((2,), 20, 40), ((2,), 40, 0), ((2, 4), 40, 40), ((), 20, 0)],
    ids=["a slice is given", "as large", "no gradient of the other one", "not known"],
)
def test_dense_gradients_that_code_makes_itself(outputs: tuple[int, ...], size: int, more: int):
    """Block 0's output has 40 bytes; the loss alone reads that of block 1, which stands for an unused one here."""
    profile = two_blocks()
    tape = (*profile.tape[:4], replace(profile.tape[4], reads=()), *profile.tape[5:7],
            replace(profile.tape[7], reads=(7,)), profile.tape[8])  # fmt: skip
    storages = [replace(s, bytes=size, free=49) if i == 7 else s for i, s in enumerate(profile.storage_table)]
    calls = [replace(c, differentiable=outputs) if c.fqn == "blocks.0" else c for c in profile.calls]
    told = replace(profile, tape=tape, storage_table=tuple(storages), calls=tuple(calls))
    untold = replace(told, calls=profile.calls)
    untold_bytes, told_bytes = (
        simulate(build(compiled(p, SMALL), BLOCKS, "compile").problem, [0, 0]).live_bytes
        for p in (untold, told)
    )
    assert (told_bytes - untold_bytes).tolist()[7] == more


@pytest.mark.parametrize(("freed", "less"), [(14, 40), (60, 0)], ids=["gone", "held by the user"])
def test_outputs_that_nobody_else_holds_are_freed_on_the_way(freed: int, less: int):
    profile = two_blocks()
    tape = (*profile.tape[:7], replace(profile.tape[7], reads=(7,)), profile.tape[8])
    storages = [
        replace(s, free={2: freed, 7: 49}[i]) if i in (2, 7) else s
        for i, s in enumerate(profile.storage_table)
    ]
    profile = replace(profile, tape=tape, storage_table=tuple(storages))
    held = replace(SMALL, holds_output=True)
    plain, sole = (
        simulate(build(compiled(profile, point), BLOCKS, "compile").problem, [0, 0])
        for point in (held, replace(held, sole_backward_bytes=30))
    )
    assert (plain.live_bytes - sole.live_bytes).tolist()[7] == less


def test_inputs_that_the_code_does_not_hold_are_freed_as_the_step_frees_them():
    profile = two_blocks()
    storages = [replace(s, free=21) if i == 2 else s for i, s in enumerate(profile.storage_table)]
    profile = replace(profile, storage_table=tuple(storages))
    free = replace(SMALL, name="save:0", holds_inputs=False)
    slow = replace(SMALL, forward_s=1.0)
    holds, frees = (
        simulate(build(compiled(profile, free, slow), BLOCKS, "compile").problem, [0, option])
        for option in (0, 1)
    )
    # Block 1's input is needed by the backward of its own code only.
    assert (holds.live_bytes - frees.live_bytes).tolist() == [0, 0, 0, 0, 40, 40, 40, 0, 0]


@pytest.mark.parametrize("unseen", [300, -300])
def test_what_was_measured_of_a_whole_step_counts_up_to_the_optimizer(unseen: int):
    profile = two_blocks()
    ops = (*profile.tape[:-1], replace(profile.tape[-1], backward=False))  # as an optimizer's
    profile = replace(profile, tape=ops)
    before, after = (
        simulate(build(compiled(profile, SMALL, unseen=u), BLOCKS, "compile").problem, [0, 0])
        for u in (0, unseen)
    )
    assert (after.live_bytes - before.live_bytes).tolist() == [unseen] * 8 + [0]


def random_points(rng: random.Random) -> tuple[CompiledPoint, ...]:
    names = ["torch:1", "torch:0.5", "eager", "save:", "save:0", "save:1", "save:0,1"]

    def point(name: str) -> CompiledPoint:
        kept, working = rng.randrange(40) * 10**5, rng.randrange(30) * 10**5
        backward = rng.randrange(90) * 10**5
        return CompiledPoint(
            name,
            kept,
            kept + working,
            backward,
            min(backward, rng.randrange(90) * 10**5),
            rng.random(),
            rng.random(),
            rng.random() < 0.3,
            rng.random() < 0.6,
        )

    return tuple(map(point, rng.sample(names, rng.randint(1, 5))))


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_agrees_with_exhaustive_search(solver: str):
    """Five of a GPT's blocks, of two kinds, each at one of up to five points."""
    rng = random.Random(1)
    profile = Profile.load(ROOT / "profiles" / "gpt-8-blocks-cpu.json")
    blocks = [index for index, call in enumerate(profile.calls) if call.class_name == "Block"]
    for _ in range(6):
        table = CompiledTable(
            (
                CompiledRegion(tuple(blocks[:2]), (), random_points(rng)),
                CompiledRegion(tuple(blocks[3:6]), (), random_points(rng)),
            )
        )
        built = build(replace(profile, compiled=table), blocks, "compile")
        validate(built.problem)
        assert len(built.regions) == 5
        assert {r.reason for r in built.refused} == {
            "it was not compiled and measured when the profile was made"
        }
        assert_agrees_with_exhaustive_search(built.problem, budgets_around(rng), solver)


@pytest.mark.parametrize("name", ["gpt-8-blocks-cpu"])
def test_memory_of_replayed_regions_is_that_of_engine_replay(name: str):
    """Where no region can be compiled, the problem is engine replay's."""
    profile = Profile.load(ROOT / "profiles" / f"{name}.json")
    blocks = [index for index, call in enumerate(profile.calls) if call.class_name == "Block"]
    rng = random.Random(2)
    failed = CompiledTable((CompiledRegion(tuple(blocks), (), (), FAILED),))
    mixed = build(replace(profile, compiled=failed), blocks, "compile").problem
    replayed = build(profile, blocks, "replay").problem
    for _ in range(20):
        decisions = random_decisions(rng, replayed)
        assert (
            simulate(mixed, decisions).live_bytes.tolist()
            == simulate(replayed, decisions).live_bytes.tolist()
        )
        assert simulate(mixed, decisions).extra_s == pytest.approx(simulate(replayed, decisions).extra_s)


def random_decisions(rng: random.Random, problem: Problem) -> list[int]:
    """Permitted by the groups one by one, and the same as those they must be like."""
    found = [rng.randrange(2) if not group.must_save else 0 for group in problem.groups]
    return [
        found[group.same_as] if group.same_as >= 0 else found[i] for i, group in enumerate(problem.groups)
    ]


@pytest.mark.parametrize("solver", ["highs"])
def test_compiled_and_replayed_regions_agree_with_exhaustive_search(solver: str):
    rng = random.Random(4)
    for _ in range(8):
        points = random_points(rng)
        points = tuple(replace(p, kept_bytes=p.kept_bytes // 10**4, forward_bytes=p.forward_bytes // 10**4,
                               backward_bytes=p.backward_bytes // 10**4,
                               sole_backward_bytes=p.sole_backward_bytes // 10**4) for p in points)  # fmt: skip
        first, second = rng.sample(BLOCKS, 2)
        table = CompiledTable(
            (CompiledRegion((first,), (), points), CompiledRegion((second,), (), (), FAILED))
        )
        built = build(replace(two_blocks(), compiled=table), BLOCKS, "compile")
        validate(built.problem)
        assert {len(group.options) == 2 for group in built.problem.groups} >= {True}
        assert_agrees_with_exhaustive_search(built.problem, budgets_around(rng), solver)


def test_dominated_points_are_no_options():
    slower, larger = replace(FAST, backward_s=4.0), replace(MIDDLE, kept_bytes=60, backward_s=4.5)
    assert undominated((slower, FAST, larger, MIDDLE, replace(FAST, name="eager"), SMALL)) == (
        FAST,
        MIDDLE,
        SMALL,
    )
    built = build(
        compiled(two_blocks(), slower, FAST, replace(FAST, name="eager", kept_bytes=1)), BLOCKS, "compile"
    )
    assert built.points == (("eager",),) * 2
    assert built.problem.groups[0].options[0].action is Action.SAVE


def test_a_larger_budget_is_never_slower_and_plans_are_saved(tmp_path: Path):
    profile = compiled(two_blocks(), FAST, MIDDLE, SMALL)
    curve = plan_budgets(profile, points=6, engine="compile")
    assert (curve.frame["extra_s"].diff().dropna() <= 0).all()
    assert (curve.frame["peak_bytes"] <= curve.frame["budget_bytes"]).all()
    assert curve.frame["overhead"].iloc[0] == curve.frame["extra_s"].iloc[0] / 13
    curve.save(tmp_path / "curve.json")
    assert Tradeoff.load(tmp_path / "curve.json").frame.equals(curve.frame)
    for row in range(len(curve.points)):
        record = curve.record(row)
        record.save(tmp_path / "plan.json")
        loaded = PlanRecord.load(tmp_path / "plan.json")
        assert loaded == record
        assert step_of(loaded).options == curve.points[row].solution.decisions
        assert all(region.wrapped and region.point != "eager" for region in record.regions)
    page_content([curve.record(0), curve.record(1)], 0)


def test_a_plan_in_words():
    record = plan_profile(compiled(two_blocks(), FAST, SMALL), 1260, engine="compile")
    assert [region.point for region in record.regions] == ["save:", "save:"]
    table = step_of(record).decisions
    assert table["decision"].tolist() == ["compiled", "compiled"]
    assert table["bytes"].tolist() == [10, 10]
    assert table["time_s"].tolist() == [3.0, 3.0]
    text = explain(record)
    assert "2 points of 1 distinct regions" in text
    assert "compiled, no heavy op kept" in text
    assert why(record, "blocks.0") == (
        "blocks.0: is a region, compiled, no heavy op kept: it keeps 10 bytes for backward"
    )


def test_points_in_words():
    heavy = ("mm", "conv", "mm")
    assert in_words("eager", heavy) == "not compiled"
    assert in_words("torch:1", heavy) == "compiled as torch does"
    assert in_words("torch:0.5", heavy) == "compiled as torch does at a budget of 0.5"
    assert in_words("save:", heavy) == "compiled, no heavy op kept"
    assert in_words("save:0,1,2", heavy) == "compiled, all heavy ops kept"
    assert in_words("save:1,2", heavy) == "compiled, kept: conv (1), mm (2)"
    assert (kept_ops("save:"), kept_ops("save:0,12"), torchs_budget("torch:0.25")) == ((), (0, 12), 0.25)
    for name in ("torch:1", "save:x", "eager", "save:1,"):
        with pytest.raises(ValueError, match="no point"):
            kept_ops(name)


FAILED = "graph break in user code"


def test_a_region_that_cannot_be_compiled_is_replayed(tmp_path: Path):
    fast, small = replace(FAST, forward_bytes=120), replace(SMALL, forward_bytes=60)
    table = CompiledTable((CompiledRegion((1,), (), (), FAILED), CompiledRegion((3,), (), (fast, small))))
    profile = replace(two_blocks(), compiled=table)
    built = build(profile, BLOCKS, "compile")
    validate(built.problem)
    assert built.points == ((), ("torch:1", "save:"))
    assert not built.refused
    curve = plan_budgets(profile, points=4, engine="compile")
    least, most = curve.record(0), curve.record(len(curve.points) - 1)
    for record, compiled_at, again in ((least, "save:", True), (most, "torch:1", False)):
        first, second = record.regions
        assert (first.fqn, first.point) == ("blocks.0", "eager")
        assert (second.fqn, second.point) == ("blocks.1", compiled_at)
        assert first.wrapped is again
        assert any(recomputed for _, recomputed in first.steps) is again
        record.save(tmp_path / "plan.json")
        assert step_of(PlanRecord.load(tmp_path / "plan.json")).options == step_of(record).options
    assert f"not compiled    'blocks.0', which engine replay runs: {FAILED}" in explain(least)
    assert why(least, "blocks.0").startswith(
        "blocks.0: is not compiled, so engine replay runs it: it is a region; "
    )
    assert set(step_of(least).decisions["region"]) == {"blocks.0", "blocks.1"}


def test_around_regions_that_are_not_compiled_replay_has_its_own_choices():
    """Without any compiled region, all of the choices of replay; with one, those beside it."""
    profile = two_blocks()
    failed, fine = CompiledRegion((1,), (), (), FAILED), CompiledRegion((3,), (), (FAST, SMALL))
    none = replace(profile, compiled=CompiledTable((failed, replace(fine, points=(), failure=FAILED))))
    assert set(partitions(none, "compile")) == {BLOCKS, *partitions(profile, "replay")}
    one = replace(profile, compiled=CompiledTable((failed, fine)))
    choices = partitions(one, "compile")
    assert choices[0] == BLOCKS
    assert all(3 in choice for choice in choices)
    spans = [(profile.calls[call].start, profile.calls[call].end) for call in range(len(profile.calls))]
    start, end = spans[3]
    assert all(spans[call][1] <= start or end <= spans[call][0] for c in choices for call in c if call != 3)
    for budget in (plan_profile(none, 10**6, engine="replay").unplanned_peak_bytes, 1300):
        fast, slow = (plan_profile(p, budget, engine=e) for p, e in ((profile, "replay"), (none, "compile")))
        assert slow.predicted_extra_s <= fast.predicted_extra_s + 1e-12
        assert slow.predicted_peak_bytes <= budget


def test_what_another_profile_predicts_of_the_same_plan():
    profile = compiled(two_blocks(), FAST, SMALL)
    record = plan_profile(profile, 1260, engine="compile")
    moved = predicted_anew(record, compiled(two_blocks(), FAST, SMALL, unseen=-7))
    assert moved.predicted_peak_bytes == record.predicted_peak_bytes - 7
    assert moved.unplanned_peak_bytes == record.unplanned_peak_bytes - 7
    assert moved.regions == record.regions
    assert step_of(moved).options == step_of(record).options


def test_what_cannot_be():
    with pytest.raises(ProfileError, match=r"no measured points .* engine='compile'"):
        plan_profile(two_blocks(), 10**6, engine="compile")
    profile = compiled(two_blocks(), FAST, SMALL)
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_profile(profile, 1000, engine="compile")
    assert (caught.value.minimum_bytes, caught.value.proven) == (1250, True)
    with pytest.raises(PolicyError, match="follows no policies"):
        plan_profile(profile, 10**6, engine="compile", policies=[Policy("MUST_SAVE", op="test.wide*")])
    with pytest.raises(ValueError, match="budget_of='reserved' needs to know each allocation"):
        plan_profile(profile, 10**6, engine="compile", budget_of="reserved")
    with pytest.raises(ProfilingError, match="no module"):
        plan_profile(profile, 10**6, engine="compile", regions=["nowhere"])


def changed(record: PlanRecord, **fields: object) -> PlanRecord:
    return with_regions(record, (replace(record.regions[0], **fields), *record.regions[1:]))


def test_damaged_plans_are_refused(tmp_path: Path):
    record = plan_profile(compiled(two_blocks(), FAST, SMALL), 1260, engine="compile")
    path = tmp_path / "plan.json"
    for wrong, message in (
        (changed(record, wrapped=False), "wrapped and neither compiled nor recomputed"),
        (changed(record, point="save:9"), r"a point .* did not measure"),
        (changed(record, point="torch:1"), "programs do not give its predicted peak"),
        (replace(changed(record), engine="replay"), "in a plan of engine 'replay'"),
    ):
        wrong.save(path)
        with pytest.raises(ProfileError, match=message):
            step_of(PlanRecord.load(path))
    with pytest.raises(ProfileError, match="regex"):
        changed(record, point="import os").save(path)


def test_damaged_profiles_are_refused(tmp_path: Path):
    path = tmp_path / "profile.json"
    for regions, message in (
        (
            (CompiledRegion((1, 3), (), (SMALL,)), CompiledRegion((3,), (), (FAST,))),
            "in two compiled regions",
        ),
        ((CompiledRegion((99,), (), (SMALL,)),), "is no call"),
        ((CompiledRegion((1,), (), ()),), "has no points"),
        ((CompiledRegion((1,), (), (SMALL,), "slow"),), "not compiled has compiled points"),
        ((CompiledRegion((1,), (), (SMALL,) * 11),), "more than 10 points"),
    ):
        replace(two_blocks(), compiled=CompiledTable(regions)).save(path)
        with pytest.raises(ProfileError, match=message):
            Profile.load(path)
    good = compiled(two_blocks(), FAST, SMALL)
    good.save(path)
    assert Profile.load(path) == good


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-8-blocks-cpu", [f"blocks.{i}" for i in range(8)]),  # not its norm and head, which hold little
        ("llama-8b-h200-estimated", [f"model.layers.{i}" for i in range(32)]),
    ],
)
def test_blocks_are_what_is_compiled_by_default(name: str, expected: list[str]):
    profile = Profile.load(ROOT / "profiles" / f"{name}.json")
    assert [profile.module_name(call) for call in blocks(profile)] == expected
    assert [profile.module_name(call) for call in whole(profile)] == [""]


def test_a_module_that_holds_several_blocks_gives_way_to_them():
    """An encoder and a decoder, each of three blocks of two parts: neither the stacks nor the parts are compiled."""
    calls, tape, storages, saved = [ModuleCall("", 0, -1, "Net", True, 0, 900)], [], [], []
    for stack in range(2):
        above = len(calls)
        calls.append(ModuleCall(f"stacks.{stack}", 0, 0, "Stack", True, 1 + 400 * stack, 399 + 400 * stack))
        for block in range(3):
            start = 2 + 400 * stack + 100 * block
            parent = len(calls)
            calls.append(
                ModuleCall(f"{calls[above].fqn}.{block}", 0, above, "Block", True, start, start + 50)
            )
            for part in range(2):
                at = start + 1 + 10 * part
                calls.append(
                    ModuleCall(f"{calls[parent].fqn}.{part}", 0, parent, f"Part{part}", True, at, at + 9)
                )
                tape.append(
                    Op("test.op.default", at + 1, len(calls) - 1, False, 1.0, (), (), (len(storages),))
                )
                saved.append(Saved(len(storages), len(calls) - 1, at + 2, 950, 960, 960))
                storages.append(Storage(100, at + 1, at + 5, "Activation"))
    profile = Profile(
        *("Net", "0", "0", "cpu", 0, "2.13.0", 1000),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=tuple(saved),
        calls=tuple(calls),
    )
    assert [profile.calls[call].class_name for call in blocks(profile)] == ["Block"] * 6
