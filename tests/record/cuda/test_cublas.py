"""Workspaces of cuBLAS in profiles that are made for a GPU."""

import pytest
import torch
from torch import nn

import autoac
from autoac.record.cuda import cublas
from autoac.record.cuda.cublas import keeps_workspaces, workspace_bytes
from autoac_solver.records.format import format_bytes
from autoac_solver.records.profile import Profile

HOPPER = 32 * 2**20
EARLIER = 8_519_680


def profile(device: str = "h100", model: nn.Module | None = None) -> Profile:
    return autoac.profile(
        model or nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8), device=device
    )


def noted(found: Profile, words: str) -> list[str]:
    return [note for note in found.notes if words in note]


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.fixture
def torch_that_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0")


@pytest.mark.parametrize("major", [7, 8, 9, 10, 11, 12, 13])
def test_default_sizes(major: int):
    assert workspace_bytes(major) == (HOPPER if 9 <= major <= 12 else EARLIER)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (":4096:8", HOPPER),
        (":4096:2:16:8", EARLIER),
        (":16:8", 131072),
        (":0:0", 0),
        ("nonsense", EARLIER),
    ],
)
def test_configured_sizes(config: str, size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert workspace_bytes(8) == size


@pytest.mark.parametrize(
    ("version", "cache", "keeps"),
    [
        ("2.13.0+cpu", "", True),
        ("2.14.1", "0", True),
        ("2.15.0+cu132", "", False),
        ("2.16.0a0", "0", False),
        ("2.15.0", "1", True),
    ],
)
def test_releases_that_keep_them(version: str, cache: str, keeps: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", cache)
    assert keeps_workspaces() is keeps


@pytest.mark.usefixtures("torch_that_keeps")
def test_kept_ones_are_resident_one_for_each_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    without = profile()
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    found = profile()
    assert found.resident_bytes == without.resident_bytes + 2 * HOPPER
    assert found.peak_bytes == without.peak_bytes + 2 * HOPPER
    assert profile("a100").resident_bytes == without.resident_bytes + 2 * EARLIER
    assert noted(found, f"cuBLAS keeps for forward and backward, {format_bytes(HOPPER)} each")
    assert not noted(without, "cuBLAS")
    plan = autoac.solve(found, "1GB", budget_of="reserved")
    assert plan.predicted_reserved_bytes is not None
    assert plan.predicted_reserved_bytes >= plan.predicted_peak_bytes == found.peak_bytes
    assert "cuBLAS keeps for forward and backward" in plan.explain()

    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    assert profile().resident_bytes == found.resident_bytes + 2 * 2**20
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert profile().resident_bytes == found.resident_bytes + 4 * 2**20


@pytest.mark.usefixtures("torch_that_keeps")
def test_none_without_matrix_products_and_none_on_cpu():
    assert profile(model=nn.LayerNorm(8)).resident_bytes < 2000
    assert autoac.profile(nn.Linear(8, 8), torch.randn(4, 8)).resident_bytes < 1000


def test_from_2_15_on_they_are_alive_while_a_product_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cublas, "keeps_workspaces", lambda: False)
    found = profile()
    assert {op.name: op.workspace_bytes for op in found.tape if op.workspace_bytes} == {
        "aten.addmm.default": HOPPER,
        "aten.mm.default": HOPPER,
    }
    assert found.resident_bytes < 5000
    assert HOPPER < found.peak_bytes < HOPPER + 10_000
    assert noted(found, f"cuBLAS's workspace, {format_bytes(HOPPER)} while a matrix product runs")


def test_what_cudnn_takes_is_said_not_to_be_known():
    picture, model = torch.randn(1, 3, 8, 8), nn.Conv2d(3, 4, 3)
    assert noted(autoac.profile(model, picture, device="h100"), "workspaces of cuDNN")
    assert not noted(profile(), "cuDNN")
