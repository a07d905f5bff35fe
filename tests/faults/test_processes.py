"""Ctrl-C while solving, kill -9 while saving, data loaders in other processes, and very many steps."""

import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoac
from autoac.plans import Plan
from autoac_solver.records.profile import Profile
from tests.faults.injection import live_storages
from tests.small_models import assert_same, batch, make, step, tight_plan

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"blocks.{i}" for i in range(3)]

pytestmark = pytest.mark.usefixtures("one_thread")


def start_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "solver")])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )


# -- threads -----------------------------------------------------------------------------------------------------------

THREADS = """
import threading, torch, autoac
from torch import nn
def block():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
def work(model, sample):
    plan = autoac.plan(model, sample, "1GB")
    budget = (plan.record.unplanned_peak_bytes + plan.resident_bytes) // 2
    report = autoac.plan(model, sample, budget).verify(model, sample)
    print(report.ok, report.measured_peak_bytes == report.predicted_peak_bytes, flush=True)
# Made here, and alive to the end: what is made or dies in one thread is measured in another.
given = [(nn.Sequential(*(block() for _ in range(4))), torch.randn(256, 32)) for _ in range(3)]
threads = [threading.Thread(target=work, args=pair) for pair in given]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


OPTIMIZERS_IN_THREADS = """
import threading, torch, autoac
from torch import nn
given = [(nn.Linear(64, 256, bias=False), torch.randn(4, 64)) for _ in range(3)]
def work(model, sample):
    for _ in range(3):
        optimizer = torch.optim.Muon(model.parameters())
        print(autoac.profile(model, sample, optimizer=optimizer).tape[-1].workspace_bytes, flush=True)
threads = [threading.Thread(target=work, args=pair) for pair in given]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_that_profile_with_optimizers_at_once():
    """The workspace of an optimizer's matrix products is measured by the same profiler."""
    process = start_python(OPTIMIZERS_IN_THREADS)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert len(out.split()) == 9, err
    assert len(set(out.split())) == 1, out


def test_threads_that_plan_and_verify_at_once():
    """torch's profiler, by which memory is measured, breaks the process if two use it."""
    process = start_python(THREADS)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.split() == ["True"] * 6, err


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------

CURVE = """
import sys
from autoac_solver.plan.planning import plan_budgets
from autoac_solver.records.profile import Profile
profile = Profile.load(sys.argv[1])
seen = 0
def tell(what, share):
    global seen
    seen += 1
    print("ready" if seen == 5 else what, flush=True)
curve = plan_budgets(profile, points=10_000, gap=0.0, progress=tell)
frame = curve.frame
assert 0 < len(frame) < 10_000 and len(curve.plans) == len(frame)
print("rows", len(frame), flush=True)
"""


def test_ctrl_c_keeps_the_curve_so_far():
    """A real SIGINT: what was planned up to then is returned, and the process ends by itself."""
    process = start_python(CURVE, ROOT / "profiles" / "gpt-8-blocks-cpu.json")
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "ready":
            break
    out, errors = interrupted(process)
    assert process.returncode == 0, errors
    assert out.splitlines()[-1].startswith("rows "), (out[-300:], errors[-300:])


PLANNING = """
import sys
from autoac_solver.plan.planning import plan_profile
from autoac_solver.records.profile import Profile
profile = Profile.load(sys.argv[1])
print("ready", flush=True)
try:
    while True:
        plan_profile(profile, 250_000_000, gap=0.0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.2, 0.4])
def test_ctrl_c_stops_a_plan(delay_s: float):
    """A real SIGINT wherever the planning is just then."""
    process = start_python(PLANNING, ROOT / "profiles" / "gpt-8-blocks-cpu.json")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay_s)
    out, errors = interrupted(process)
    assert (process.returncode, out) == (0, "interrupted\n"), errors


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a process prints after Ctrl-C: a second one where Python lost the first.

    It does where the signal comes while it forgets a thread that has ended ("Exception ignored in WeakSet ...").
    """
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=60)
    finally:
        process.kill()


