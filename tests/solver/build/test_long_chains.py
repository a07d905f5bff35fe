"""Building takes time in proportion to the profile, also where all of a region's ops are one group."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from autoac_solver.build.build import build
from autoac_solver.records.profile import ModuleCall, Op, Profile, Saved, Storage

N_OPS = 100
REGION = 1


def chain_through_one_storage(n_ops: int) -> Profile:
    """Each op makes a storage, which autograd saves, and writes one that all of them write."""
    end = 3 * n_ops
    storages = [Storage(8, -1, end, "Input"), Storage(64, 3, end, "Activation")]
    tape = [Op("aten.first.default", 3, REGION, False, 1e-5, (0,), (), (1,))]
    saved = []
    for tick in range(4, 4 + n_ops):
        made = len(storages)
        storages.append(Storage(64, tick, tick + 2, "Activation"))
        tape.append(Op("aten.next_.default", tick, REGION, False, 1e-5, (made - 1, 1), (1,), (made,)))
        unpacked = end - tick
        saved.append(Saved(made, REGION, tick, unpacked, unpacked + 1, unpacked + 1))
    calls = (
        ModuleCall("", 0, -1, "Net", True, 1, n_ops + 6),
        ModuleCall("chain", 0, 0, "Chain", True, 2, n_ops + 5, (0,)),
    )
    return Profile(
        *("Net", "0", "0", "cpu", 0, "2.13.0", end),
        tape=tuple(tape),
        storage_table=tuple(storages),
        saved=tuple(saved),
        calls=calls,
    )


def lines_run(work: Callable[[], Any]) -> int:
    """Lines of Python that it runs, with each turn of a generator: the same number each time, unlike its time."""
    count = 0

    def step(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_building_takes_no_quadratic_work(engine: str):
    short, long = (chain_through_one_storage(n_ops) for n_ops in (N_OPS, 2 * N_OPS))
    assert len(build(long, [REGION], engine).problem.groups) == 1  # and what is made once is made
    base, double = (lines_run(lambda p=profile: build(p, [REGION], engine)) for profile in (short, long))
    assert base < double < 2.1 * base
