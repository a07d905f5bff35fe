"""Building takes time in proportion to the profile, also where all of a region's ops are one group."""

import time

import pytest

from autoac_solver.build.build import build
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage

N_OPS = 10_000
REGION = 1


def chain_through_one_storage() -> Profile:
    """Each op makes a storage, which autograd saves, and writes one that all of them write."""
    end = 3 * N_OPS
    storages = [Storage(8, -1, end, "Input"), Storage(64, 3, end, "Activation")]
    tape = [Op("aten.first.default", 3, REGION, False, 1e-5, (0,), (), (1,))]
    saved = []
    for tick in range(4, 4 + N_OPS):
        made = len(storages)
        storages.append(Storage(64, tick, tick + 2, "Activation"))
        tape.append(Op("aten.next_.default", tick, REGION, False, 1e-5, (made - 1, 1), (1,), (made,)))
        unpacked = end - tick
        saved.append(Saved(made, REGION, tick, unpacked, unpacked + 1, unpacked + 1))
    calls = (
        ModuleCall("", 0, -1, "Net", True, 1, N_OPS + 6),
        ModuleCall("chain", 0, 0, "Chain", True, 2, N_OPS + 5, (0,)),
    )
    return Profile(
        *("Net", "0", "0", "cpu", 0, "2.13.0", end),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=tuple(saved),
        calls=calls,
    )


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_building_takes_no_quadratic_time(engine: str):
    profile = chain_through_one_storage()
    start = time.process_time()
    built = build(profile, [REGION], engine)
    assert len(built.problem.groups) == 1
    assert time.process_time() - start < 4  # once 6 to 24, now below 1
