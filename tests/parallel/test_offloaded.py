"""FSDP2 with torch's `CPUOffloadPolicy`, on a device that is not the CPU: see `offloaded`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autoac_solver.build.engines.rerun import CPU_RANDOM_STATE_BYTES
from tests.parallel.models import make
from tests.parallel.offloaded import CASES
from tests.second_device import ran


@pytest.fixture(scope="module")
def told(device_library: Path) -> Any:
    return json.loads(ran("tests.parallel.offloaded", device_library))


@pytest.mark.parametrize("case", CASES)
def test_an_absent_rank_takes_what_was_predicted(told: Any, case: str):
    for engine, peaks in told["absent"][case].items():
        for predicted, counted, wrapped in peaks:
            # Selective checkpointing keeps the CPU's random state for each region: on the device only if that is it.
            states = wrapped * CPU_RANDOM_STATE_BYTES if engine == "sac" else 0
            assert 0 <= predicted - counted <= states, engine
        (loose, least, between) = peaks
        assert loose[2] == 0 < least[2]
        assert least[0] < between[0] < loose[0]


def test_copies_to_the_device_are_beside_what_is_gathered(told: Any):
    for predicted, counted in told["gathering"]:
        assert predicted == counted


@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_a_model_that_is_here(told: Any, engine: str):
    found = told["here"][engine]
    assert found["device"] == "toy:0"
    assert all(found["equal"])
    assert all(predicted == counted for predicted, counted, _ in found["peaks"])
    assert found["peaks"][1][2] > 0
    # The host waits for the copies of gradients, to memory that is not pinned, and not for those of parameters.
    assert found["waiting"] == ["aten._to_copy.default"] * len(list(make().parameters()))
