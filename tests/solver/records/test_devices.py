"""Cost tables: looked up, interpolated, estimated; sizes as the device's allocator rounds them; damaged files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from autoac_solver.allocator.caching import CachingAllocator
from autoac_solver.plan.planning import plan_profile
from autoac_solver.records.collectives import over
from autoac_solver.records.devices import DeviceTable, Entry, Link, cuda_block_bytes, find_device, on_device
from autoac_solver.records.errors import ProfileError
from autoac_solver.records.profile import UNSTEADY, Op, Profile

ROOT = Path(__file__).resolve().parents[3]


def table(**changes: object) -> DeviceTable:
    made = DeviceTable(
        name="toy",
        kind="cuda",
        title="a toy",
        memory_bytes=10**9,
        block_bytes=512,
        matrix_flops={"bfloat16": 100e9, "float32": 10e9, "": 10e9},
        bandwidth=1e9,
        launch_s=1e-6,
        efficiency=(0.5, 1.0),
        source="datasheet",
        made={"from": "nowhere"},
        links=(Link("wire", 8, 100e6), Link("net", 64, 10e6)),
        costs={"replay": {"op": 1e-6}},
        entries=(
            Entry("mm(a)", "aten.mm.default", "float32", 1_000, 10, 1e-3, 1e-5),
            Entry("mm(b)", "aten.mm.default", "float32", 100_000, 10, 1e-1, 1e-5),
            Entry("add(a)", "aten.add.Tensor", "float32", 0, 400, 4e-6, 0.0),
        ),
    )
    return dataclasses.replace(made, **changes)


def op(name: str, dtype: str = "float32", flops: int = 0, moved_bytes: int = 0) -> Op:
    return Op(
        name, 1, -1, False, 0.5, (), (), (), signature=0, dtype=dtype, flops=flops, moved_bytes=moved_bytes
    )


def test_an_entry_is_looked_up():
    assert table().time_of(op("aten.mm.default", flops=1), "mm(a)") == (1e-3, 1e-5, "table")


def test_between_entries_log_time_is_linear_in_log_work():
    seconds, spread, how = table().time_of(op("aten.mm.default", flops=10_000), "mm(other)")
    assert (spread, how) == (0.0, "interpolated")
    assert seconds == pytest.approx(1e-2)
    assert table().time_of(op("aten.mm.default", flops=1_000), "mm(other)") == (1e-3, 0.0, "interpolated")


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        (op("aten.mm.default", flops=10**9), 10**9 / (10e9 * 0.5) + 1e-6),  # more work than any entry
        (
            op("aten.mm.default", "bfloat16", flops=10**9),
            10**9 / (100e9 * 0.5) + 1e-6,
        ),  # no entry of this type
        (
            op("aten.mm.default", "int8", flops=10**9),
            10**9 / (10e9 * 0.5) + 1e-6,
        ),  # the rate of anything else
        (op("aten.gelu.default", moved_bytes=10**6), 10**6 / 1e9 + 1e-6),
        (op("aten.gelu.default"), 1e-6),
    ],
)
def test_anything_else_is_estimated_by_roofline(asked: Op, seconds: float):
    found, _, how = table().time_of(asked, "?")
    assert how == "estimated"
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "moved_bytes", "ranks", "sent_bytes", "bandwidth"),
    [
        ("all_gather_into_tensor", 5000, 4, 3000, 100e6),  # 1000 bytes of each of four ranks
        ("reduce_scatter_tensor", 5000, 4, 3000, 100e6),
        ("all_reduce", 8000, 4, 6000, 100e6),  # 4000 bytes, there and back
        ("all_to_all_single", 8000, 4, 3000, 100e6),
        ("broadcast", 8000, 4, 4000, 100e6),
        ("all_reduce", 3200, 16, 3000, 10e6),  # the first link does not join so many
    ],
)
def test_a_collective_takes_the_time_of_its_bytes_on_the_link(
    name: str, moved_bytes: int, ranks: int, sent_bytes: int, bandwidth: float
):
    name = f"_c10d_functional.{name}.default"
    recorded_op = op(name, moved_bytes=moved_bytes)
    recorded_one = dataclasses.replace(
        recorded(), tape=(recorded_op,), signatures=(f"{name}(float32[250], {over(ranks)})",)
    )
    [moved] = on_device(recorded_one, table(kind="cpu", efficiency=(0.5, 0.5))).tape
    expected = sent_bytes / (bandwidth * 0.5) + 1e-6
    assert (moved.time_s, moved.again_s) == (pytest.approx(expected), pytest.approx(expected))
    [apart] = on_device(recorded_one, table(links=(Link("wire", 2, 1e9),))).tape
    assert apart.rerun_s == 0  # nothing joins them


def recorded() -> Profile:
    return Profile.load(ROOT / "profiles" / "gpt-8-blocks-cpu.json")


def test_a_profile_on_another_device():
    profile, device = recorded(), table()
    moved = on_device(profile, device)
    assert (moved.device, moved.device_name, moved.device_bytes) == ("cuda", "a toy", 10**9)
    assert moved.costs == device.costs
    for before, after in zip(profile.storage_table, moved.storage_table, strict=True):
        assert after.bytes % 512 == 0
        assert 0 <= after.bytes - before.bytes < 512
    launches = 0.0
    for before, after in zip(profile.tape, moved.tape, strict=True):
        time_s, _, time_from = device.time_of(before, profile.signatures[before.signature])
        # A rate's estimate has the launch in it, which is the host's.
        on_host = device.launch_s if time_from == "estimated" else 0.0
        assert (after.host_s, after.time_s) == (device.launch_s, pytest.approx(time_s - on_host))
        launches += device.launch_s
    assert moved.lanes.host_s == pytest.approx(launches)
    assert moved.step_s == moved.lanes.end_s >= moved.lanes.device_s
    assert sum(moved.time_shares.values()) == pytest.approx(1)
    assert set(moved.time_shares) <= {"table", "interpolated", "estimated"}
    assert not any(o.workspace_bytes for o in moved.tape)
    assert any("datasheet" in note for note in moved.notes)
    noted = dataclasses.replace(profile, notes=("it rained", f"{UNSTEADY}, said the clock"))
    assert on_device(noted, device).notes == ("it rained", *moved.notes)  # its times are gone
    plan = plan_profile(moved, "80%")
    assert plan.predicted_peak_bytes <= 800_000_000


def test_a_table_of_the_same_kind_keeps_the_workspace():
    profile = recorded()
    moved = on_device(profile, table(kind="cpu", block_bytes=1))
    assert [o.workspace_bytes for o in moved.tape] == [o.workspace_bytes for o in profile.tape]
    assert moved.resident_bytes == profile.resident_bytes


def test_a_table_is_read_back_as_written(tmp_path: Path):
    table().save(tmp_path / "toy.json")
    assert DeviceTable.load(tmp_path / "toy.json") == table()
    assert find_device(tmp_path / "toy.json") == table()


SOURCES = Path(__file__).resolve().parents[3] / "profiles" / "README.md"


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h200", "l4"])
def test_known_devices(name: str):
    device = find_device(name.upper())
    assert (device.name, device.kind, device.block_bytes) == (name, "cuda", 512)
    if device.source == "datasheet":
        assert not device.entries
        assert max(device.efficiency) < 1
        assert "datasheet" in device.made["from"]
    assert [link.ranks for link in device.links] == ([] if name == "l4" else [8, 10**6])
    # Each rate has its source beside it.
    cells = [[cell.strip() for cell in line.split("|")] for line in SOURCES.read_text().splitlines()]
    told = [row[2:4] for row in cells if row[1:2] == [f"`{name}`"] and row[4]]
    assert told == [[link.name, f"{link.bandwidth / 1e9:g}"] for link in device.links]


def test_an_unknown_device_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        ProfileError, match=r"no cost table for device 'h900': known are a100, .*h200.*autoac calibrate"
    ):
        find_device("h900")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bandwidth", 0),
        ("bandwidth", "1e9"),
        ("memory_bytes", 1.5),
        ("block_bytes", 0),
        ("launch_s", -1),
        ("kind", "tpu"),
        ("source", "guessed"),
        ("matrix_flops", {"float32": 1e9}),
        ("matrix_flops", {"": -1.0}),
        ("efficiency", [1.0]),
        ("efficiency", [0.0, 1.0]),
        ("made", {"on": 3}),
        ("costs", {"replay": 1.0}),
        ("costs", {"replay": {"op": "x"}}),
        ("entries", [["a", "b", "c", -1, 0, 1.0, 0.0]]),
        ("entries", [["a", "b", "c", 1, 0, True, 0.0]]),
        ("entries", [["a"]]),
        ("entries", 7),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, name: str, value: object):
    path = tmp_path / "toy.json"
    table().save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, name: value}))
    with pytest.raises(ProfileError, match="is not a valid cost table"):
        DeviceTable.load(path)


@pytest.mark.parametrize(
    ("name", "value", "unit"),
    [
        ("bandwidth", 4800.0, "bytes a second"),  # GB a second
        ("memory_bytes", 141, "bytes"),  # GB
        ("launch_s", 4.0, "seconds"),  # us
        ("matrix_flops", {"bfloat16": 989.4, "": 66.9}, "operations a second"),  # TFLOPS
    ],
)
def test_a_table_in_other_units_is_refused(tmp_path: Path, name: str, value: object, unit: str):
    path = tmp_path / "toy.json"
    table(**{name: value}).save(path)
    with pytest.raises(ProfileError, match=f"{name}.* cannot be {unit}: is it in another unit"):
        DeviceTable.load(path)


def test_large_blocks_of_cuda_keep_a_rest_of_up_to_one_mib():
    """As measured on an H200: the logits of a GPT (8192 x 50257, bfloat16) took 770,048 bytes more than they have."""
    mib = 2**20
    logits = 8192 * 50257 * 2
    assert cuda_block_bytes(logits) == logits + 770_048
    assert cuda_block_bytes(125 * mib) == 126 * mib
    assert cuda_block_bytes(16 * mib) == 16 * mib
    assert cuda_block_bytes(17 * mib - 512) == 17 * mib - 512  # more than 1 MiB is split off
    assert cuda_block_bytes(16 * mib + 512, is_whole=True) == 18 * mib
    assert cuda_block_bytes(9 * mib + 512) == 9 * mib + 512  # below 10 MiB segments are shared
    table = find_device("h100")
    assert table.allocated(125 * mib - 100) == 126 * mib
    allocator = CachingAllocator()
    for size in (logits, 125 * mib, 16 * mib, 17 * mib - 512, 9 * mib + 512):
        before = allocator.allocated_bytes
        allocator.malloc(size)
        assert allocator.allocated_bytes - before == cuda_block_bytes(size)
