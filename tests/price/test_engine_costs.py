"""What the engines' bookkeeping costs: found once for ops of a size, and by nothing that the engines would see."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoac.execute import chains
from autoac.execute.chains import LINKS, Chains, LinkTimes, Seconds, evicting
from autoac.execute.engines import ENGINES
from autoac.price import engine_costs as costs
from autoac.price.engine_costs import MOST_BETWEEN_BYTES, engine_costs

CPU = torch.device("cpu")


def test_costs_are_found_once_for_ops_of_a_size():
    assert engine_costs(CPU, 1000) == engine_costs(CPU)
    assert engine_costs(CPU, 10**12) == engine_costs(CPU, MOST_BETWEEN_BYTES)
    engine_costs(CPU)["replay"]["op"] = -1.0  # a profile's own
    for found in (engine_costs(CPU), engine_costs(CPU, MOST_BETWEEN_BYTES)):
        assert found.keys() == ENGINES.keys() - {"compile"}  # what it costs is measured with each region
        for engine, parts in found.items():
            assert parts.keys() == asdict(ENGINES[engine].model.costs()).keys()
            assert all(math.isfinite(s) and 0 <= s < 1 for s in parts.values()), parts
            assert parts["op"] > 0


def test_what_empties_the_caches_is_not_recorded():
    seen: list[Any] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    evict = evicting(2**18)
    with Seen():
        evict()
    assert not seen


def test_how_much_slower_bookkeeping_is_between_large_ops():
    warm = {"with": [(3.0, 9.0), (4.0, 9.0), (9.0, 9.0)], "without": [(1.0, 0.0), (1.0, 0.0), (1.0, 0.0)]}
    cold = {"with": [(9.0, 1.0), (6.0, 1.0), (99.0, 1.0)], "without": [(0.0, 1.0), (0.0, 1.0), (0.0, 1.0)]}
    pair = ("with", "without")
    assert LinkTimes(warm, cold).slower(pair) == 9.0 / 3.0
    assert LinkTimes(warm, cold).slower(pair, pair) == 9.0 / 3.0
    assert LinkTimes(cold, warm).slower(pair) == 1.0  # noise
    assert LinkTimes(warm, {**cold, "with": [(1e6, 0.0)] * 3}).slower(pair) == chains._MOST_SLOWER


def test_recording_has_a_factor_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Between large ops all other bookkeeping takes three times as long, and recording twice."""
    plain = dict.fromkeys(("saving", "not saving", "once"), 0.0)

    def seconds(self: Chains, runs: Mapping[str, Any], rounds: int = 3) -> Seconds:
        cold = "once" not in runs
        factor, recording = (3.0, 2.0) if cold else (1.0, 1.0)
        forward = {**plain, "replay all": factor * 1e-4 * LINKS + recording * 1e-3 * LINKS}
        for engine in ("replay", "sac"):
            forward |= dict.fromkeys((f"{engine} saving", f"{engine} not saving"), factor * 1e-4 * LINKS)
            forward[f"{engine} once"] = factor * 1e-4
        return {name: [(forward[name], 0.0)] * rounds for name in runs}

    monkeypatch.setattr(Chains, "_seconds", seconds)
    monkeypatch.setattr(Chains, "op_s", lambda _: 0.0)
    costs._costs_of.cache_clear()
    try:
        near, far = engine_costs(CPU), engine_costs(CPU, MOST_BETWEEN_BYTES)
    finally:
        costs._costs_of.cache_clear()
    assert far["replay"]["record"] == pytest.approx(2 * near["replay"]["record"]) == pytest.approx(2e-3)
    assert far["replay"]["op"] == pytest.approx(3 * near["replay"]["op"]) == pytest.approx(1.5e-4)
    assert far["sac"]["call"] == pytest.approx(3 * near["sac"]["call"])


def test_measuring_within_autocast_leaves_its_casts(monkeypatch: pytest.MonkeyPatch):
    """A loop within one autocast goes on with them. Chains of engine sac clear them where they have autocast."""
    cleared = []
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: cleared.append(1))
    costs._costs_of.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        found = engine_costs(torch.device("cpu"))
        assert not cleared
    assert found.keys() >= {"replay", "sac"}
