"""Checkpointing by hand, worked out by hand; `tests/api/test_tradeoff.py` holds it against torch's own checkpoint."""

from __future__ import annotations

import dataclasses

import pytest

from autoac_solver.plan.baselines import baselines, blocks_of, checkpointed
from autoac_solver.records.profile import ModuleCall, Profile
from tests.solver.profiles import FREE, two_blocks


def test_two_blocks_by_hand() -> None:
    """Kept are a block's input (40 bytes, the second block's) and, of a block that is not checkpointed, all of it."""
    frame = baselines(two_blocks())
    assert frame["name"].tolist() == ["none", "every block", "every 2nd block"]
    assert frame["blocks"].tolist() == [0, 2, 1]
    # none: both wide values, the second block's input and output, the loss. Every block: in the second block's forward.
    assert frame["peak_bytes"].tolist() == [
        1000 + 100 + 100 + 40 + 40 + 8,
        1000 + 40 + 100 + 40,
        1000 + 40 + 100 + 40 + 8,
    ]
    assert frame["extra_s"].tolist() == [0.0, 4.0, 2.0]
    assert frame["overhead"].tolist() == pytest.approx([0, 4 / 15, 2 / 15])


def test_live_bytes_of_full_checkpointing_by_hand() -> None:
    timeline = checkpointed(two_blocks(), (1, 3))
    forward = [1100, 1140, 1140, 1180, 1088]
    second = [1148, 1168, 1088]  # wide again, backward of narrow and wide
    first = [1128, 1148, 1048]
    assert timeline.live_bytes.tolist() == [*forward, *second, *first]


def test_every_block_pays_its_call_and_its_saved_tensors_but_nothing_for_each_op() -> None:
    costs = {**FREE, "sac": {"op": 100.0, "saved": 0.25, "call": 0.5}}
    assert checkpointed(two_blocks(costs), (1, 3)).extra_s == 4 + 2 * 0.5 + 3 * 0.25


def test_on_cpu_each_block_stashes_a_random_state() -> None:
    """5,056 bytes from a block's forward to its last release, and as many while it runs again."""
    timeline = checkpointed(two_blocks(device="cpu"), (1, 3))
    expected = [1100, 1140, 1140, 1180, 1088, 1148, 1168, 1088, 1128, 1148, 1048]
    stashed = [1, 1, 2, 2, 2, 3, 2, 2, 2, 1, 0]
    assert timeline.live_bytes.tolist() == [e + 5056 * s for e, s in zip(expected, stashed, strict=True)]


def test_what_a_plan_must_save_is_recomputed_by_hand() -> None:
    """Side effects (BatchNorm's statistics) happen twice under torch's checkpoint, which does not ask."""
    profile = two_blocks()
    tape = [dataclasses.replace(op, side_effect="wide" in op.name) for op in profile.tape]
    assert checkpointed(dataclasses.replace(profile, tape=tuple(tape)), (1, 3)).extra_s == 4


def renamed(profile: Profile, names: dict[str, str]) -> Profile:
    calls = [dataclasses.replace(call, fqn=names.get(call.fqn, call.fqn)) for call in profile.calls]
    return dataclasses.replace(profile, calls=tuple(calls))


def test_blocks_are_the_members_of_lists() -> None:
    profile = two_blocks()
    assert blocks_of(profile) == (1, 3)
    assert blocks_of(renamed(profile, {"blocks.0": "layer1.0", "blocks.1": "layer2.0"})) == (1, 3)
    # Without lists of modules: the coarsest regions of a plan, which are the same two here.
    assert blocks_of(renamed(profile, {"blocks.0": "encoder", "blocks.1": "decoder"})) == (1, 3)


def test_of_nested_lists_the_level_with_the_lower_peak() -> None:
    """Stages of one block each hold what the blocks hold; a list inside of the blocks checkpoints less."""
    profile = renamed(
        two_blocks(), {"blocks.0.wide": "blocks.0.parts.0", "blocks.1.wide": "blocks.1.parts.0"}
    )
    assert blocks_of(profile) == (1, 3)
    deeper = ModuleCall("blocks.1.parts.0.inner", 0, 4, "Wide", True, 12, 14, (2,))
    profile = dataclasses.replace(profile, calls=(*profile.calls, deeper))
    assert checkpointed(profile, (2, 4)).peak_bytes > checkpointed(profile, (1, 3)).peak_bytes
    assert blocks_of(profile) == (1, 3)
