"""What the engines' bookkeeping costs: found once for ops of a size, and by nothing that the engines would see."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoac import costs
from autoac.costs import MOST_BETWEEN_BYTES, engine_costs

CPU = torch.device("cpu")


def test_costs_are_found_once_for_ops_of_a_size():
    assert engine_costs(CPU, 1000) is engine_costs(CPU)
    assert engine_costs(CPU, 10**12) is engine_costs(CPU, MOST_BETWEEN_BYTES)
    for found in (engine_costs(CPU), engine_costs(CPU, MOST_BETWEEN_BYTES)):
        seconds = dataclasses.asdict(found)
        assert all(math.isfinite(s) and 0 <= s < 1 for s in seconds.values()), seconds
        assert found.replay_op > 0
        assert found.sac_op > 0


def test_what_empties_the_caches_is_not_recorded():
    seen: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    evict = costs._evicting(2**18)
    with Seen():
        evict()
    assert not seen


def test_how_much_slower_bookkeeping_is_between_large_ops():
    warm = {"with": [(3.0, 9.0), (4.0, 9.0), (9.0, 9.0)], "without": [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]}
    cold = {"with": [(9.0, 1.0), (6.0, 1.0), (99.0, 1.0)], "without": [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]}
    pair = ("with", "without")
    assert costs._slower([pair], warm, cold) == 9.0 / 3.0
    assert costs._slower([pair, pair], warm, cold) == 9.0 / 3.0
    assert costs._slower([pair], cold, warm) == 1.0  # noise
    assert costs._slower([pair], warm, {**cold, "with": [(1e6, 0.0)] * 3}) == costs._MOST_SLOWER


def test_recording_has_a_factor_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Between large ops all other bookkeeping takes three times as long, and recording twice."""
    ops = costs._OPS

    def seconds(device: torch.device, between: Any, names: Any = None) -> costs.Seconds:
        factor = 1.0 if names is None else 3.0
        recorded = factor * 1e-4 * ops + (1.0 if names is None else 2.0) * 1e-3 * ops
        forward = dict.fromkeys(("saving", "not saving", "once", "modules"), 0.0)
        for engine in ("replay", "sac"):
            forward |= dict.fromkeys((f"{engine} saving", f"{engine} not saving"), factor * 1e-4 * ops)
            forward[f"{engine} once"] = factor * 1e-4
        forward |= {"replay all": recorded, "replay paused": factor * 1e-4}
        return {name: [(s, 0.0)] * 3 for name, s in forward.items() if names is None or name in names}

    monkeypatch.setattr(costs, "_seconds", seconds)
    monkeypatch.setattr(costs, "_op_seconds", lambda _: 0.0)
    costs._warm_seconds.cache_clear()
    costs._engine_costs.cache_clear()
    try:
        near, far = costs.engine_costs(CPU), costs.engine_costs(CPU, MOST_BETWEEN_BYTES)
    finally:
        costs._warm_seconds.cache_clear()
        costs._engine_costs.cache_clear()
    assert far.replay_record == pytest.approx(2 * near.replay_record) == pytest.approx(2e-3)
    assert far.replay_op == pytest.approx(3 * near.replay_op) == pytest.approx(1.5e-4)
    assert far.sac_call == pytest.approx(3 * near.sac_call)
