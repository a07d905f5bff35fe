"""A step of two micro-batches, small enough to work out by hand, as if they came in any order."""

from __future__ import annotations

import dataclasses

from autoac_solver.records.profile import IN_ITS_ORDER, ModuleCall, Op, Profile, Saved, Storage


def two_calls(released: int = 9) -> Profile:
    """A call on 8 elements and one on 4; each makes an activation, then two gradients, of which the first call's stay.

    By tick: 2 forward, 8 and 9 backward of the first call; 12 forward, 18 and 19 backward of the second; 30 optimizer.
    """
    ticks = (2, 8, 9, 12, 18, 19, 30)
    storages = [
        Storage(100, -1, 40, "Parameter", "weight"),
        Storage(10, -1, 40, "Parameter", "bias"),
        Storage(32, 0, 12, "Input"),
        Storage(80, 2, 10, "Activation"),
        Storage(100, 8, 40, "Gradient", "weight"),
        Storage(10, 9, 40, "Gradient", "bias"),
        Storage(16, 0, 40, "Input"),
        Storage(40, 12, 20, "Activation"),
        Storage(100, 18, 19, "Temp"),
        Storage(10, 19, 20, "Temp"),
        Storage(
            7, 2, 15, "Activation"
        ),  # the first call's output, which the loop holds until the second has returned
    ]
    made = {2: (3, 10), 8: (4,), 9: (5,), 12: (7,), 18: (8,), 19: (9,)}
    tape = tuple(
        Op("test.op.default", tick, -1, tick in (8, 9, 18, 19), 1.0, (), (), made.get(tick, ()))
        for tick in ticks
    )
    return Profile(
        model="Net",
        model_fingerprint="",
        op_fingerprint="",
        device="cpu",
        device_bytes=0,
        torch_version="",
        end=40,
        tape=tape,
        storage_table=tuple(storages),
        saved=(Saved(3, 0, 2, 8, released, released), Saved(7, 1, 12, 18, 19, 19)),
        calls=(
            ModuleCall("", 0, -1, "Net", True, 1, 5, (2,)),
            ModuleCall("", 1, -1, "Net", True, 11, 15, (6,)),
        ),
        call_elements=(8, 4),
        notes=(f"two sizes. {IN_ITS_ORDER}",),
    )


def test_what_each_call_may_find():
    profile = two_calls()
    found = profile.in_any_order()
    assert found.any_order
    assert not found.notes[0].endswith(IN_ITS_ORDER)
    before, added = found.storage_table[: len(profile.storage_table)], found.storage_table[11:]
    # Made by the first call, and added to what is there: alive during its own op and the next.
    assert [(s.alloc, s.free) for s in before[4:6]] == [(8, 12), (9, 18)]
    assert before[:4] == profile.storage_table[:4]
    assert before[6:] == profile.storage_table[6:]
    assert set(added) == {
        Storage(100, 1, 40, "Gradient", "weight"),
        Storage(10, 1, 40, "Gradient", "bias"),
        Storage(7, 1, 8, "Temp"),  # an earlier call's output, until this call returns
        Storage(16, 1, 40, "Input"),  # the second input as large as the first
    }
    assert found.resident_bytes == profile.resident_bytes
    assert found.calls_below_root(["x"]) == profile.calls_below_root(["x"])
    assert found.in_any_order() is found


def test_equal_or_overlapping_calls_are_left_alone():
    for profile in (
        dataclasses.replace(two_calls(), call_elements=(4, 4)),
        dataclasses.replace(two_calls(), call_elements=()),
        two_calls(released=13),  # the first call's graph is alive in the second
    ):
        assert profile.in_any_order() is profile
