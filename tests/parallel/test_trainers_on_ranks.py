"""The callbacks for Trainer and Lightning, and accelerate's `prepare`, on two real processes (gloo)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.ranks import run_ranks

CASES = ["trainer_ddp", "trainer_fsdp2", "accelerate_fsdp2", "lightning_ddp", "lightning_fsdp2"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    for library in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(library)
    return run_ranks("trainers_worker.py", tmp_path_factory.mktemp("trainers"))


@pytest.mark.parametrize("case", CASES)
def test_weights_are_equal_and_the_peak_as_predicted(told: list[Any], case: str):
    first, second = (rank[case] for rank in told)
    for rank in (first, second):
        assert "raised" not in rank, rank
        assert rank["equal"]
        assert rank["recomputing"]
        assert rank["predicted"] <= rank["budget"]
        # Of one step only, in which gloo's threads may hold a buffer on.
        assert 0.99 < rank["measured"] / rank["predicted"] < 1.05
    assert first["id"] == second["id"]
