"""What autoac asks of a device: the CPU's answers, CUDA's by torch's, and those for a kind it does not know."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autoac.device import (
    CpuDevice,
    CudaDevice,
    Device,
    OtherDevice,
    current_device,
    device_for,
    gpu_random_states,
)
from autoac.measure import measure_peak

CPU, CUDA, OTHER = (device_for(torch.device(kind)) for kind in ("cpu", "cuda", "meta"))
ALL = (CPU, CUDA, OTHER)


def test_kinds():
    assert [type(device) for device in ALL] == [CpuDevice, CudaDevice, OtherDevice]
    assert [device.known for device in ALL] == [True, True, False]
    assert [device.memory_events for device in ALL] == [True, False, False]
    assert [device.counts_memory for device in ALL] == [False, True, False]
    assert [device.asynchronous for device in ALL] == [False, True, False]
    assert [device.on_hosts_processors for device in ALL] == [True, False, False]
    assert device_for(torch.device("cuda", 1)).device == torch.device("cuda", 1)


def test_each_kind_answers_everything():
    asked = [name for name in {*vars(Device), *Device.__annotations__} if not name.startswith("_")]
    assert len(asked) > 20
    assert not [name for device in ALL for name in asked if not hasattr(device, name)]


@pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_cuda_allocates_blocks(size: int, rounded: int):
    assert [device.allocated_bytes(size) for device in ALL] == [size, rounded, size]


def test_memory_of_the_host(monkeypatch: pytest.MonkeyPatch):
    assert CPU.total_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < CPU.free_bytes() <= CPU.total_bytes()
    assert OTHER.total_bytes() == 0
    assert OTHER.free_bytes() > 0
    monkeypatch.setattr(os, "sysconf_names", {})  # as on macOS
    assert CPU.free_bytes() == CPU.total_bytes()


def test_the_hosts_clock():
    start = CPU.now()
    result, seconds = CPU.timed(lambda: time.sleep(0.01) or 3)
    assert result == 3
    assert 0.01 <= seconds <= CPU.now() - start
    start, cpu_s = CPU.now(), time.process_time()
    busy_s, wall_s = CPU.step_seconds(lambda: time.sleep(0.05))
    # The process's time is that of all its threads, so it may be more than what the clock shows.
    assert 0 <= busy_s <= time.process_time() - cpu_s
    assert 0.05 <= wall_s <= CPU.now() - start
    calls: list[int] = []
    CPU.launched_s(lambda: calls.append(1), 4, 0.0)
    assert len(calls) == 5  # one before, which is not timed


@pytest.mark.parametrize("device", ["meta", "cuda:77"])
def test_memory_that_cannot_be_measured(device: str):
    with pytest.raises(ValueError, match=f"cannot measure memory on {device!r}"):
        measure_peak(lambda: pytest.fail("called"), device)
    assert CPU.not_measurable() == ""


@pytest.mark.parametrize("device", [CPU, OTHER])
def test_no_count_where_the_allocator_keeps_none(device: Device):
    with pytest.raises(NotImplementedError, match=str(device.device)):
        device.memory_allocated()
    with pytest.raises(NotImplementedError, match=str(device.device)):
        device.counted(lambda: None)


def test_generators():
    assert CPU.generator_devices() == OTHER.generator_devices() == []
    assert CUDA.generator_devices() == [torch.device("cuda")]


class Cuda:
    """Stands for `torch.cuda` with one GPU, and notes what is called in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.called: list[str] = []
        self.allocated = 1000
        self.peak = 9000
        functions: dict[str, Callable[..., Any]] = {
            "synchronize": lambda device=None: None,
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.allocated + 1000,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
            "device_count": lambda: 1,
            "mem_get_info": lambda device: (5, 7),
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "current_device": lambda: 0,
            "get_device_name": lambda device: "a GPU",
            "get_rng_state_all": lambda: ["state"],
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, self._noted(name, function))

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.called.append(name)
            return function(*args)

        return noted

    def step(self) -> str:
        """Takes 300 bytes, and leaves 100 of them."""
        self.called.append("step")
        self.peak, self.allocated = self.allocated + 300, self.allocated + 100
        return "done"


def test_peak_by_cudas_allocator(monkeypatch: pytest.MonkeyPatch):
    cuda = Cuda(monkeypatch)
    found = measure_peak(cuda.step, "cuda")
    assert (found.peak_above_start_bytes, found.end_above_start_bytes, found.result) == (300, 100, "done")
    assert found.timeline is None
    steps = ["synchronize", "reset_peak_memory_stats", "memory_allocated", "step", "synchronize"]
    assert [name for name in cuda.called if name != "device_count"][:5] == steps


def test_answers_that_are_torchs(monkeypatch: pytest.MonkeyPatch):
    cuda = Cuda(monkeypatch)
    assert CUDA.free_bytes() == 5 + 1000
    assert CUDA.memory_allocated() == 1000
    assert CUDA.name() == "a GPU"
    assert CUDA.is_here()
    assert current_device("cuda") == torch.device("cuda", 0)
    assert [state for _, state in gpu_random_states()] == [["state"]]
    cuda.called.clear()
    CUDA.now()
    assert cuda.called == ["synchronize"]


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert current_device("cuda") is None
    assert current_device("cpu") == torch.device("cpu")
    assert gpu_random_states() == []
    assert [device.is_here() for device in ALL] == [True, False, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    result, seconds = CUDA.timed(lambda: torch.ones(1000, device="cuda"))
    assert result.is_cuda
    assert seconds > 0
    kept, count = CUDA.counted(lambda: torch.ones(1000, device="cuda"))
    assert count.after_bytes - count.before_bytes == CUDA.allocated_bytes(kept.nbytes)
    assert 0 < CUDA.free_bytes() <= CUDA.total_bytes()


def test_memory_that_the_allocator_holds_in_reserve_is_free(monkeypatch: pytest.MonkeyPatch):
    """After a step that ran out of memory, the device has none left, but the allocator may hand out what it has."""
    for name, value in {
        "mem_get_info": (300, 80_000),
        "memory_reserved": 79_000,
        "memory_allocated": 20_000,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert CUDA.free_bytes() == 59_300


def test_options_of_the_allocator_count_in_sizes(monkeypatch: pytest.MonkeyPatch):
    mib = 2**20
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    assert CUDA.allocated_bytes(65 * mib) == 80 * mib
    assert CUDA.allocated_bytes(0) == 0
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert CUDA.allocated_bytes(65 * mib + 1) == 65 * mib + 512


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_own_time_is_not_that_of_the_launch():
    """The host takes some 10 us and more to launch a copy of a few bytes, the device a tenth of it."""
    known = device_for(torch.device("cuda:0"))
    small, large = (torch.zeros(size, device="cuda") for size in (4, 2**28))
    call = small.neg_
    launching_s = min(known.launching_s(call, 16) for _ in range(5))
    assert known.launched_s(call, 16, launching_s) < 0.7 * launching_s
    launching_s = min(known.launching_s(large.neg_, 4) for _ in range(5))
    assert isinstance(known, CudaDevice)
    assert known.timed(lambda: known.keep_busy(0.02))[1] == pytest.approx(0.02, rel=0.3)
    assert known.launched_s(large.neg_, 4, launching_s) > 4 * launching_s
