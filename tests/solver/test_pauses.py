"""Where the recording is paused, and that what is planned with is what the pauses cost."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from autoac_solver.build import build
from autoac_solver.pauses import Pause, Stretch, pauses, stretches
from autoac_solver.profile import EngineCosts, ModuleCall, Op, Profile, Storage
from autoac_solver.simulator import Simulator

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
COSTS = EngineCosts(replay_op=1.0, replay_pause=1.0, replay_record=0.0, replay_saved=0.0, replay_call=0.0)


def nested(**changes: dict[str, object]) -> Profile:
    """A region with two layers; the first has two parts. Each part, and the second layer, runs two ops and a view.

    Args:
        changes: by name of a module, to its call; "ops" by number of an op.
    """
    names = ["", "region", "region.a", "region.a.x", "region.a.y", "region.b"]
    spans = [(0, 90), (1, 80), (10, 50), (11, 25), (30, 45), (60, 75)]
    parents, views = [-1, 0, 1, 2, 2, 1], [3, 3, 2, 1, 1, 1]
    calls = [
        ModuleCall(name, 0, parent, "Layer", True, start, end, (), view)
        for name, parent, (start, end), view in zip(names, parents, spans, views, strict=True)
    ]
    calls = [dataclasses.replace(call, **changes.get(call.fqn, {})) for call in calls]
    tape = [
        Op("test.op.default", tick, module, False, 1.0, (i,), (), (i + 1,))
        for i, (tick, module) in enumerate([(12, 3), (20, 3), (31, 4), (40, 4), (55, 1), (61, 5), (70, 5)])
    ]
    tape = [dataclasses.replace(op, **changes.get(f"op {i}", {})) for i, op in enumerate(tape)]
    storages = [Storage(8, -1, 99, "Input"), *(Storage(8, op.tick, 99, "Activation") for op in tape)]
    return Profile(
        *("Net", "0", "0", "cpu", 0, "2.13.0", 99),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=(),
        calls=tuple(calls),
        costs=COSTS,
    )


REGION = 1
A, X, Y, B = (
    Pause("region.a", 0, 4),
    Pause("region.a.x", 0, 2),
    Pause("region.a.y", 2, 4),
    Pause("region.b", 5, 7),
)


def test_stretches():
    assert stretches(nested(), REGION) == [
        Stretch(A, -1, 0),
        Stretch(X, 0, 3),
        Stretch(Y, 0, 3),
        Stretch(B, -1, 3),
    ]


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (set(), (A, B)),
        ({0}, (Y, B)),
        ({3, 4}, (X, B)),
        ({1, 2}, (B,)),
        ({1, 2, 6}, ()),
    ],
)
def test_the_recording_pauses_where_nothing_is_recorded(recorded: set[int], expected: tuple[Pause, ...]):
    assert pauses(nested(), REGION, recorded) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"op 0": {"writes": (0,)}}, (Y, B)),  # what the region's first op reads
        ({"op 5": {"reads": (9,), "writes": (9,), "creates": ()}}, (A, B)),  # a counter that nobody reads
        ({"region.a.y": {"reshapes": True}}, (X, B)),
        ({"region.a": {"class_name": "OptimizedModule"}}, (B,)),
        ({"region.b": {"views": 0}}, (A,)),  # too short to be worth it
    ],
)
def test_where_it_must_not(changes: dict[str, dict[str, object]], expected: tuple[Pause, ...]):
    assert pauses(nested(**changes), REGION, set()) == expected


def test_modules_that_are_regions_elsewhere_do_not_pause():
    assert pauses(nested(), REGION, set(), never={"region.a"}) == (X, Y, B)


@pytest.mark.parametrize("name", ["gpt-8-blocks-cpu", "unet-3-levels-cpu"])
def test_what_is_planned_with_is_what_the_pauses_cost(name: str):
    """The price of decisions, counted from the pauses that are made with them."""
    profile = dataclasses.replace(Profile.load(PROFILES / f"{name}.json"), costs=COSTS)
    parts = ("Block", "DownBlock2D", "UpBlock2D", "UNetMidBlock2D")
    regions = [i for i, call in enumerate(profile.calls) if call.class_name in parts]
    built = build(profile, regions, "replay")
    never = {profile.calls[region].fqn for region in regions}
    dice, simulator, seen_pauses = random.Random(1), Simulator(built.problem), 0
    for share in (0.0, 0.01, 0.02, 0.02, 0.05, 0.05, 0.1, 0.3, 0.8):
        recomputed = [not unit.must_save and dice.random() < share for unit in built.problem.units]
        expected = sum(
            unit.time_s for unit, again in zip(built.problem.units, recomputed, strict=True) if again
        )
        for index, tape in enumerate(built.regions):
            steps = built.steps(profile, index, recomputed)
            recorded = {position for position, (_, again) in enumerate(steps) if again}
            if not recorded:
                continue
            made = pauses(profile, tape.call, recorded, never)
            unseen = {pause.fqn: pause for pause in made}
            hidden = sum(
                pause.end - pause.start + next(c.views for c in profile.calls if c.fqn == fqn)
                for fqn, pause in unseen.items()
            )
            assert len(unseen) == len(made)
            expected += len(steps) + profile.calls[tape.call].views - hidden + len(made)
            seen_pauses += len(made)
        assert simulator.extra_s(recomputed) == pytest.approx(expected)
    assert seen_pauses > 10
