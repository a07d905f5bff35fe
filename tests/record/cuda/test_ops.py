"""The ops that are recorded for CUDA on this build, against those that the CUDA build of torch 2.15.0 was seen to take.

`python -m tests.cuda_ops --write` makes the record, for all families and types; here a part of it is looked at.
"""

from __future__ import annotations

import functools
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoac
from autoac.execute.cross_entropy import lean
from autoac.record.cuda import ops as cuda_ops
from autoac.record.cuda.attention import EFFICIENT_SHARES_HEADS, choice
from autoac.record.cuda.ops import CudaOps, capability_elsewhere, capability_of
from autoac_solver.allocator.caching import rounded_size
from autoac_solver.allocator.options import parse_options
from tests.cuda_ops import attention
from tests.cuda_ops.__main__ import RECORDED
from tests.cuda_ops.families import ALL
from tests.cuda_ops.steps import kinds, run

CAPABILITIES = {"8.0": (8, 0), "9.0": (9, 0)}


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_attention_kernel_is_the_one_that_cuda_takes(capability: str):
    kernels = recorded()[capability]["attention"]
    assert len(kernels) > 2000
    assert len(set(kernels)) == (4 if capability == "9.0" else 3)
    for case, kernel in zip(attention.cases("meta"), kernels, strict=True):
        shares = case.key.shape[1] != case.query.shape[1] and kernel == attention.LETTERS["efficient"]
        expected = attention.LETTERS["math"] if shares and not EFFICIENT_SHARES_HEADS else kernel
        assert attention.LETTERS[choice(CAPABILITIES[capability], *case)] == expected, case


def test_the_record_is_of_all_families():
    for found in recorded().values():
        assert found["torch"].startswith("2.15.0+cu")
        assert set(found["families"]) == set(ALL)
        assert len(ALL) >= 20
        assert all(set(of_family) == set(kinds()) for of_family in found["families"].values())


@pytest.mark.parametrize(
    ("family", "kind", "capability"),
    [
        ("gpt2", "bfloat16", "9.0"),
        ("llama", "bfloat16", "9.0"),
        ("mixtral", "bfloat16", "8.0"),
        ("cnn_with_skips", "float32", "9.0"),
        ("cnn_with_skips", "bfloat16", "9.0"),
        ("plain_decoder", "bfloat16", "9.0"),
        ("plain_decoder", "bfloat16", "8.0"),
        ("plain_decoder", "autocast bfloat16", "9.0"),
        ("cnn_with_skips", "autocast float16", "8.0"),
        ("gpt2", "autocast float16", "9.0"),
    ],
)
def test_ops_and_what_is_saved_are_those_of_cuda(family: str, kind: str, capability: str):
    """To the shape, stride and type of each result."""
    ours = run(family, kind, torch.device("cpu"), CAPABILITIES[capability])
    assert ours.summary(family) == recorded()[capability]["families"][family][kind]


OF_A_RELEASE = {
    "view",
    "_unsafe_view",
    "lift_fresh",
    "fill_.Scalar",
    "fill_.Tensor",
    "ge.Scalar",
    "gt.Scalar",
}
"""Ops in which releases of torch differ: of a linear layer, of a number that is written into a slice, and the
comparison in a derivative."""


@pytest.mark.parametrize(
    ("family", "kind", "capability"),
    [
        ("whisper", "float32", "8.0"),
        ("torch_transformer", "bfloat16", "8.0"),
        ("clip", "bfloat16", "9.0"),
        ("many_casts", "autocast bfloat16", "9.0"),
        ("many_casts", "autocast float16", "9.0"),
    ],
)
def test_ops_and_saved_bytes_are_those_of_cuda(family: str, kind: str, capability: str):
    on_cuda = recorded()[capability]["families"][family][kind]
    ours = run(family, kind, torch.device("cpu"), CAPABILITIES[capability]).summary(family)
    assert ours["saved_bytes"] == on_cuda["saved_bytes"]
    counts = [{op: n for op, n in of["ops"].items() if op not in OF_A_RELEASE} for of in (ours, on_cuda)]
    assert counts[0] == counts[1]


def test_a_kernel_that_the_user_has_switched_off_is_not_taken():
    query = torch.empty(2, 4, 16, 32, dtype=torch.bfloat16, device="meta")
    arguments = (9, 0), query, query, query, None, 0.0, False, False
    assert choice(*arguments) == "cudnn"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
        assert choice(*arguments) == "efficient"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choice(*arguments) == "math"


@pytest.mark.parametrize(
    ("title", "capability"),
    [
        ("NVIDIA H200 SXM 141GB", (9, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA L4 24GB", (8, 9)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA GeForce RTX 3090", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("Tesla V100-SXM2-32GB", (7, 0)),
        ("Tesla T4", (7, 5)),
        ("a GPU of tomorrow", (9, 0)),
    ],
)
def test_capability_by_name(title: str, capability: tuple[int, int]):
    assert capability_of(title) == capability
    assert capability_elsewhere(None, torch.device("cpu")) is None


class Norms(nn.Module):
    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device_type = device_type
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device_type, dtype=torch.bfloat16):
            return self.norm(self.linear(x))


def casts(model: nn.Module, x: torch.Tensor) -> tuple[list[str], tuple[str, ...]]:
    """The types of what linear and norm make, recorded for an H200, and the notes."""
    profile = autoac.profile(model, x, device="h200")
    names = {"aten.addmm.default", "aten.native_layer_norm.default"}
    return [op.dtype for op in profile.tape if op.name in names], profile.notes


def test_recurrent_layers_are_told():
    model = nn.GRU(4, 4)
    profile = autoac.profile(
        model, torch.randn(3, 2, 4), loss=lambda out: out[0].sum(), mode="fake", device="h200"
    )
    assert any(note.startswith("gru runs in cuDNN on a GPU") for note in profile.notes)


def test_sizes_are_rounded_as_the_allocators_options_say(monkeypatch: pytest.MonkeyPatch):
    model, sample = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), torch.randn(1100, 300)
    for text in ("", "roundup_power2_divisions:4"):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", text)
        profile = autoac.profile(model, sample, mode="fake", device="h200")
        expected = rounded_size(sample.nbytes, parse_options(text))
        assert [s.bytes for s in profile.storage_table if s.kind == "Input"] == [expected]
    assert expected > sample.nbytes + 200_000


