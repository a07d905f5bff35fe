"""Two and four real processes on CPU (gloo): a slice of what `tests.parallel.table` tries in full."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import autoac
from tests.parallel.models import batch, make
from tests.parallel.ranks import HERE, run_ranks

THREE = [0.9, 0.8, 0.7]
BOTH = ["replay", "sac"]
CASES = {
    2: [
        ("Net", "DDP", BOTH, THREE),
        ("Net", "two stages, `ScheduleGPipe`", BOTH, THREE),
        ("Net", "two stages, `Schedule1F1B`", BOTH, THREE),
        ("Llama", "FSDP2 by block", ["replay"], THREE),
        ("ViT", "tensor parallelism", ["sac"], THREE),
    ],
    4: [
        ("Net", "FSDP2 by block", BOTH, THREE),
        ("Net", "FSDP2, groups of ranks (HSDP)", BOTH, [0.8]),
        ("Net", "tensor parallelism and FSDP2", BOTH, THREE),
        ("Llama", "FSDP2, `mp_policy` bfloat16", ["sac"], THREE),
        ("ViT", "DDP", ["replay"], THREE),
    ],
}


@pytest.mark.parametrize("size", CASES)
def test_weights_are_equal_and_peaks_as_predicted(size: int, tmp_path: Path):
    told = run_ranks("trying_worker.py", tmp_path, size, 600.0, json.dumps(CASES[size]))
    for rank in told:
        for (model, way, engines, budgets), results in zip(CASES[size], rank, strict=True):
            assert len(results) == len(engines) * len(budgets)
            for found in results:
                case = (model, way, found)
                assert found["equal"], case
                assert found["recomputing"], case
                assert found["measured"] <= found["budget"], case
                assert abs(found["measured"] / found["predicted"] - 1) < 0.01, case
    if size == 4:  # what one process predicts for them
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
