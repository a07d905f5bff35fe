"""Backwards that keep the graph: what is recomputed is recomputed in each."""

import dataclasses

import numpy as np

from autoac_solver.build.build import build
from autoac_solver.problem.simulator import Simulator
from autoac_solver.records.profile import Op, Profile, Storage, Unpack
from tests.solver.profiles import two_blocks

BLOCK = 3
"""The second block: `wide` at tick 13 makes storage 3 (100 bytes), `narrow` at tick 15 reads it."""

SAVED = 2
"""What autograd saves there: storage 3, first used at tick 39, before the backward op at tick 40."""


def kept(keeps_last: bool = False) -> Profile:
    """Two blocks whose loss goes backward a second time, at tick 54, before the graph is released at tick 58."""
    profile = two_blocks()
    saved = tuple(dataclasses.replace(s, released=58, dropped=58) for s in profile.saved)
    made = Storage(20, 54, 58, "Temp")
    return dataclasses.replace(
        profile,
        tape=(*profile.tape, Op("test.backward.default", 54, -1, True, 2.0, (), (), (10,))),
        storage_table=(*profile.storage_table, made),
        saved=saved,
        unpacks=(
            Unpack(SAVED, 39, 41, 0, True),
            Unpack(1, 43, 45, 0, True),
            Unpack(0, 47, 49, 0, True),
            Unpack(SAVED, 53, 55 if keeps_last else 58, 1, keeps_last),
        ),
    )


def live_bytes(profile: Profile, recompute: bool) -> list[tuple[int, int]]:
    """Tick and live bytes, but for the resident ones, of each position from the loss on, by hand below."""
    problem = build(profile, [BLOCK], "replay").problem
    decisions = np.array([int(recompute and not group.must_save) for group in problem.groups])
    live_bytes = Simulator(problem).live_bytes(decisions)
    ops = zip(problem.position_op, problem.position_replayed, live_bytes, strict=True)
    return [(profile.tape[op].tick * (-1 if again else 1), int(live) - 1000) for op, again, live in ops][4:]


def test_each_backward_recomputes_anew():
    others = 100 + 40  # what the first block saves is kept: it is no region
    assert live_bytes(kept(), recompute=True) == [
        (30, others + 40 + 8),
        (-13, others + 8 + 100),  # `wide` again, for the first backward
        (-15, others + 8 + 100 + 40),
        (40, others + 8 + 100 + 20),
        (44, others + 8 + 2 * 20),
        (48, others + 8 + 2 * 20),
        (52, others + 8 + 2 * 20),
        (-13, others + 8 + 20 + 100),  # and for the second
        (-15, others + 8 + 20 + 100 + 40),
        (54, others + 8 + 100 + 2 * 20),
    ]


def test_saved_values_are_kept_for_all_of_them():
    ops = [entry for entry in live_bytes(kept(), recompute=False) if entry[0] > 0]
    assert [live for _, live in ops] == [288, 268, 288, 288, 288, 288]


def test_two_backwards_take_twice_the_time():
    once, twice = (build(profile, [BLOCK], "replay").problem for profile in (two_blocks(), kept()))
    assert [g.options[1].time_s for g in twice.groups] == [2 * g.options[1].time_s for g in once.groups]


def test_under_another_engine_such_a_module_is_no_region():
    (refusal,) = build(kept(), [BLOCK], "sac").refused
    assert refusal.reason.startswith("a second backward goes over its graph")
