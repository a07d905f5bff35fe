"""Four real processes on CPU (gloo): a slice of what `tests.parallel.table` tries in full."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

import autoac
from tests.parallel.models import batch, make
from tests.parallel.ranks import HERE, run_ranks

CASES = [
    ("Net", "FSDP2 by block", ["replay"], [0.8]),
    ("Net", "FSDP2, groups of ranks (HSDP)", ["sac"], [0.8]),
    ("Llama", "FSDP2, `mp_policy` bfloat16", ["sac"], [0.8]),
    ("ViT", "DDP", ["replay"], [0.7]),
    ("Net", "tensor parallelism and FSDP2", ["replay"], [0.8]),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks("trying_worker.py", tmp_path_factory.mktemp("four"), 4, 600.0, json.dumps(CASES))


@pytest.mark.parametrize(
    "index", range(len(CASES)), ids=lambda index: f"{CASES[index][0]}, {CASES[index][1]}"
)
def test_weights_are_equal_and_peaks_as_predicted(told: list[Any], index: int):
    for rank in told:
        [found] = rank[index]
        assert found["equal"]
        assert found["recomputing"]
        assert found["measured"] <= found["budget"]
        assert abs(found["measured"] / found["predicted"] - 1) < 0.01


def test_one_process_predicts_what_four_ranks_record(told: list[Any]):
    spec = autoac.parallel.FSDP2(world_size=4, units=["layers.*", "pair.*"])
    profile = autoac.profile(make(), batch(), mode="fake", parallel=spec)
    loose = autoac.solve(profile, "1GB")
    for rank in told:
        assert abs(rank[0][0]["unplanned"] / loose.predicted_peak_bytes - 1) < 0.01


def test_the_table_in_the_docs_is_of_ways_that_are_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(HERE), *sys.path])
    from tests.parallel.table import cases, written

    known = {(way, model, str(size)) for size in (2, 4) for model, way, _, _ in cases(size)}
    rows = written()
    assert rows
    assert set(rows) <= known
    assert not [row for row in rows.values() if "| no:" in row]