# -- kill -9 -----------------------------------------------------------------------------------------------------------

SAVING = """
import os, sys
from autoac_solver.records.plan import PlanRecord
first, second = PlanRecord.load(sys.argv[1]), PlanRecord.load(sys.argv[2])
print("ready", flush=True)
for _ in sys.stdin:
    child = os.fork()
    if not child:
        while True:
            first.save(sys.argv[3])
            second.save(sys.argv[3])
    print(child, flush=True)
    sys.stdin.readline()
    os.kill(child, 9)
    os.waitpid(child, 0)
    print("killed", flush=True)
"""


def test_killed_while_saving(tmp_path: Path):
    """The file is always one of the two plans, whole."""
    profile = Profile.load(ROOT / "profiles" / "gpt-8-blocks-cpu.json")
    plans = [autoac.solve(profile, budget) for budget in (300_000_000, 500_000_000)]
    for plan, name in zip(plans, "ab", strict=True):
        plan.save(tmp_path / f"{name}.json")
    target = tmp_path / "plan.json"
    process = start_python(SAVING, tmp_path / "a.json", tmp_path / "b.json", target)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    seen = set()
    for kill in range(30):
        print("start", file=process.stdin, flush=True)
        assert process.stdout.readline().strip().isdigit()
        while not target.exists():
            time.sleep(0.001)
        time.sleep(0.0007 * kill)
        print("kill", file=process.stdin, flush=True)
        assert process.stdout.readline() == "killed\n"
        seen.add(Plan.load(target).budget_bytes)
    process.communicate(timeout=30)
    assert seen <= {300_000_000, 500_000_000}


# -- data loaders ------------------------------------------------------------------------------------------------------


@functools.cache
def plan_for(engine: str) -> Plan:
    return tight_plan(autoac.profile(make(), batch()), engine, NAMES)


class Batches(Dataset[torch.Tensor]):
    """Batches that a worker makes, one of them through the planned model itself."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return batch(index) + self.model(batch(index))


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_data_loaders(engine: str, context: str):
    """Workers get a copy of a planned model, and the main process trains one meanwhile."""
    plan = plan_for(engine)
    teacher = plan.apply(make())
    expected = [Batches(make())[index] for index in range(4)]
    planned = plan.apply(make())
    step(planned)
    loader = DataLoader(Batches(teacher), batch_size=None, num_workers=2, multiprocessing_context=context)
    batches = list(loader)
    assert len(batches) == len(expected)
    for x, same in zip(batches, expected, strict=True):
        assert torch.equal(x, same)
        planned.seen.zero_()
        assert_same(step(planned, x), step(make(), x))


# -- very many steps ---------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("engine", ["replay", "sac"])
def test_ten_thousand_steps(engine: str):
    """No storage more, and the process no larger; under replay without any help from the garbage collector.

    Torch's own checkpoint, and so sac, leaves reference cycles in each step.
    """
    model, x = Tiny(), torch.ones(2, 4)
    plan = autoac.solve(autoac.profile(model, x), 10**9, engine=engine, regions=["inner"])
    record = plan.record
    steps: Any = tuple((name, True) for name, _ in record.regions[0].steps)
    region = type(record.regions[0])("inner", 0, 1, True, steps)
    planned = Plan(type(record)(**{**vars(record), "regions": (region,)})).apply(model)

    def train(count: int) -> None:
        for _ in range(count):
            planned(x).backward()
            planned.zero_grad(set_to_none=True)

    train(1000)
    storages, grown = live_storages(), []
    if engine == "replay":
        gc.disable()
    try:
        for _ in range(2):
            before = resident_bytes()
            train(5_000)
            grown.append(resident_bytes() - before)
    finally:
        gc.enable()
    assert live_storages() == storages
    # A leak of one storage a step, the smallest of which takes 64 bytes and its objects 400, would be 2.3 MB in either
    # half; what the allocator takes for itself, it takes once.
    assert min(grown) < 1_000_000, f"{grown} bytes more"
