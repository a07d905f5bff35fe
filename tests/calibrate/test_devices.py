"""Devices that are not here, and this one: ops as on CUDA, calibration, the check of a whole device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import autoac
from autoac.calibrate.device_table import calibrate, entries_of
from autoac.calibrate.models import LLAMA, RESNET, llama, resnet
from autoac.compare.selfcheck import selfcheck
from autoac.device import CudaDevice
from autoac.ops.info import op_info
from autoac.ops.signatures import Signature, TensorSpec
from autoac.price.meters import OpTimer
from autoac_solver.records.devices import find_device


class Attends(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm2d(2)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        return F.dropout(F.scaled_dot_product_attention(y, y, y, **self.options), 0.1)  # type: ignore[arg-type]


def ops_on(device: str, model: nn.Module, x: torch.Tensor) -> Counter[str]:
    return Counter(op.name for op in autoac.profile(model, x, device=device).tape)


def test_ops_that_cuda_takes():
    x = torch.randn(2, 2, 8, 32)
    single = ops_on("h200", Attends(is_causal=True), x)
    assert single["aten._scaled_dot_product_efficient_attention.default"] == 1
    assert single["aten.cudnn_batch_norm.default"] == single["aten.cudnn_batch_norm_backward.default"] == 1
    assert single["aten.native_dropout.default"] == single["aten.native_dropout_backward.default"] == 1
    half = ops_on("a100", Attends(is_causal=True).bfloat16(), x.bfloat16())
    assert half["aten._scaled_dot_product_flash_attention.default"] == 1
    assert half["aten.native_batch_norm.default"] == 1
    masked = ops_on("a100", Attends(attn_mask=torch.ones(8, 8, dtype=torch.bool)).bfloat16(), x.bfloat16())
    assert masked["aten._scaled_dot_product_efficient_attention_backward.default"] == 1
    newer = ops_on("h200", Attends(is_causal=True).bfloat16(), x.bfloat16())
    assert newer["aten._scaled_dot_product_cudnn_attention_backward.default"] == 1
    on_cpu = Counter(op.name for op in autoac.profile(Attends(), x).tape)
    assert on_cpu["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 1


def test_a_step_that_depends_on_values_is_run_for_another_device_if_it_can_be():
    class Reads(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            y = super().forward(input)
            return y * 2 if y.sum().item() > 0 else y

    profile = autoac.profile(Reads(8, 8), torch.randn(4, 8), device="a100")
    assert (profile.mode, profile.device) == ("real", "cuda")
    assert any("fake tensors will not do" in note for note in profile.notes)
    with pytest.raises(autoac.ProfilingError, match="reads a value on the host"):
        autoac.profile(Reads(8, 8).to("meta"), torch.randn(4, 8, device="meta"), device="a100")


def test_an_unknown_device_or_mode_is_refused_before_anything_runs():
    class Untouchable(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it ran")

    with pytest.raises(autoac.ProfileError, match="no cost table for device 'tpu'"):
        autoac.profile(Untouchable(2, 2), torch.ones(2), device="tpu")
    with pytest.raises(ValueError, match="possible are 'auto', 'real', 'fake'"):
        autoac.profile(Untouchable(2, 2), torch.ones(2), mode="imagined")  # type: ignore[arg-type]


def test_a_recorded_table_holds_this_devices_ops(tmp_path: Path):
    said: list[float] = []
    table = calibrate("here", torch.device("cpu"), "tiny", lambda _, share: said.append(share))
    assert said == sorted(said)
    assert table.source == "measured"
    assert {"on", "date", "torch", "models"} <= set(table.made)
    assert table.efficiency == (1.0, 1.0)
    table.save(tmp_path / "here.json")
    assert find_device(tmp_path / "here.json") == table
    model, sample = llama(LLAMA["tiny"], torch.float32, torch.device("cpu"))
    profile = autoac.profile(model, sample, device=tmp_path / "here.json")
    assert profile.time_shares["table"] > 0.5  # the same layers were timed, some of the rest lies between
    assert profile.time_shares.get("estimated", 0) < 0.2


def test_entries_are_the_distinct_ops():
    model, sample = resnet(RESNET["tiny"], torch.float32, torch.device("cpu"))
    profile = autoac.profile(model, sample)
    entries = list(entries_of(profile))
    assert len({entry.signature for entry in entries}) == len(entries) <= len(profile.signatures)
    by_text = {entry.signature: entry for entry in entries}
    for op in profile.tape:
        assert by_text[profile.signatures[op.signature]].time_s == op.time_s


@pytest.mark.slow
def test_the_check_of_a_device_passes_here():
    found = selfcheck(torch.device("cpu"), "tiny")
    assert found.ok
    assert [len(model.rows) for model in found.models] == [7, 7]
    for model in found.models:
        none, _, full, *plans = model.rows
        assert full.measured_peak_bytes < none.measured_peak_bytes
        assert all(
            plan.measured_peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans
        )
        assert all(row.equal for row in (none, *plans))
    assert not torch.are_deterministic_algorithms_enabled()


# -- signatures --------------------------------------------------------------------------------------------------------


def test_signatures_tell_what_matters_and_nothing_else():
    mm = torch.ops.aten.mm.default
    a, b = torch.randn(3, 4), torch.randn(4, 5)
    signature = Signature.of(mm, (a, b), {})
    assert str(signature) == "aten.mm.default(float32[3,4], float32[4,5])"
    assert signature == Signature.of(mm, (a + 1, b.clone()), {})
    assert signature != Signature.of(mm, (a, torch.randn(5, 4).t()), {})
    assert str(TensorSpec.of(torch.randn(5, 4).t())) == "float32[4,5/1,4]"
    assert str(Signature.of(mm, (a, [b, None]), {"scale": 2.0, "left_out": None})) == (
        "aten.mm.default(float32[3,4], [float32[4,5], None], scale=2.0)"
    )
    assert signature.moved_bytes([torch.empty(3, 5)]) == 4 * (12 + 20 + 15)
    assert TensorSpec.of(torch.randn(1, 4).expand(100, 4)).moved_bytes == 16


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(1, 4).expand(3, 4),
        torch.ones(3, dtype=torch.long),
        torch.ones(2, 3, dtype=torch.bool),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(1.5),
        torch.empty(0, 3),
    ],
)
def test_scratch_tensors_are_like_their_model(tensor: torch.Tensor):
    spec = TensorSpec.of(tensor)
    scratch = spec.scratch()
    assert TensorSpec.of(scratch) == spec
    assert scratch.isfinite().all()


def _attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: torch.randn(3, 4) @ torch.randn(4, 5), 2 * 3 * 4 * 5),
        (lambda: F.conv2d(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)), 2 * 2 * 4 * 6 * 6 * 3 * 9),
        (lambda: _attended(torch.randn(1, 2, 8, 16)), 2 * 2 * (1 * 2 * 8 * 8 * 16)),
        (lambda: torch.randn(3) + 1, 0),
    ],
)
def test_flops(run, expected: int):
    class Runs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (run() * self.scale).sum() * x

    profile = autoac.profile(Runs(), torch.ones(()))
    assert sum(op.flops for op in profile.tape if not op.backward) == expected


class Event:
    """A CUDA event of a device on which an op takes 1 ms, and the host 9 ms to have it launched once all is idle."""

    clock_ms, idle = 0.0, True

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda"
        self.at_ms = Event.clock_ms

    def synchronize(self) -> None:
        Event.idle = True

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_on_cuda_ops_are_timed_by_events_around_several_launches(monkeypatch: pytest.MonkeyPatch):
    """What a host's clock, or events around one launch, would measure is the host."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Event, "idle", True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    busy_s: list[float] = []
    monkeypatch.setattr(CudaDevice, "keep_busy", lambda self, seconds: busy_s.append(seconds))
    launches = 0

    class Launched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal launches
            launches += 1
            Event.clock_ms += 10.0 if Event.idle else 1.0
            Event.idle = False
            return func(*args, **(kwargs or {}))

    timer = OpTimer(torch.device("cuda"))
    x = torch.ones(3)
    with Launched():
        result, signature = timer.run(
            torch.ops.aten.sin.default, op_info(torch.ops.aten.sin.default), (x,), {}
        )
    assert torch.equal(result, x.sin())
    assert launches == 1 + 3 * (1 + 4) + 3 * (1 + 4) + 1  # for the host's time, and for the device's
    (time,) = timer.times().values()
    assert timer.times().keys() == {signature}
    assert time.time_s == pytest.approx(1e-3)
    assert time.host_s > 0
    assert len(busy_s) == 3  # the device is busy until the host has launched all four
    assert min(busy_s) > 4 * time.host_s