@pytest.mark.parametrize(
    ("norm", "name"),
    [
        (nn.BatchNorm2d(4), "cudnn_batch_norm"),
        (nn.BatchNorm2d(4, track_running_stats=False), "cudnn_batch_norm"),
        (nn.BatchNorm2d(4).eval(), "cudnn_batch_norm"),
        (nn.InstanceNorm2d(4, affine=True), "cudnn_batch_norm"),
        (nn.BatchNorm2d(4, affine=False), "native_batch_norm"),
        (nn.BatchNorm2d(4).bfloat16(), "native_batch_norm"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_which_batch_norm_cuda_takes(norm: nn.Module, name: str):
    """As `_select_batch_norm_backend` in aten/src/ATen/native/Normalization.cpp."""
    kind = next((p.dtype for p in norm.parameters()), torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 4, 1, dtype=kind), norm)
    profile = autoac.profile(model, torch.randn(2, 3, 8, 8, dtype=kind), mode="fake", device="h200")
    assert f"aten.{name}.default" in [op.name for op in profile.tape if not op.backward]


def test_norms_run_in_float32_as_on_cuda_whichever_autocast_the_model_enters():
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        around = casts(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), x)
    for dtypes, notes in (around, casts(Norms("cuda"), x), casts(Norms("cpu"), x)):
        assert dtypes == ["bfloat16", "float32"]
        assert not any("casts of the CPU" in note for note in notes)


def test_the_cpus_casts_are_back_afterwards_and_kept_for_other_threads():
    linear, norm, x = nn.Linear(8, 8), nn.LayerNorm(8), torch.randn(4, 8)

    def of_cpu() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x)
            return [norm(y).dtype, F.mse_loss(y, y).dtype, torch.cat([y, x]).dtype, y.pow(2).dtype]

    before, clear = of_cpu(), torch.clear_autocast_cache
    assert before == [torch.bfloat16, torch.float32, torch.float32, torch.bfloat16]
    with CudaOps((9, 0)), ThreadPoolExecutor(1) as pool:
        assert of_cpu() == [torch.float32] * 4
        assert pool.submit(of_cpu).result() == before
    assert of_cpu() == before
    assert torch.clear_autocast_cache is clear
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.autocast("cuda", dtype=torch.bfloat16)
    assert bool(caught) is not torch.cuda.is_available()


def test_casts_of_the_cpus_autocast_are_told_where_torch_cannot_replace_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_ops, "CAN_REPLACE_CASTS", False)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = casts(model, x)
    plain = casts(model, x)
    assert [["casts of the CPU" in note for note in of].count(True) for _, of in (cast, plain)] == [1, 0]


def test_cuda_refuses_binary_cross_entropy_under_autocast():
    x = torch.rand(4)
    with (
        CudaOps((9, 0)),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(RuntimeError, match="unsafe"),
    ):
        F.binary_cross_entropy(x, x)


def test_attention_inside_of_torchs_own_layer_is_put_back():
    layer = nn.MultiheadAttention(32, 4, dropout=0.1, batch_first=True)
    before = F.scaled_dot_product_attention, F.dropout
    x = torch.randn(2, 6, 32)
    with CudaOps((8, 0)), pytest.raises((NotImplementedError, RuntimeError)):  # the CPU has no such kernel
        layer(x, x, x, need_weights=False)
    assert (F.scaled_dot_product_attention, F.dropout) == before


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(x), target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_under_autocast_is_computed_as_on_each_device(dtype: torch.dtype):
    """The CPU's autocast casts the logits first, for which there is a lean loss; CUDA's casts what softmax returns."""
    target = torch.tensor([0, 2, 1])
    logits = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        loss, expected = autoac.cross_entropy(logits, target), F.cross_entropy(logits, target)
    assert torch.equal(loss, expected)
    assert type(loss.grad_fn) is not type(expected.grad_fn)
    order = {None: ["_to_copy", "_log_softmax"], "h100": ["_log_softmax", "_to_copy"]}
    for device, last in order.items():
        with torch.autocast("cpu", dtype=dtype):
            found = autoac.profile(Classifier(), (torch.randn(3, 4), target), device=device, mode="fake")
        ops = [op.name.split(".")[1] for op in found.tape]
        loss = ops.index("nll_loss_forward")
        assert ops[loss - 2 : loss] == last


def test_what_autocast_does_is_tried_without_a_trace():
    """In the first loss of a process, which may be recorded."""
    lean._found_cast.cache_clear()
    sample = torch.randn(3, 4), torch.tensor([0, 2, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = (autoac.profile(Classifier(), sample) for _ in range(2))
    assert [op.name for op in first.tape] == [op.name for op in second.tape]
    assert not [note for note in first.notes if "varies" in note]
