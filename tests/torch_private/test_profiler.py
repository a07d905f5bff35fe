"""The profiler's events."""

import os
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint

from autoac import torch_private

FLOAT = 4


def test_allocation_ranges():
    kept = []
    with torch_private.AllocationRanges() as ranges:
        torch.empty(1000)
        with ranges.range("first"):
            a = torch.empty(10)
            b = torch.empty(20)
            del a
            kept.append(b)
        torch.empty(1000)
        with ranges.range("second"):
            kept.append(torch.empty(5))
        with ranges.range("nothing"):
            pass
    assert ranges.deltas == {
        "first": [10 * FLOAT, 20 * FLOAT, -10 * FLOAT],
        "second": [5 * FLOAT],
        "nothing": [],
    }


def test_allocations_inside_of_an_op():
    x = torch.randn(1000, 3).t()
    with torch_private.AllocationRanges() as ranges, ranges.range("sort"):
        result = torch.sort(x, dim=1)
    deltas = ranges.deltas["sort"]
    assert sum(deltas) == 3000 * (FLOAT + 8)  # values and indices stay
    live = [sum(deltas[: i + 1]) for i in range(len(deltas))]
    assert max(live) > sum(deltas)  # and there was more in between
    del result


def test_cpu_allocations():
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
    ) as profile:
        a = torch.empty(10)
        address = a.data_ptr()
        del a
    events = torch_private.cpu_allocations(torch_private.raw_events(profile))
    assert [(where, size) for _, where, size in events] == [(address, 10 * FLOAT), (address, -10 * FLOAT)]
    assert events[0][0] <= events[1][0]


def test_cpu_ops_lists_ops_by_their_start_and_not_autograds_ranges():
    x = torch.randn(4, 4, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=False) as prof:
        x.mm(x).sin().sum().backward()
    found = torch_private.cpu_ops(torch_private.raw_events(prof))
    times = [when for when, _ in found]
    assert times == sorted(times)
    names = [name for _, name in found]
    assert [name for name in names if name in ("aten::mm", "aten::sin", "aten::cos")] == [
        *("aten::mm", "aten::sin"),  # forward
        *("aten::cos", "aten::mm", "aten::mm"),
    ]
    assert all(name.count("::") == 1 for name in names)


def test_tells_whether_torchs_profiler_runs():
    assert not torch_private.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch_private.is_profiled()
    assert not torch_private.is_profiled()


def test_the_profiler_does_not_announce_itself():
    """In a process of its own: Kineto reads the level of its log once."""
    code = """
import os, torch
from autoac.measure import measure_peak
measure_peak(lambda: torch.ones(10))
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_level_of_the_profilers_log_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    with torch_private.quiet_profiler():
        assert int(os.environ["KINETO_LOG_LEVEL"]) > 0
    assert "KINETO_LOG_LEVEL" not in os.environ
    monkeypatch.setenv("KINETO_LOG_LEVEL", "0")
    with torch_private.quiet_profiler():
        assert os.environ["KINETO_LOG_LEVEL"] == "0"
    assert os.environ["KINETO_LOG_LEVEL"] == "0"
