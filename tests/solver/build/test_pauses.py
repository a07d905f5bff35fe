"""Where the recording is paused, and that what is planned with is what the pauses cost."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Container, Mapping
from pathlib import Path

import pytest

from autoac_solver.build.build import build
from autoac_solver.build.engines import engine_model
from autoac_solver.problem.problem import RECOMPUTE
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.plan import Pause
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage

PROFILES = Path(__file__).resolve().parents[3] / "profiles"
COSTS = {"replay": {"op": 1.0, "pause": 1.0, "record": 0.0, "saved": 0.0, "call": 0.0}}


def pauses(
    profile: Profile, region: int, recorded: set[int], never: Container[str] = ()
) -> tuple[Pause, ...]:
    return engine_model("replay").pauses(profile, region, recorded, never)


def layers(**changes: Mapping[str, object]) -> Profile:
    """A region with four layers, the first two of them in a block. Each layer runs two ops and a view.

    Args:
        changes: by name of a module, to its call; "op" with a number, to an op.
    """
    names = ["", "region", "region.a", "region.a.x", "region.a.y", "region.b", "region.c"]
    spans = [(0, 90), (1, 88), (10, 50), (11, 25), (30, 45), (60, 75), (80, 87)]
    parents = [-1, 0, 1, 2, 2, 1, 1]
    calls = [
        ModuleCall(name, 0, parent, "Layer", True, start, end, (), 1, plain=True)
        for name, parent, (start, end) in zip(names, parents, spans, strict=True)
    ]
    calls = [dataclasses.replace(call, **changes.get(call.fqn, {})) for call in calls]
    tape = [
        Op("test.op.default", tick, module, False, 1.0, (i,), (), (i + 1,))
        for i, (tick, module) in enumerate(
            [(12, 3), (20, 3), (31, 4), (40, 4), (55, 1), (61, 5), (70, 5), (81, 6), (85, 6)]
        )
    ]
    tape = [dataclasses.replace(op, **changes.get(f"op {i}", {})) for i, op in enumerate(tape)]
    storages = [Storage(8, -1, 99, "Input"), *(Storage(8, op.tick, 99, "Activation") for op in tape)]
    storages.append(Storage(8, -1, 99, "Buffer"))
    return Profile(
        *("Net", "0", "0", "cpu", 0, "2.13.0", 99),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=(),
        calls=tuple(calls),
        costs=COSTS,
    )


REGION, BUFFER = 1, 10
X, Y, B, C = (
    Pause("region.a.x", 0, 2, 3),
    Pause("region.a.y", 2, 4, 3),
    Pause("region.b", 5, 7, 3),
    Pause("region.c", 7, 9, 3),
)


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [(set(), (X, Y, B, C)), ({0}, (Y, B, C)), ({3, 4}, (X, B, C)), ({1, 2, 6, 8}, ())],
)
def test_the_recording_pauses_where_nothing_is_recorded(recorded: set[int], expected: tuple[Pause, ...]):
    assert pauses(layers(), REGION, recorded) == expected


COUNTS = {"reads": (BUFFER,), "writes": (BUFFER,), "creates": ()}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"op 6": {"writes": (5,)}}, (X, Y, C)),  # what another layer made
        ({"op 6": COUNTS}, (X, Y, B, C)),  # a counter, which no other op reads
        ({"op 6": COUNTS, "op 0": {"reads": (0, BUFFER)}}, (X, Y, C)),
        # an op that makes nothing reads it, but may be recorded for what it writes
        ({"op 6": COUNTS, "op 3": {"reads": (2, BUFFER), "writes": (3,), "creates": ()}}, (X, C)),
        ({"region.b": {"plain": False}}, (X, Y, C)),  # a module of the user's, which may do as it likes
        ({"region.a": {"plain": False}}, (X, Y, B, C)),
        (
            {"region.c": {"fqn": "region.b", "call": 1, "start": 57, "end": 58}},
            (X, Y),
        ),  # a call that runs no op
        ({"region.b": {"views": 0}}, (X, Y, C)),  # too short to be worth it
    ],
)
def test_where_it_must_not(changes: dict[str, dict[str, object]], expected: tuple[Pause, ...]):
    assert pauses(layers(**changes), REGION, set()) == expected


@pytest.mark.parametrize("op_s", [0.1, 0.9, 2.7])
def test_wrapping_takes_no_less_than_nothing(op_s: float):
    """Where all ops may run in pauses and all else is free, rounding must not make a gain of it."""
    costs = {"replay": {**COSTS["replay"], "op": op_s, "pause": 0.0}}
    profile = layers(region={"views": 3, "end": 78}, **{"region.a": {"views": 2}})
    tape = tuple(op for op in profile.tape if op.tick != 55)
    saved = (Saved(2, 3, 13, unpacked=95, released=97, dropped=97),)
    built = build(dataclasses.replace(profile, tape=tape, saved=saved, costs=costs), [REGION], "replay")
    assert [region.wrap_s for region in built.problem.regions] == [0.0]
    assert len(built.problem.shared) == 3


def test_modules_that_are_regions_elsewhere_do_not_pause():
    assert pauses(layers(), REGION, set(), never={"region.a.x"}) == (Y, B, C)


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
        recomputed = [not group.must_save and dice.random() < share for group in built.problem.groups]
        expected = sum(
            group.options[RECOMPUTE].time_s
            for group, again in zip(built.problem.groups, recomputed, strict=True)
            if again
        )
        for index, tape in enumerate(built.regions):
            steps = built.steps(profile, index, recomputed)
            recorded = {position for position, (_, again) in enumerate(steps) if again}
            if not recorded:
                continue
            made = pauses(profile, tape.call, recorded, never)
            hidden = sum(pause.seen for pause in made)
            expected += len(steps) + profile.calls[tape.call].views - hidden + len(made)
            seen_pauses += len(made)
        assert simulator.extra_s(recomputed) == pytest.approx(expected)
    assert seen_pauses > 10
